"""Count optimizer steps that are skipped because their gradient norm is not finite, and stop the run after too many.

Every rank of a role's layout sees the same norms, so all of them count alike and raise together.
"""

from __future__ import annotations

import logging
from collections import Counter

from lightning_realloc.errors import ReallocError

log = logging.getLogger(__name__)


class SkippedSteps:
    """The number of steps in a row that each role has skipped."""

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def record_step(self, role: str) -> None:
        """Record a step that was taken."""
        self._in_a_row[role] = 0

    def record_skip(self, role: str, place: str, cause: str, *, limit: int | None, warns: bool) -> None:
        """Record a step that was skipped.

        Args:
            role: The model whose step it was.
            place: The iteration and the mini-batch, for messages.
            cause: The norm and the parameter, for messages.
            limit: Skipped steps in a row that stop the run; None: it never stops.
            warns: Whether this rank writes the warning.

        Raises:
            ReallocError: at the limit.
        """
        self._in_a_row[role] += 1
        count = self._in_a_row[role]
        if warns:
            log.warning("%s: skipped the optimizer step of %s: %s; skipped in a row: %d", role, place, cause, count)
        if limit is not None and count >= limit:
            raise ReallocError(
                f"{role}: the gradient norm was not finite in {count} optimizer steps in a row, "
                f"max_skipped_steps={limit}, last in {place}: {cause}. The weights are those before the first of them. "
                f"Lower the learning rate, look at the data and rewards of these mini-batches, or raise "
                f"max_skipped_steps in TrainOptions (None never stops)"
            )
