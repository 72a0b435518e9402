"""Filter tokens by top-k, top-p and min-p.

Sorting a vocabulary with its tokens costs ten times the rest of a step. So only weights are ranked, as many as hold the
nucleus, and the token is found by its weight. Equal weights rank by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FIRST_RANKS = (64, 1024)
"""Numbers of ranks to try before ranking the whole vocabulary."""
_LEAST_SHARE = 16
"""`topk` is faster than sorting if it takes at most one weight in this many."""
_ROUNDING = 1e-9
"""Bound on the relative difference of a vocabulary's sums in different orders."""
_THREADS_OF_NUMPY = 4
"""torch threads that sort float32 as fast as numpy does on one thread."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The largest weights of some rows, and how many of them are kept."""

    rows: Tensor
    """(R,) indices of the rows."""
    weights: Tensor
    """(R, V) in the order of the vocabulary."""
    ranked: Tensor
    """(R, K) largest weights, descending."""
    mass: Tensor
    """(R, K) float64 running sum of ``ranked``."""
    num_kept: Tensor
    """(R, 1) number of kept weights, at most K."""
    top_tokens: Tensor | None = None
    """(R, K) tokens of ``ranked`` if top-k chose them; None: equal weights rank by token."""

    def select(self, chosen: Tensor) -> Ranking:
        """Return the ranking of the rows at which ``chosen`` (R,) is True."""
        if chosen.all():
            return self
        return Ranking(*(part[chosen] for part in (self.rows, self.weights, self.ranked, self.mass, self.num_kept)))

    def kept_weights(self) -> Tensor:
        """Return the weights (R, V), zero for tokens that are not kept."""
        if self.top_tokens is not None:
            return torch.zeros_like(self.weights).scatter_(1, self.top_tokens, self._kept_of_top())
        last = self.num_kept - 1
        least = self.ranked.gather(1, last)
        is_after = torch.arange(self.weights.shape[1], device=last.device) > self._tokens_at(last)
        return self.weights.masked_fill((self.weights < least) | ((self.weights == least) & is_after), 0.0)

    def kept_by_token(self) -> tuple[Tensor, Tensor]:
        """Return candidates (R, C) in ascending order, and their weights, zero for tokens that are not kept."""
        if self.top_tokens is None:
            tokens = torch.arange(self.weights.shape[1], device=self.weights.device)
            return tokens.expand_as(self.weights), self.kept_weights()
        tokens, order = self.top_tokens.sort(dim=-1)
        return tokens, self._kept_of_top().gather(1, order)

    def _kept_of_top(self) -> Tensor:
        """Return ``ranked``, zero for weights that are not kept."""
        ranks = torch.arange(self.ranked.shape[1], device=self.ranked.device)
        return self.ranked.masked_fill(ranks >= self.num_kept, 0.0)

    def _tokens_at(self, ranks: Tensor) -> Tensor:
        """Return the tokens (R, 1) at ``ranks`` (R, 1), for rankings without top-k."""
        weight = self.ranked.gather(1, ranks)
        among_equals = ranks + 1 - (self.ranked > weight).sum(-1, keepdim=True)
        tokens = torch.searchsorted((self.weights == weight).cumsum(-1, dtype=torch.int32), among_equals.int())
        return tokens.clamp_max(self.weights.shape[1] - 1)


def rankings(weights: Tensor, *, top_k: int | None, top_p: float, min_p: float) -> Iterator[Ranking]:
    """Yield rankings of the rows of ``weights`` (B, V) float32, each row in one of them."""
    rows = torch.arange(weights.shape[0], device=weights.device)
    if top_k is not None and top_k < weights.shape[1]:
        ranked, tokens = weights.topk(top_k, dim=-1)
        yield _ranking(rows, weights, ranked, None, top_p, min_p, tokens)
        return
    for count in _FIRST_RANKS if top_p < 1.0 else ():
        if count * _LEAST_SHARE > weights.shape[1]:
            break
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        ranking = _ranking(rows, weights, weights.topk(count, dim=-1).values, total, top_p, min_p)
        inside = _holds_nucleus(ranking.mass, top_p * total)
        if inside.any():
            yield ranking.select(inside)
            rows, weights = rows[~inside], weights[~inside]
        # No later rank weighs more than the last one here. Stop if the next ranks cannot be enough for any row.
        most = ranking.mass[:, -1:] + _FIRST_RANKS[-1] * ranking.ranked[:, -1:]
        if not ((most > top_p * total)[:, 0] & ~inside).any():
            break
    if len(rows):
        yield _ranking(rows, weights, _descending(weights), None, top_p, min_p)


def _ranking(
    rows: Tensor, weights: Tensor, ranked: Tensor, total: Tensor | None, top_p: float, min_p: float,
    tokens: Tensor | None = None,
) -> Ranking:  # fmt: skip
    mass = ranked.cumsum(-1, dtype=torch.float64)
    num_kept = torch.full_like(rows, ranked.shape[1])[:, None]
    if top_p < 1.0:
        # A token is kept if the mass before it is below top_p, so the first one always is.
        point = top_p * (mass[:, -1:] if total is None else total)
        num_kept = num_kept.minimum(torch.searchsorted(mass, point) + 1)
    if min_p > 0.0:
        num_kept = num_kept.minimum((ranked >= min_p * ranked[:, :1]).sum(-1, keepdim=True).clamp_min(1))
    return Ranking(rows, weights, ranked, mass, num_kept, tokens)


def _holds_nucleus(mass: Tensor, point: Tensor) -> Tensor:
    """Return the rows (R,) whose first ranks reach ``point`` (R, 1), unless rounding decides at which rank."""
    is_clear = (mass - point).abs() > _ROUNDING * point
    return is_clear.all(-1) & (mass[:, -1] > point[:, 0])


def _descending(weights: Tensor) -> Tensor:
    """Return the weights (R, V) in descending order."""
    if weights.device.type == "cpu" and min(len(weights), torch.get_num_threads()) < _THREADS_OF_NUMPY:
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values
