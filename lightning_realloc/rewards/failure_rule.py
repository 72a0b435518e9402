"""What becomes of a completion that could not be judged, through no fault of its own?

A server was down, a process was killed: no number says how good the completion is, and 0 would be a lie that is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_realloc.errors import RewardError

OnFailure = Literal["fail", "mask"]
"""``"fail"`` ends the run; ``"mask"`` leaves the sample out of advantages and losses, and counts it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands for the reward of a completion that could not be judged."""

    reason: str
    """What happened, for the log."""


Outcome = float | None | Failed
"""Of one completion: its reward, None where the function does not apply, or why there is none."""


class FailureRule:
    """Applies a policy to batch after batch.

    Args:
        name: Of the reward, for messages.
        on_failure: What a completion that could not be judged does to the run.
        give_up_after: Batches in a row of which nothing could be judged, after which ``"mask"`` ends the run, too: it
            would go on without learning.
    """

    def __init__(self, name: str, on_failure: OnFailure, give_up_after: int) -> None:
        if on_failure not in get_args(OnFailure):
            raise RewardError(f"on_failure={on_failure!r} must be one of {', '.join(map(repr, get_args(OnFailure)))}")
        if give_up_after < 1:
            raise RewardError(f"give_up_after={give_up_after} batches must be at least 1")
        self._name = name
        self._on_failure = on_failure
        self._give_up_after = give_up_after
        self._lost_batches = 0

    def refuse(self, outcomes: Sequence[Outcome], num_completions: int) -> None:
        """Raise RewardError for a failure among the first outcomes of a batch, where that ends the run."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if failures and self._on_failure == "fail":
            raise RewardError(
                f"{self._name}: {len(failures)} of {num_completions} completions could not be judged; "
                f"{failures[0].reason}; on_failure='mask' would leave such samples out and go on"
            )

    def settle(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of a batch, failures among them where they are to be masked.

        Raises:
            RewardError: for a failure that ends the run.
        """
        self.refuse(outcomes, len(outcomes))
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        self._lost_batches = self._lost_batches + 1 if failures and len(failures) == len(outcomes) else 0
        if self._lost_batches >= self._give_up_after:
            raise RewardError(
                f"{self._name}: nothing could be judged in {self._lost_batches} batches in a row; "
                f"{failures[0].reason}; see to that and resume, or raise give_up_after={self._give_up_after}"
            )
        return list(outcomes)
