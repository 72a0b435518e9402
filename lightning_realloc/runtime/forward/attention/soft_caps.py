"""Attention whose scores are capped, by torch's operations: torch's kernels have no caps.

Source: Gemma 2, arXiv:2408.00118, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap * tanh(scores / softcap)``, or the scores themselves without a cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def attend_capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    softcap: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    scaling: float | None = None,
) -> Tensor:
    """Return the output (B, H, T, D_v) of queries (B, H, T, D) on keys and values (B, H_kv, S, D or D_v).

    Args:
        mask: Broadcasts to (B, H, T, S). Boolean, True where a query sees a key, or added to the scores.
        softcap: Bound of the scores.
        scaling: Factor of the products. None means one over the square root of D.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    products = query @ key.transpose(-1, -2)
    scores = capped(products.to(torch.promote_types(products.dtype, torch.float32)) * scaling, softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        hidden = torch.finfo(scores.dtype).min  # not -inf, of which queries without keys would become NaN
        scores = scores.masked_fill(~mask, hidden) if mask.dtype is torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1), dropout)
    return weights.to(value.dtype) @ value
