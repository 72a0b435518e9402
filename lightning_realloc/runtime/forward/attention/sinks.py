"""Attention with sinks by torch's kernels, which have none.

A sink is a learned score per head that joins the softmax's denominator and has no value. Source: gpt-oss,
arXiv:2508.10925, section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ADDED_DIMS = 8
"""Dims that heads get for the sink. One is enough; CUDA's kernels need a multiple of 8."""


def attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    scaling: float | None = None,
) -> Tensor:
    """Return the output (B, H, T, D_v) of queries (B, H, T, D) on keys and values (B, H_kv, S, D or D_v).

    Sinks are one more token of every sequence, the first, which windows do not exclude. A softmax stays the same if all
    scores decrease alike: other keys lose the sink, and the added one scores 0.

    Args:
        mask: Broadcasts to (B, H, T, S). Boolean, True where a query sees a key, or added to the scores.
        sinks: (H,) scores. None: attention without sinks.
        scaling: Factor of the products. None means one over the square root of D.
    """
    grouped = query.shape[1] != key.shape[1]
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=grouped
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    lowered = (sinks / -scaling).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat([query, lowered], -1), (0, _ADDED_DIMS - 1, 1, 0))
    key = F.pad(F.pad(key, (0, _ADDED_DIMS), value=1.0), (0, 0, 1, 0))
    values = F.pad(value, (0, _ADDED_DIMS, 1, 0))
    if mask is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=mask.dtype is torch.bool)
    output = F.scaled_dot_product_attention(
        query, key, values, mask, dropout, is_causal, scale=scaling, enable_gqa=grouped
    )
    return output[:, :, 1:, : value.shape[-1]]


Bounds = tuple[Tensor, Tensor, int, int]
"""Cumulative lengths of queries and of keys, (sequences + 1,) int32, and the longest of both."""


class AttendWithSinks(torch.autograd.Function):
    """Causal attention by flash kernels for packed sequences; see `attend_varlen`.

    The kernels' backward computes weights as exp(score - log-sum-exp), and the mean gradient of a row from its
    output. So with the log-sum-exp and the output that include the sink, its gradients include the sink, too.
    Source: Dao, arXiv:2307.08691, algorithm 2.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Bounds, scaling: float, seen: int
    ) -> Tensor:
        ctx.options = {"scale": scaling, "window_size_left": seen, "window_size_right": 0}
        *ends, longest, longest_keys = bounds
        ctx.call = longest, longest_keys, 0.0, seen < 0
        output, logsumexp, ctx.rng_state, ctx.unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, *ctx.call, False, **ctx.options
        )
        joint = torch.logaddexp(logsumexp, sinks.float()[:, None])  # (H, N)
        attended: Tensor = (output * (logsumexp - joint).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, *ends, attended, joint)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (q, k, v, sinks, *ends, output, joint) = gradients, ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, output, joint, *ends, *ctx.call, ctx.rng_state, ctx.unused, **ctx.options
        )
        weights = (sinks.float()[:, None] - joint).exp()
        by_sink = -(weights * (gradient.float() * output.float()).sum(-1).T).sum(1)
        return *grads, by_sink.to(sinks.dtype), None, None, None
