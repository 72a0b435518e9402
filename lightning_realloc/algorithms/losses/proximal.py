"""Denominator of probability ratios: the policy at the rollout, or the trained model before its first step.

Both have the same parameters, but engine and training round differently. Ratios to the engine's log-probabilities
correct for that, with the engine's rounding as noise. Ratios to the trained model's own start at exactly 1.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import TrainOptions

RatioTo = Literal["behaviour", "proximal"]
"""The policy that sampled the tokens, or the one that the update stays close to. Hilton et al., arXiv:2110.00641."""
PROXIMAL_LOGPROBS = "proximal_logprobs"


def learns_in_one_step(options: TrainOptions) -> bool:
    """Return whether an iteration takes a single optimizer step."""
    return options.num_epochs * options.num_minibatches == 1


def old_logprobs(logprobs: Tensor, batch: PackedBatch, *, ratio_to: RatioTo, one_step: bool) -> Tensor:
    """Return the (N,) log-probabilities in the denominator of ratios of ``logprobs`` (N,).

    With a single step, the trained model's log-probabilities before it are those of this forward pass.
    """
    if ratio_to == "behaviour":
        return batch["behaviour_logprobs"]
    return logprobs.detach() if one_step else batch[PROXIMAL_LOGPROBS]
