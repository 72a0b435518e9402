"""Average token losses into a mini-batch's loss, as parts that sum over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from lightning_realloc.algorithms.losses.functional import masked_sum, sequence_mean_sum
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import Average, Totals

LossAverage = Literal["sequence", "token", "constant", "sum"]
"""Average of token losses over a mini-batch.

- ``"sequence"``: mean over each response's tokens, then over responses. Shao et al., arXiv:2402.03300, eq. 3. It
  weights tokens of long responses less, which Liu et al. call a bias.
- ``"token"``: mean over all tokens. Yu et al., arXiv:2503.14476, eq. 8.
- ``"constant"``: mean over responses of their token sums, over the largest response length. Liu et al.,
  arXiv:2503.20783.
- ``"sum"``: mean over responses of their token sums. arXiv:2602.05261 (LUSPO).
"""


def averaged_loss(
    values: Tensor, batch: PackedBatch, totals: Totals, *, average: LossAverage, max_tokens: int | None = None
) -> Tensor:
    """Return this micro-batch's part of the mean of (N,) ``values`` over the response tokens of the mini-batch.

    ``max_tokens`` is the divisor of ``"constant"``.
    """
    if average == "token":
        return masked_sum(values, batch.response_mask) / totals.num_tokens
    if average == "sequence":
        summed = sequence_mean_sum(values, batch.response_mask, batch.sample_index, len(batch))
        return summed / totals.num_sequences
    per_response = masked_sum(values, batch.response_mask) / totals.num_sequences
    if average == "sum":
        return per_response
    assert max_tokens is not None, "a constant average needs its constant"
    return per_response / max_tokens


def token_metrics(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Average]:
    """Return the mean of each metric's (N,) values over the tokens in the mask."""
    return {name: Average(masked_sum(value, mask), mask.sum()) for name, value in values.items()}
