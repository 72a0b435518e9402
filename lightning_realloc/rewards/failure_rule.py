"""Policy for completions whose reward could not be computed, such as after a server error or a killed process.

A reward of 0 would be learnt as a bad completion, so such samples either end the run or are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_realloc.errors import RewardError, require_choice

OnFailure = Literal["fail", "mask"]
"""``"fail"`` ends the run; ``"mask"`` excludes the sample from advantages and losses, and counts it."""


GIVE_UP_AFTER = 3
"""Default number of consecutive batches without any result after which ``"mask"`` ends the run."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Result for a completion whose reward could not be computed.

    Example:
        >>> def reward(prompts, completions, **columns):
        ...     return [Failed("empty completion") if not text else float(len(text)) for text in completions]
        >>> reward(["Hi"], [""])
        [Failed(reason='empty completion')]
    """

    reason: str
    """Cause, for log and error messages."""


Outcome = float | None | Failed
"""Result for one completion: its reward, None if the function does not apply, or the failure."""


class FailureRule:
    """Apply the failure policy of one reward to consecutive batches.

    Args:
        name: Name of the reward, for messages.
        on_failure: Policy for completions without a result.
        give_up_after: Number of consecutive batches without any result after which ``"mask"`` also ends the run, which
            would otherwise continue without learning.
    """

    def __init__(self, name: str, on_failure: OnFailure, give_up_after: int) -> None:
        require_choice("on_failure", on_failure, get_args(OnFailure), RewardError)
        if give_up_after < 1:
            raise RewardError(f"give_up_after={give_up_after} batches must be at least 1")
        self._name = name
        self._on_failure = on_failure
        self._give_up_after = give_up_after
        self._num_failed_batches = 0

    def raise_on_failure(self, outcomes: Sequence[Outcome], num_completions: int) -> None:
        """Raise RewardError for a failure among partial results of a batch, if the policy is ``"fail"``."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if failures and self._on_failure == "fail":
            raise RewardError(
                f"{self._name}: {len(failures)} of {num_completions} completions could not be judged; "
                f"{failures[0].reason}; set on_failure='mask' to leave such samples out and continue"
            )

    def apply(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the results of a batch, including failures to mask.

        Raises:
            RewardError: for a failure that ends the run.
        """
        self.raise_on_failure(outcomes, len(outcomes))
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        self._num_failed_batches = self._num_failed_batches + 1 if failures and len(failures) == len(outcomes) else 0
        if self._num_failed_batches >= self._give_up_after:
            raise RewardError(
                f"{self._name}: no completion could be judged in {self._num_failed_batches} consecutive batches; "
                f"{failures[0].reason}; correct the cause and resume, or raise give_up_after={self._give_up_after}"
            )
        return list(outcomes)
