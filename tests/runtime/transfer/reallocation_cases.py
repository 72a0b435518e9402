"""A small model that is sharded in every way, and a naive computation of every rank's local tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_realloc.layout import Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 10, 4, 2, 3, 13, 31


def odd_model(num_blocks: int = 2) -> ModelSpec:
    """Odd sizes, fused blocks, fewer kv heads than tp (fused and alone too), and a shard that fsdp4 leaves empty."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    params = [ParamSpec("embed", (VOCABULARY, WIDTH), sharded(TensorParallelCut(0)), "input")]
    for block in range(num_blocks):
        fused = TensorParallelCut(0, HEADS + 2 * KV_HEADS, True, (query, key, key))
        one_head = TensorParallelCut(0, HEADS + 2, True, (query, HEAD_DIM, HEAD_DIM))
        for name, shape, cut in (
            ("qkv", (query + 2 * key, WIDTH), fused),
            ("qkv_bias", (query + 2 * key,), fused),
            ("multi_query", (query + 2 * HEAD_DIM, WIDTH), one_head),
            ("key", (key, WIDTH), TensorParallelCut(0, KV_HEADS, True)),
            ("out", (WIDTH, query), TensorParallelCut(1, HEADS)),
            ("gate_up", (2 * INNER, WIDTH), TensorParallelCut(0, None, False, (INNER, INNER))),
            ("down", (WIDTH, INNER), TensorParallelCut(1)),
            ("norm", (WIDTH,), None),
        ):
            params.append(ParamSpec(f"layers.{block}.{name}", shape, sharded(cut), "block", block))
    params.append(ParamSpec("scale", (3,), sharded(), "output"))
    params.append(ParamSpec("head", (VOCABULARY, WIDTH), sharded(TensorParallelCut(0)), "output"))
    return ModelSpec(tuple(params), num_blocks)


def lay_out(text: str, model: ModelSpec | None = None) -> ModelLayout:
    return ModelLayout(model or odd_model(), Layout.parse(text))


def full_tensors(model: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {param.name: torch.randn(param.shape, generator=generator) for param in model.params}


def local_reference(full: Mapping[str, Tensor], layout: ModelLayout, rank: int) -> dict[str, Tensor]:
    """Return the rank's local tensors, computed by torch.chunk and narrow only."""
    if rank not in layout.layout:
        return {}
    dims, at = layout.layout.dims, layout.layout.coordinate(rank)
    held = {}
    for param in layout.model.params:
        if at.pp not in layout.stages(param.name):
            continue
        tensor = full[param.name]
        if param.tensor_cut is not None and dims.tp > 1:
            tensor = _cut(tensor, param.tensor_cut, dims.tp, at.tp)
        if dims.fsdp > 1:
            tensor = _chunk(tensor, 0, dims.fsdp, at.fsdp)
        held[param.name] = tensor.contiguous().clone()
    return held


def _cut(tensor: Tensor, cut: TensorParallelCut, tp: int, index: int) -> Tensor:
    parts = []
    total = tensor.shape[cut.dim]
    for block in tensor.split(list(cut.block_sizes or (total,)), dim=cut.dim):
        size = block.shape[cut.dim]
        if cut.num_units is None:
            parts.append(_chunk(block, cut.dim, tp, index))
            continue
        units = cut.num_units * size // total
        if units >= tp:
            parts.append(_chunk(block, cut.dim, tp, index))
        else:
            parts.append(_chunk(block, cut.dim, units, index * units // tp))
    return torch.cat(parts, dim=cut.dim)


def _chunk(tensor: Tensor, dim: int, parts: int, index: int) -> Tensor:
    chunks = torch.chunk(tensor, parts, dim=dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
