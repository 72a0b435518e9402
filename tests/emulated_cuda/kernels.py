"""Operators that torch has for CUDA alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Register the operators for the emulated device."""
    _library.impl("_flash_attention_forward", _flash_forward, "CUDA")
    _library.impl("_flash_attention_backward", _flash_backward, "CUDA")
    _library.impl("_scaled_dot_product_fused_attention_overrideable", _attention_forward, "CUDA")
    _library.impl("_scaled_dot_product_fused_attention_overrideable_backward", _attention_backward, "CUDA")
    _library.impl("histc", _histc, "CUDA")
    _library.impl("_grouped_mm", _grouped_mm, "CUDA")
    _library.impl("mm.dtype", _mm, "CUDA")
    _library.impl("addmm.dtype_out", _addmm_out, "CUDA")


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    output = torch.empty_like(query)
    for part in _sequences(query, key, value, cum_seq_q, cum_seq_k, is_causal, options):
        output[part.queries] = torch.einsum("hqk,khd->qhd", part.shares, part.v).to(query.dtype)
    empty = query.new_empty(0)
    return output, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float), empty, empty, empty


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: Any, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = [torch.zeros_like(tensor, dtype=torch.float) for tensor in (query, key, value)]
    for part in _sequences(query, key, value, cum_seq_q, cum_seq_k, is_causal, options):
        grad = grad_out[part.queries].float()
        grad_shares = torch.einsum("qhd,khd->hqk", grad, part.v)
        inner = (grad_shares * part.shares).sum(-1, keepdim=True)
        grad_scores = part.shares * (grad_shares - inner) * part.scale
        grads[0][part.queries] = torch.einsum("hqk,khd->qhd", grad_scores, part.k)
        grads[1][part.keys] = _sum_of_groups(torch.einsum("hqk,qhd->khd", grad_scores, part.q), key.shape[1])
        grads[2][part.keys] = _sum_of_groups(torch.einsum("hqk,qhd->khd", part.shares, grad), key.shape[1])
    return tuple(grad.to(query.dtype) for grad in grads)


class _Sequence(NamedTuple):
    queries: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    shares: Tensor
    """(H, queries, keys)."""
    scale: float


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, is_causal: bool, options: dict[str, Any]
) -> Iterator[_Sequence]:
    """Return each sequence's part of the tensors (N, H, D), with as many heads of keys as of queries."""
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left = -1 if left is None else left
    right = 0 if is_causal else -1 if right is None else right
    scale = options.get("scale") or query.shape[-1] ** -0.5
    bounds_q, bounds_k, lengths_k = _on_host(ends_q, ends_k, options.get("seqused_k"))
    for index in range(len(bounds_q) - 1):
        queries = slice(bounds_q[index], bounds_q[index + 1])
        begin_k = bounds_k[index]
        keys = slice(begin_k, begin_k + lengths_k[index] if lengths_k else bounds_k[index + 1])
        q, k, v = query[queries].float(), key[keys].float(), value[keys].float()
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        places = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
        distance = torch.arange(len(k), device=q.device) - places
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden |= distance > right
        if left >= 0:
            hidden |= distance < -left
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield _Sequence(queries, keys, q, k, v, scores.masked_fill(hidden, -torch.inf).softmax(-1), scale)


def _on_host(*tensors: Tensor | None) -> list[list[int]]:
    """Return the tensors' numbers, which kernels read without waiting; none for None."""
    with _unwatched():
        return [[] if tensor is None else tensor.tolist() for tensor in tensors]


def _sum_of_groups(grad: Tensor, num_heads: int) -> Tensor:
    """Return the gradients (N, H_kv, D) of heads that several heads (N, H, D) of queries share."""
    return grad.unflatten(1, (num_heads, -1)).sum(2)


# ---- attention of `scaled_dot_product_attention`; what kernels keep in registers is kept on the host here
def _attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    with _unwatched():
        _, _, v, shares, _ = _shares(query, key, value, attn_bias, is_causal, scale)
        output = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
        output.copy_(shares @ v)
    empty, none = query.new_empty(0), torch.empty(0, dtype=torch.int64)
    sums = query.new_zeros(query.shape[:3], dtype=torch.float)
    return output, sums, none, none, query.shape[2], key.shape[2], none, none, empty


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
    grad_input_mask: Sequence[bool], out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    with _unwatched():
        q, k, v, shares, factor = _shares(query, key, value, attn_bias, is_causal, scale)
        grad = grad_out.cpu().float()
        grad_shares = grad @ v.mT
        grad_scores = shares * (grad_shares - (grad_shares * shares).sum(-1, keepdim=True))
        found = (grad_scores @ k * factor, grad_scores.mT @ q * factor, shares.mT @ grad)
        groups = query.shape[1] // key.shape[1]
        by_head = (found[0], *(part.unflatten(1, (-1, groups)).sum(2) for part in found[1:]))
        tensors = (query, key, value)
        grads = [torch.empty_like(own).copy_(part) for own, part in zip(tensors, by_head, strict=True)]
    return *grads, None


def _shares(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return queries, keys and values on the host in float32, with as many heads; the weights; and the scale."""
    q, k, v = (tensor.cpu().float() for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * factor
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        own = mask.cpu()
        scores = scores.masked_fill(~own, -torch.inf) if own.dtype is torch.bool else scores + own
    return q, k, v, scores.softmax(-1).nan_to_num(0.0), factor


@contextmanager
def _unwatched() -> Iterator[None]:
    """Let the emulation of a kernel read what the kernel reads without waiting."""
    mode = torch.ops.emulated_cuda.get_wait_mode()
    is_capturing = torch.ops.emulated_cuda.is_capturing()
    torch.ops.emulated_cuda.set_wait_mode(0)
    torch.ops.emulated_cuda.set_capturing(False)
    try:
        yield
    finally:
        torch.ops.emulated_cuda.set_wait_mode(mode)
        torch.ops.emulated_cuda.set_capturing(is_capturing)


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Return a histogram also of integers, which the CPU's operator refuses."""
    with _unwatched():
        return values.cpu().double().histc(bins, min, max).to(values)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the products of groups of rows, which the CPU's operator makes by reading their bounds."""
    with _unwatched():
        bounds = None if offs is None else offs.cpu()
        return torch._grouped_mm(a.cpu(), b.cpu(), offs=bounds, out_dtype=out_dtype).to(a.device)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the product in another dtype."""
    return a.to(out_dtype) @ b.to(out_dtype)


def _addmm_out(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """Write the product in another dtype, with an added matrix."""
    return out.copy_(torch.addmm(added.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha))
