"""Which mean of its tokens' values is a mini-batch's loss? As parts that add up over micro-batches and ranks."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lightning_realloc.algorithms.functional import masked_sum, sequence_mean_sum
from lightning_realloc.runtime.packing import PackedBatch
from lightning_realloc.runtime.training import Totals

LossAverage = Literal["sequence", "token"]
"""The mean over every response's tokens, and then over the responses; or over all tokens."""


def averaged_loss(values: Tensor, batch: PackedBatch, totals: Totals, *, average: LossAverage) -> Tensor:
    """Return this micro-batch's part of the mean of (N,) ``values`` over the response tokens of the mini-batch."""
    if average == "token":
        return masked_sum(values, batch.response_mask) / totals.num_tokens
    summed = sequence_mean_sum(values, batch.response_mask, batch.sample_index, len(batch))
    return summed / totals.num_sequences
