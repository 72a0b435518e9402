"""Dynamic sampling: replace groups whose rewards are all equal by further prompts.

A group whose responses all earn the same has no advantages. Groups with different rewards are kept until there are as
many as a batch was meant to have. Every further batch of the loader is one more round. The loader goes on as always,
and only the last round takes a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_realloc.algorithms.rollout.partial_rollouts import samples_from_state, samples_state
from lightning_realloc.algorithms.settings import check_choice, check_not_negative
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Fill batches up with groups whose rewards differ.

    Source: Yu et al., arXiv:2503.14476, §3.2.
    """

    max_refills: int = 4
    """Further batches of the loader that are asked for one step, at most."""
    when_short: Literal["train", "fail"] = "train"
    """What happens when groups are still missing after them: a step with those there are, or an error."""

    def __post_init__(self) -> None:
        check_not_negative(max_refills=self.max_refills)
        check_choice("when_short", self.when_short, ("train", "fail"))


class Refill:
    """The groups that are kept for the next step.

    Args:
        settings: When to stop asking for more.
        group_size: Responses per prompt.
    """

    def __init__(self, settings: DynamicSampling, *, group_size: int) -> None:
        self._settings = settings
        self._group_size = group_size
        self._kept: list[Samples] = []
        self._num_rounds = 0
        self._num_wanted = 0
        self.facts: dict[str, float] = {}
        """What to log of the latest round."""

    @property
    def _num_kept(self) -> int:
        """Groups."""
        return sum(len(part) for part in self._kept) // self._group_size

    def add(self, samples: Samples, *, num_minibatches: int) -> Samples | None:
        """Take a round's judged samples, all of every group; return those of a step once there are enough.

        Groups beyond those that were wanted are left out: in the next step they would be of an older policy.

        Raises:
            DataError: where they are still missing and that is not allowed, or hardly any is there.
        """
        num_groups = len(samples) // self._group_size
        if not self._num_rounds:
            self._num_wanted = num_groups
        self._num_rounds += 1
        told = samples.select(differing(samples.tensor("rewards"), samples.tensor("prompt_id")).nonzero().flatten())
        if len(told):
            self._kept.append(told)
        self.facts = {
            "refills": float(self._num_rounds - 1),
            "differing_groups": len(told) / len(samples),
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
        """Keep nothing, and count rounds from the first one."""
        self._kept, self._num_rounds = [], 0

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {
            "kept": [samples_state(part) for part in self._kept],
            "num_rounds": self._num_rounds,
            "num_wanted": self._num_wanted,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` was of."""
        self._kept = [samples_from_state(part) for part in state["kept"]]
        self._num_rounds, self._num_wanted = int(state["num_rounds"]), int(state["num_wanted"])


def differing(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return (B,) bool: whether a sample's group has rewards that differ. A reward of NaN is missing, and says nothing.

    Args:
        rewards: (B,).
        groups: (B,) integers; samples with the same one answer the same prompt.
    """
    members, index = torch.unique(groups, return_inverse=True)
    most, least = (
        rewards.new_full((len(members),), bound).scatter_reduce_(0, index, rewards.nan_to_num(nan=bound), how)
        for bound, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    )
    return (most > least)[index]
