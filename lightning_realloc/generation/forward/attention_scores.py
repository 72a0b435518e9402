"""Turn attention scores into weights for families whose softmax torch's fused attention does not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What one layer does with the products of its queries and keys."""

    scaling: float | None
    """They are multiplied by it; None: one over the square root of the head size."""
    softcap: float | None = None
    """Then ``softcap * tanh(score / softcap)`` takes their place. Source: Gemma 2, arXiv:2408.00118, section 2."""
    sinks: Tensor | None = None
    """(H,) One more score per query head, for a key without a value: weights then sum to less than 1. Source: gpt-oss,
    arXiv:2508.10925, section 2.2."""

    @property
    def are_plain(self) -> bool:
        """Whether torch's fused attention computes the weights."""
        return self.softcap is None and self.sinks is None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor) -> Tensor:
        """Return (B, H, T, D_v) what queries (B, H, T, D) find in keys and values (B, H_kv, S, D).

        Where query heads of a key-value head were laid out as rows of one, H is H_kv, and T holds the first of these
        heads' rows, then the second's. ``mask`` broadcasts to (B, H, T, S): boolean, True where a query may look, or
        added to the scores.
        """
        if self.are_plain:
            grouped = queries.shape[1] != keys.shape[1]
            return scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=grouped
            )
        repeats = queries.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = (tensor.repeat_interleave(repeats, 1) for tensor in (keys, values))
        scores = (queries @ keys.transpose(-1, -2)).float()
        scores = scores * (queries.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        if self.sinks is not None:
            scores = torch.cat([scores, self._sink_column(scores)], -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values

    def _sink_column(self, scores: Tensor) -> Tensor:
        """Return the sinks as the scores (B, H, T, 1) of one key more."""
        assert self.sinks is not None
        batch, heads, rows, _ = scores.shape
        by_row = self.sinks.float().view(heads, -1).repeat_interleave(rows // (len(self.sinks) // heads), 1)
        return by_row.expand(batch, heads, rows)[..., None]
