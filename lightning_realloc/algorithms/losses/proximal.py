"""Denominator of probability ratios: the policy that drew the tokens, or the trained model before it learns.

Both have the same weights, but not the same arithmetic. The engine that draws tokens multiplies other shapes, perhaps
in another dtype or layout. Ratios to its log-probabilities correct for that, and carry the rounding of its batches.
Ratios to the trained model's own are 1 before the first optimizer step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError

RatioTo = Literal["behaviour", "proximal"]
"""Names after Hilton et al., arXiv:2110.00641: the policy that acted, and that which the update stays close to."""
PROXIMAL_LOGPROBS = "proximal_logprobs"


def learns_in_one_step(options: TrainOptions) -> bool:
    """Return whether an iteration takes one optimizer step: then no loss is of weights that have moved."""
    return options.num_epochs * options.num_minibatches == 1


def with_proximal_call(calls: tuple[ModelFunctionCall, ...], *, method: str) -> tuple[ModelFunctionCall, ...]:
    """Return the calls with ``actor.infer`` besides, which ``method`` does and whose product the training needs."""
    score = ModelFunctionCall("actor.infer", "infer", "actor", method, ("rollout",), (PROXIMAL_LOGPROBS,))
    needing = (
        replace(call, needs=(*call.needs, PROXIMAL_LOGPROBS)) if call.name == "actor.train" else call for call in calls
    )
    return (*needing, score)


def old_logprobs(logprobs: Tensor, batch: PackedBatch, *, ratio_to: RatioTo, one_step: bool) -> Tensor:
    """Return (N,) what ratios of ``logprobs`` (N,) are taken to.

    Where there is ``one_step``, the trained model's log-probabilities before it are those of this very forward pass.
    """
    if ratio_to == "behaviour":
        return batch["behaviour_logprobs"]
    return logprobs.detach() if one_step else batch[PROXIMAL_LOGPROBS]


def refuse_stale(ratio_to: RatioTo, max_staleness: int) -> None:
    """Raise ConfigError where responses are of older weights and ratios would not say so."""
    if ratio_to == "proximal" and max_staleness:
        raise ConfigError(
            f"ratio_to='proximal' leaves out what was learnt since a response was drawn, and max_staleness="
            f"{max_staleness} draws them from older weights; use ratio_to='behaviour', or max_staleness=0"
        )
