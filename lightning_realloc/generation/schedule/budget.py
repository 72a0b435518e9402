"""Budgets of tokens and seconds, for one generation call and for the rollout of one iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Literal, get_args

from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation.core.sampling import check_kind, is_of_kind
from lightning_realloc.setting_hints import suggest_settings

LateResponses = Literal["finish", "drop"]
"""What becomes of a response that was carried on as often as it may be: finished whatever it takes, or left out."""


@suggest_settings({})
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBudget:
    """How much each rank that generates may spend in one iteration; what is unfinished then goes on in the next one.

    A rank goes on nevertheless until it has finished a sample for every mini-batch, or all that it has.
    """

    tokens: int | None = None
    """Most tokens of the model on each rank that generates samples of its own, counting no environment's."""
    seconds: float | None = None
    """Most seconds."""
    max_staleness: int = 4
    """Iterations that a response may be carried on: none of its tokens comes from an older policy."""
    late: LateResponses = "finish"
    """Of a response that would be carried on for longer: ``"finish"`` spends what it takes, ``"drop"`` leaves it, or
    its group, out."""

    def __post_init__(self) -> None:
        if self.tokens is None and self.seconds is None:
            raise ConfigError("a RolloutBudget needs tokens= or seconds=; without a bound leave rollout_budget out")
        for name, kind, wanted in (
            ("tokens", (Integral, NoneType), "a whole number or None"),
            ("seconds", (Real, NoneType), "a number or None"),
            ("max_staleness", Integral, "a whole number"),
        ):
            if not is_of_kind(getattr(self, name), kind):
                raise ConfigError(f"RolloutBudget({name}={getattr(self, name)!r}) must be {wanted}")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"RolloutBudget(tokens={self.tokens}) must be at least 1")
        if self.seconds is not None and not self.seconds > 0:  # NaN too
            raise ConfigError(f"RolloutBudget(seconds={self.seconds}) must be positive")
        if self.max_staleness < 1:
            raise ConfigError(
                f"RolloutBudget(max_staleness={self.max_staleness}) carries nothing on; use at least 1, or leave "
                f"rollout_budget out"
            )
        if self.late not in get_args(LateResponses):
            raise ConfigError(f"RolloutBudget(late={self.late!r}) must be one of {', '.join(get_args(LateResponses))}")


class Budget:
    """Tokens and seconds of one call, from its beginning."""

    def __init__(
        self,
        tokens: int | None,
        seconds: float | None,
        clock: Callable[[], float],
        may_stop: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin now; None: without bound. While ``may_stop`` returns False, the call goes on whatever was spent.

        Raises:
            GenerationError: for a budget that allows nothing.
        """
        check_kind("token_budget", tokens, Real, "a number", optional=True)
        check_kind("seconds_budget", seconds, Real, "a number", optional=True)
        if tokens is not None and tokens < 1:
            raise GenerationError(f"token_budget={tokens} must be at least 1; leave it out to finish every response")
        if seconds is not None and not seconds > 0:
            raise GenerationError(f"seconds_budget={seconds} must be positive; leave it out to finish every response")
        self._tokens = math.inf if tokens is None else tokens
        self._clock = clock
        self._may_stop = may_stop
        self._end = None if seconds is None else clock() + seconds

    def seconds_left(self) -> float:
        """Return the seconds that are left, infinity where they are not bounded."""
        return math.inf if self._end is None or not self._may_stop() else self._end - self._clock()

    def is_spent(self, num_tokens: int) -> bool:
        """Return whether so many tokens, or the seconds so far, use it up."""
        return (num_tokens >= self._tokens and self._may_stop()) or self.seconds_left() <= 0
