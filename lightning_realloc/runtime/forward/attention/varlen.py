"""Causal attention over packed sequences by torch's flash kernels, in half precision on CUDA."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor

from lightning_realloc.runtime.forward.attention.sinks import AttendWithSinks

_MAX_HEAD_DIM = 256


def can_attend_varlen(query: Tensor, value: Tensor) -> bool:
    """Return whether torch has the kernels and they support such queries (…, D) and values (…, D_v)."""
    same_width = query.shape[-1] == value.shape[-1] <= _MAX_HEAD_DIM
    return query.device.type == "cuda" and same_width and _half_dtype(value) is not None and bool(_varlen_options())


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    keys: tuple[Tensor, int] | None = None,
    scaling: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the (N, H, D) output of causal attention inside each sequence.

    Args:
        query: (N, H, D), the sequences one after another.
        key: (N, H_kv, D).
        value: (N, H_kv, D).
        cu_seqlens: (sequences + 1,) int32 cumulative lengths.
        longest: Tokens of the longest sequence.
        keys: The same two values of the keys, of which queries are the last ones. None: they are as many.
        scaling: Factor of the products. None means one over the square root of D.
        window: Number of last tokens that each token sees, including itself. None means all.
        sinks: (H,) scores that join the softmax's denominator, without a value. None means none.
    """
    from torch.nn.attention.varlen import varlen_attn

    dtype = _half_dtype(value)
    q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _varlen_options():
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    key_seqlens, longest_keys = keys or (cu_seqlens, longest)
    bounds = cu_seqlens, key_seqlens, longest, longest_keys
    seen = -1 if window is None else window - 1
    if sinks is not None:
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        return cast(Tensor, AttendWithSinks.apply(q, k, v, sinks, bounds, scaling, seen))
    options["window_size"] = (seen, 0)
    output = varlen_attn(q, k, v, *bounds, scale=scaling, **options)
    return cast(Tensor, output)


def _half_dtype(value: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype of the attention (autocast's if enabled, else that of ``value``); None for others."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


@functools.cache
def _varlen_options() -> frozenset[str]:
    """Return the parameters of torch's function; empty if it is missing or lacks required ones."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch built without it, or older than 2.10
        return frozenset()
    options = frozenset(inspect.signature(varlen_attn).parameters)
    return options if {"scale", "window_size"} <= options else frozenset()
