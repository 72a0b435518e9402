"""Dynamic sampling: replace groups of equal rewards by further prompts.

A group of equal rewards has no advantages. Groups with different rewards are kept until they fill a batch. Each further
batch of the loader is a round, and only the last round takes a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_realloc.algorithms.settings import check_not_negative
from lightning_realloc.batch.samples import Samples, samples_from_state, samples_state
from lightning_realloc.errors import DataError, require_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Fill batches with groups of different rewards.

    Source: Yu et al., arXiv:2503.14476, §3.2.
    """

    max_refills: int = 4
    """Largest number of further batches of the loader for one step."""
    when_short: Literal["train", "fail"] = "train"
    """Action if groups are still missing: ``"train"`` takes a step with the others, ``"fail"`` raises an error."""

    def __post_init__(self) -> None:
        check_not_negative(max_refills=self.max_refills)
        require_choice("when_short", self.when_short, ("train", "fail"))


class Refill:
    """Groups that are kept for the next step.

    Args:
        settings: Limits on refills.
        group_size: Responses per prompt.
    """

    def __init__(self, settings: DynamicSampling, *, group_size: int) -> None:
        self._settings = settings
        self._group_size = group_size
        self._kept: list[Samples] = []
        self._num_rounds = 0
        self._num_wanted = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the latest round."""

    @property
    def _num_kept(self) -> int:
        """Number of kept groups."""
        return sum(len(part) for part in self._kept) // self._group_size

    def add(self, samples: Samples, *, num_minibatches: int) -> Samples | None:
        """Add scored samples of a round, in whole groups; return those for a step, or None if more are needed.

        Surplus groups are discarded, since in the next step they would be from an older policy.

        Raises:
            DataError: for missing groups with ``when_short="fail"``, and for fewer samples than mini-batches.
        """
        num_groups = len(samples) // self._group_size
        if not self._num_rounds:
            self._num_wanted = num_groups
        self._num_rounds += 1
        useful = samples.select(differing(samples.tensor("rewards"), samples.tensor("prompt_id")).nonzero().flatten())
        if len(useful):
            self._kept.append(useful)
        self.metrics = {
            "refills": float(self._num_rounds - 1),
            "differing_groups": len(useful) / len(samples),
            "waiting_groups": float(self._num_kept),
        }
        if self._num_kept < self._num_wanted and self._num_rounds <= self._settings.max_refills:
            return None
        self._check(num_minibatches)
        chosen = Samples.concatenate(self._kept)
        self._kept, self._num_rounds = [], 0
        return chosen.select(torch.arange(min(len(chosen), self._num_wanted * self._group_size)))

    def _check(self, num_minibatches: int) -> None:
        found, wanted, rounds = self._num_kept, self._num_wanted, self._num_rounds
        short = found < wanted and self._settings.when_short == "fail"
        if short or found * self._group_size < num_minibatches:
            raise DataError(
                f"{found} of {wanted} groups have rewards that differ, after {rounds} batches of prompts: the others "
                f"are all right or all wrong. Use prompts of another difficulty, larger groups (sampling.n), or raise "
                f"max_refills={self._settings.max_refills}" + ("; when_short='train' takes what there is" * short)
            )

    def forget(self) -> None:
        """Discard all groups and rounds."""
        self._kept, self._num_rounds = [], 0

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {
            "kept": [samples_state(part) for part in self._kept],
            "num_rounds": self._num_rounds,
            "num_wanted": self._num_wanted,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        self._kept = [samples_from_state(part) for part in state["kept"]]
        self._num_rounds, self._num_wanted = int(state["num_rounds"]), int(state["num_wanted"])


def differing(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return (B,) bool: whether the rewards in a sample's group differ. NaN rewards are ignored.

    Args:
        rewards: (B,) rewards.
        groups: (B,) integers, equal for responses to the same prompt.
    """
    members, index = torch.unique(groups, return_inverse=True)
    most, least = (
        rewards.new_full((len(members),), bound).scatter_reduce_(0, index, rewards.nan_to_num(nan=bound), how)
        for bound, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    )
    return (most > least)[index]
