"""Operators that torch has for CUDA alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


# ---- attention; what a GPU's kernel keeps in registers is kept on the host, where nobody counts it
def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    output, scale = torch.empty_like(query), options.get("scale")
    sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float)
    with _unwatched():
        for queries, keys, mask in _sequences(cum_seq_q, cum_seq_k, is_causal, options):
            parts = tuple(map(_as_batch, (query[queries], key[keys], value[keys])))
            output[queries] = _as_row(_attended(*parts, mask, scale)).to(output)
            sums[:, queries] = _scores(*parts, mask, scale)[3][0].logsumexp(-1).to(sums)
    empty = query.new_empty(0)
    return output, sums, empty, empty, empty


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: Any, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads, scale = tuple(map(torch.zeros_like, (query, key, value))), options.get("scale")
    with _unwatched():
        for queries, keys, mask in _sequences(cum_seq_q, cum_seq_k, is_causal, options):
            parts = map(_as_batch, (grad_out[queries], query[queries], key[keys], value[keys]))
            saved = _as_batch(out[queries]), logsumexp[None, :, queries]
            by_part = _gradients(*parts, mask, scale, saved)
            for grad, rows, found in zip(grads, (queries, keys, keys), by_part, strict=True):
                grad[rows] = _as_row(found).to(grad)
    return grads


def _sequences(
    ends_q: Tensor, ends_k: Tensor, is_causal: bool, options: dict[str, Any]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Return the rows of each sequence's queries and keys, and which keys (queries, keys) a query sees."""
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left = -1 if left is None else left
    right = 0 if is_causal else -1 if right is None else right
    used = options.get("seqused_k")
    bounds_q, bounds_k, lengths_k = ends_q.tolist(), ends_k.tolist(), None if used is None else used.tolist()
    for index in range(len(bounds_q) - 1):
        queries, begin_k = slice(bounds_q[index], bounds_q[index + 1]), bounds_k[index]
        keys = slice(begin_k, begin_k + lengths_k[index] if lengths_k else bounds_k[index + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        distance = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
        mask = torch.ones_like(distance, dtype=torch.bool)
        if right >= 0:
            mask &= distance <= right
        if left >= 0:
            mask &= distance >= -left
        yield queries, keys, mask


def _as_batch(rows: Tensor) -> Tensor:
    """Return a sequence (T, H, D) as a batch (1, H, T, D)."""
    return rows.transpose(0, 1)[None]


def _as_row(batch: Tensor) -> Tensor:
    """Return a batch (1, H, T, D) as a sequence (T, H, D)."""
    return batch[0].transpose(0, 1)


def _attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    output = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
    with _unwatched():
        output.copy_(_attended(query, key, value, _causal(query, key) if is_causal else attn_bias, scale))
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
        found = _gradients(grad_out, query, key, value, _causal(query, key) if is_causal else attn_bias, scale)
        grads = [torch.empty_like(own).copy_(part) for own, part in zip((query, key, value), found, strict=True)]
    return *grads, None


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """Return which keys (queries, keys) a query sees; torch's operators take no other mask beside it."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the output (B, H, T, D) on the host."""
    _, _, v, scores, _ = _scores(query, key, value, mask, scale)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def _gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None,
    saved: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by queries, keys and values on the host; heads that share keys add theirs.

    ``saved`` are output and log-sum-exp of the forward, from which flash kernels compute weights again.
    """
    q, k, v, scores, factor = _scores(query, key, value, mask, scale)
    grad, groups = grad_out.cpu().float(), query.shape[1] // key.shape[1]
    shares = scores.softmax(-1).nan_to_num(0.0) if saved is None else (scores - saved[1].cpu()[..., None]).exp()
    output = shares @ v if saved is None else saved[0].cpu().float()
    grad_scores = shares * (grad @ v.mT - (grad * output).sum(-1, keepdim=True)) * factor
    by_key, by_value = (part.unflatten(1, (-1, groups)).sum(2) for part in (grad_scores.mT @ q, shares.mT @ grad))
    return grad_scores @ k, by_key, by_value


def _scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return queries, keys and values on the host in float32, with as many heads; the scores; and the scale."""
    q, k, v = (tensor.cpu().float() for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * factor
    if mask is not None:
        own = mask.cpu()
        scores = scores.masked_fill(~own, -torch.inf) if own.dtype is torch.bool else scores + own
    return q, k, v, scores, factor


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
