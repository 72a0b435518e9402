"""How much may one call spend before it returns what it has?"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_realloc.errors import GenerationError


class Budget:
    """Tokens and seconds of one call, from its beginning."""

    def __init__(self, tokens: int | None, seconds: float | None, clock: Callable[[], float]) -> None:
        """Begin now; None: without bound.

        Raises:
            GenerationError: for a budget that allows nothing.
        """
        if tokens is not None and tokens < 1:
            raise GenerationError(f"token_budget={tokens} must be at least 1; leave it out to finish every response")
        if seconds is not None and not seconds > 0:
            raise GenerationError(f"seconds_budget={seconds} must be positive; leave it out to finish every response")
        self._tokens = math.inf if tokens is None else tokens
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def seconds_left(self) -> float:
        """Return the seconds that are left, infinity where they are not bounded."""
        return math.inf if self._end is None else self._end - self._clock()

    def is_spent(self, num_tokens: int) -> bool:
        """Return whether so many tokens, or the seconds so far, use it up."""
        return num_tokens >= self._tokens or self.seconds_left() <= 0
