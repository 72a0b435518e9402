"""Simulate plans in one process; tensors are dictionaries from local index to value."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lightning_realloc.layout import ModelLayout, ModelSpec
from lightning_realloc.realloc import PublicationPlan, Transfer

Index = tuple[int, ...]
Local = dict[Index, int]
Tensors = dict[tuple[int, str], Local]
"""(rank, parameter) -> local tensor."""


def box(offset: Index, shape: Index) -> Iterable[Index]:
    """Return the indices of a box, in row-major order."""
    return itertools.product(*(range(start, start + size) for start, size in zip(offset, shape, strict=True)))


def weights(layout: ModelLayout) -> Tensors:
    """Return every rank's local tensors; the value of an element is its flattened global index."""
    tensors: Tensors = {}
    for rank in layout.layout.ranks:
        for name in layout.names(rank):
            local: Local = {}
            shape = layout.model.param(name).shape
            for piece in layout.pieces(name, rank):
                inside = box(piece.offset, piece.region.shape)
                for at, index in zip(inside, box(piece.region.starts, piece.region.shape), strict=True):
                    local[at] = flat(index, shape)
            tensors[rank, name] = local
    return tensors


def flat(index: Index, shape: Index) -> int:
    """Return the row-major position of an index."""
    position = 0
    for at, size in zip(index, shape, strict=True):
        position = position * size + at
    return position


def carry_out(transfers: Iterable[Transfer], source: Tensors, target: ModelLayout) -> Tensors:
    """Return the target's tensors after every transfer, hop 0 first; fail if an element is written twice or missing."""
    result: Tensors = {(rank, name): {} for rank in target.layout.ranks for name in target.names(rank)}
    for transfer in sorted(transfers, key=lambda transfer: transfer.hop):
        held = (source if transfer.hop == 0 else result)[transfer.sender, transfer.param]
        local = result[transfer.receiver, transfer.param]
        sent = box(transfer.sender_offset, transfer.shape)
        for at, origin in zip(box(transfer.receiver_offset, transfer.shape), sent, strict=True):
            assert at not in local, "an element is written twice"
            local[at] = held[origin]
    return result


def publish(plan: PublicationPlan, source: Tensors) -> Tensors:
    """Return the target's tensors as views of the shards that the writes filled."""
    shards: list[Local] = [{} for _ in plan.shards]
    for write in plan.writes:
        read = box(write.writer_offset, write.shape)
        for at, origin in zip(box(write.shard_offset, write.shape), read, strict=True):
            assert at not in shards[write.shard], "an element is written twice"
            shards[write.shard][at] = source[write.writer, write.param][origin]
    return {(rank, shard.param): shards[index] for index, shard in enumerate(plan.shards) for rank in shard.ranks}


def elements(tensors: Tensors, ranks: Iterable[int]) -> set[tuple[str, int]]:
    """Return all (parameter, global position) pairs that any of the ranks holds."""
    wanted = set(ranks)
    return {(name, value) for (rank, name), local in tensors.items() if rank in wanted for value in local.values()}


def reordered(layout: ModelLayout, order: Mapping[str, int]) -> ModelLayout:
    """Return the same layout of a model whose parameters are listed in another order."""
    params = tuple(sorted(layout.model.params, key=lambda param: order[param.name]))
    model: ModelSpec = replace(layout.model, params=params)
    return ModelLayout(model, layout.layout)
