"""Exclude responses without a reward. A missing reward is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples


def drop_unscored(batch: PackedBatch, column: str) -> PackedBatch:
    """Return the batch without the responses whose ``column`` is NaN: masked in ``response_mask``, 0 in the column.

    Call it after the forward pass: a pack in which nothing is left still needs gradients of zero. ``counted_places``
    stay those of the forward.
    """
    values = batch[column]
    missing = values.isnan()
    by_token = of_tokens(missing, batch)
    columns = {**batch.columns, column: values.masked_fill(missing, 0.0)}
    return replace(batch, response_mask=batch.response_mask & ~by_token, columns=columns)


def of_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the (N,) values of tokens, from values per token or per response."""
    return values if values.shape[0] == batch.num_tokens else batch.per_token(values)


def estimate_scored(
    samples: Samples, scores: Tensor, compute: Callable[[Samples], Mapping[str, Column]]
) -> dict[str, Column]:
    """Return the columns that ``compute`` makes of the samples with a score, and NaN for the others.

    Args:
        samples: B samples.
        scores: (B,), NaN where missing.
        compute: Makes floating-point columns of samples, sequences as long as the responses. Its own NaN values become
            infinity, see :func:`never_missing`.
    """
    missing = scores.isnan().cpu()
    if not bool(missing.any()):
        return {name: _computed(column) for name, column in compute(samples).items()}
    rows = (~missing).nonzero().flatten()
    made = compute(samples.select(rows))
    return {name: _spread(_computed(column), rows, samples) for name, column in made.items()}


def never_missing(values: Tensor) -> Tensor:
    """Return the values with infinity for NaN.

    NaN means that a response has no reward. A NaN from a model or an overflow would silently exclude the response. An
    infinite loss has a gradient that is not finite, so its step is skipped and counted.
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
