"""Intersect the pieces of two layouts, once for every family of parameters with the same shape and cuts.

A model repeats the same few shapes in every block, so a handful of families describes a whole reallocation.
``planner`` chooses the sender of each intersection, ``publication`` its writer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ModelLayout, Piece

Offset = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """The intersection of one piece of the source and one piece of the target."""

    shape: tuple[int, ...]
    source_offset: Offset
    """First index of the cell in the source's local tensors."""
    target_offset: Offset
    """First index of the cell in the target's local tensors."""
    holders: tuple[int, ...]
    """Ranks that hold the source's piece."""
    receivers: tuple[int, ...]
    """Ranks that need the target's piece, including those that are also holders."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TargetShard:
    """A distinct local tensor of the target and the cells that fill it.

    Two shards may share a cell: for example, ranks with different query heads and the same key-value head.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters with the same shape, cuts and stages on both sides."""

    names: tuple[str, ...]
    """Parameter names in natural order: "layers.2" comes before "layers.10"."""
    cells: tuple[Cell, ...]
    """Every distinct cell, once."""
    shards: tuple[TargetShard, ...]


def match_families(source: ModelLayout, target: ModelLayout) -> tuple[Family, ...]:
    """Return the families of a reallocation, largest first. The order of the parameters has no influence.

    Raises PlanError when the two models do not have the same parameters.
    """
    _check_models(source, target)
    members: dict[tuple[object, ...], list[str]] = {}
    for name in sorted((param.name for param in source.model.params), key=natural_key):
        before, after = source.model.param(name), target.model.param(name)
        key = (before.shape, before.cuts, after.cuts, source.stages(name), target.stages(name))
        members.setdefault(key, []).append(name)
    families = [_make_family(source, target, tuple(names)) for names in members.values()]
    sizes = {family.names[0]: source.model.param(family.names[0]).numel * len(family.names) for family in families}
    return tuple(sorted(families, key=lambda family: (-sizes[family.names[0]], natural_key(family.names[0]))))


def natural_key(name: str) -> tuple[str | int, ...]:
    """Return a sort key that compares the numbers in a name as numbers."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name)))


def _check_models(source: ModelLayout, target: ModelLayout) -> None:
    before = {param.name: param.shape for param in source.model.params}
    after = {param.name: param.shape for param in target.model.params}
    for name in sorted(before.keys() ^ after.keys()):
        side = "source" if name in before else "target"
        raise PlanError(
            f"both layouts must describe one model, but only the {side} has {name!r}; use the same ModelSpec"
        )
    for name, shape in before.items():
        if after[name] != shape:
            raise PlanError(
                f"{name!r} has shape {shape} in the source but {after[name]} in the target; use the same ModelSpec"
            )


def _make_family(source: ModelLayout, target: ModelLayout, names: tuple[str, ...]) -> Family:
    held = _ranks_by_piece(source, names[0])
    cells = {piece: tuple(_cells(piece, ranks, held)) for piece, ranks in _ranks_by_piece(target, names[0]).items()}
    shards = []
    for shard, ranks in target.holders(names[0]):
        filling = tuple(cell for piece in shard.pieces for cell in cells[piece])
        assert sum(cell.numel for cell in filling) == math.prod(shard.shape), f"{names[0]}: source must fill target"
        shards.append(TargetShard(shard.shape, ranks, filling))
    return Family(names, tuple(cell for filling in cells.values() for cell in filling), tuple(shards))


def _ranks_by_piece(layout: ModelLayout, name: str) -> dict[Piece, tuple[int, ...]]:
    """Return the distinct pieces of a parameter, which never overlap, with the ranks that hold each."""
    ranks: dict[Piece, tuple[int, ...]] = {}
    for shard, held_by in layout.holders(name):
        for piece in shard.pieces:
            ranks[piece] = ranks.get(piece, ()) + held_by
    return ranks


def _cells(wanted: Piece, receivers: tuple[int, ...], held: Mapping[Piece, tuple[int, ...]]) -> Iterator[Cell]:
    for piece, holders in held.items():
        common = wanted.region.intersect(piece.region)
        if common is not None:
            yield Cell(
                common.shape, _offset_in(piece, common.starts), _offset_in(wanted, common.starts), holders, receivers
            )


def _offset_in(piece: Piece, starts: Offset) -> Offset:
    dims = zip(starts, piece.region.starts, piece.offset, strict=True)
    return tuple(start - first + offset for start, first, offset in dims)
