"""Measure the learning signal of an iteration's rewards, and warn if there is none for several iterations."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS
from lightning_realloc.algorithms.rollout.dynamic_sampling import differing
from lightning_realloc.batch.samples import Samples

FLAT_ITERATIONS_BEFORE_WARNING = 5
"""Iterations in a row without a signal after which a run warns. A larger value warns later, and of fewer bad starts."""


def signal_summary(rewards: Tensor, groups: Tensor | None, *, name: str) -> dict[str, Tensor]:
    """Return ``<name>_std`` of all rewards and, for groups of several responses, ``frac_<name>_zero_std``.

    Args:
        rewards: (B,) rewards; NaN is left out.
        groups: (B,) integers, equal for responses to the same prompt; None: rewards are not compared in groups.
        name: Name of the rewards in metrics.
    """
    known = rewards[~rewards.isnan()].float()
    summary = {f"{name}_std": known.std() if len(known) > 1 else known.new_zeros(())}
    if groups is not None and len(groups.unique()) < len(groups):
        summary[f"frac_{name}_zero_std"] = 1.0 - differing(rewards, groups).float().mean()
    return summary


class SignalWatch:
    """Warns once if rewards give no signal for `FLAT_ITERATIONS_BEFORE_WARNING` iterations in a row."""

    def __init__(self) -> None:
        self._num_flat = 0
        self._has_warned = False

    def record(self, samples: Samples, rewards: Tensor, *, has_signal: bool) -> None:
        """Record an iteration.

        Args:
            samples: Its samples.
            rewards: (B,) their rewards.
            has_signal: Whether rewards differ where the algorithm compares them.
        """
        if not len(samples):
            return
        self._num_flat = 0 if has_signal else self._num_flat + 1
        if self._num_flat < FLAT_ITERATIONS_BEFORE_WARNING or self._has_warned:
            return
        self._has_warned = True
        truncated = (samples.tensor("finish_reason") == FINISH_REASONS.index("length")).float().mean()
        rank_zero_warn(
            f"rewards gave no signal in the last {self._num_flat} iterations: all that are compared were equal (the "
            f"mean is {float(rewards.nanmean()):.4g}), and their gradient is 0. Likely causes: a reward function that "
            f"never finds the answer, or finds it always (RolloutTable shows responses with their rewards); prompts "
            f"that are all too hard or too easy; responses that are cut off before their answer "
            f"({float(truncated):.0%} reached max_new_tokens); a temperature near 0"
        )
