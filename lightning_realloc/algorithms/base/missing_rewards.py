"""Leave out responses without a reward: it is NaN, and is never made a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.moved_modules import moved_names

__getattr__ = moved_names(__name__)


def drop_unscored(batch: PackedBatch, column: str) -> PackedBatch:
    """Return the batch without the responses whose ``column`` is NaN: not in ``response_mask``, and 0 in the column.

    Ask for it after the forward pass: a pack of which nothing is left must still have gradients, of zero.
    """
    values = batch[column]
    missing = values.isnan()
    by_token = missing if missing.shape[0] == batch.num_tokens else batch.per_token(missing)
    columns = {**batch.columns, column: values.masked_fill(missing, 0.0)}
    return replace(batch, response_mask=batch.response_mask & ~by_token, columns=columns)


def estimate_scored(
    samples: Samples, scores: Tensor, compute: Callable[[Samples], Mapping[str, Column]]
) -> dict[str, Column]:
    """Return what ``compute`` makes of the samples that have a score, and NaN in every column for the others.

    Args:
        samples: B samples.
        scores: (B,), NaN where there is none.
        compute: Makes floating-point columns of samples, sequences as long as the responses. A NaN that it makes for
            a token becomes infinity, see :func:`never_missing`.
    """
    missing = scores.isnan().cpu()
    if not bool(missing.any()):
        return {name: _computed(column) for name, column in compute(samples).items()}
    rows = (~missing).nonzero().flatten()
    made = compute(samples.select(rows))
    return {name: _spread(_computed(column), rows, samples) for name, column in made.items()}


def never_missing(values: Tensor) -> Tensor:
    """Return computed values with infinity for NaN.

    NaN says that nobody judged a response. A NaN that models or overflows made must not pass for that: the response
    would be left out without a word. A loss of infinity has a gradient that is not finite, and its step is skipped.
    """
    return values.masked_fill(values.isnan(), math.inf)


def _computed(column: Column) -> Column:
    return Ragged(never_missing(column.values), column.lengths) if isinstance(column, Ragged) else column


def _spread(column: Column, rows: Tensor, samples: Samples) -> Column:
    assert not isinstance(column, tuple), "python objects have no NaN"
    if isinstance(column, Tensor):
        whole = column.new_full((len(samples), *column.shape[1:]), math.nan)
        whole[rows.to(column.device)] = column
        return whole
    lengths = samples.ragged("response_ids").lengths
    kept = torch.zeros(len(samples), dtype=torch.bool).index_fill(0, rows, True)
    values = column.values.new_full((int(lengths.sum()), *column.values.shape[1:]), math.nan)
    values[torch.repeat_interleave(kept, lengths).to(values.device)] = column.values
    return Ragged(values, lengths)
