"""Which part of which source shard makes up which target shard? Answered once for all parameters laid out alike.

A model repeats the same few shapes in every block, so the geometry of a reallocation is that of a handful of
families. Who sends what is decided in ``planner``, who writes what in ``publication``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import LocalShard, ModelLayout, Piece

Offset = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A box that lies in one source shard and in one target shard."""

    shape: tuple[int, ...]
    source_offset: Offset
    """Where the box begins in the source's local tensor."""
    target_offset: Offset
    """Where the box begins in the target's local tensor."""
    holders: tuple[int, ...]
    """Ranks with the source shard."""
    receivers: tuple[int, ...]
    """Ranks with the target shard, those that are holders too."""

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TargetShard:
    """A distinct shard of the target and the cells that fill it."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters with the same shape, cuts and stages on both sides."""

    names: tuple[str, ...]
    """In natural order, so that "layers.2" comes before "layers.10"."""
    shards: tuple[TargetShard, ...]

    @property
    def cells(self) -> Iterator[Cell]:
        """The cells of all shards."""
        return (cell for shard in self.shards for cell in shard.cells)


def match_families(source: ModelLayout, target: ModelLayout) -> tuple[Family, ...]:
    """The families of a reallocation, those with most elements first, whatever the order of the parameters.

    Raises PlanError when the two models do not have the same parameters.
    """
    _check_models(source, target)
    members: dict[tuple[object, ...], list[str]] = {}
    for name in sorted((param.name for param in source.model.params), key=natural_key):
        before, after = source.model.param(name), target.model.param(name)
        key = (before.shape, before.tp, after.tp, source.stage(name), target.stage(name))
        members.setdefault(key, []).append(name)
    families = [Family(tuple(names), _target_shards(source, target, names[0])) for names in members.values()]
    sizes = {family.names[0]: source.model.param(family.names[0]).numel * len(family.names) for family in families}
    return tuple(sorted(families, key=lambda family: (-sizes[family.names[0]], natural_key(family.names[0]))))


def natural_key(name: str) -> tuple[str | int, ...]:
    """Sort key that compares the numbers in a name as numbers."""
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


def _target_shards(source: ModelLayout, target: ModelLayout, name: str) -> tuple[TargetShard, ...]:
    held = [(piece, ranks) for shard, ranks in source.holders(name) for piece in shard.pieces]
    shards = []
    for shard, ranks in target.holders(name):
        cells = tuple(_cells(shard, ranks, held))
        assert sum(cell.numel for cell in cells) == math.prod(shard.shape), f"{name}: the source must fill the target"
        shards.append(TargetShard(shard.shape, ranks, cells))
    return tuple(shards)


def _cells(shard: LocalShard, receivers: tuple[int, ...], held: list[tuple[Piece, tuple[int, ...]]]) -> Iterator[Cell]:
    for wanted in shard.pieces:
        for piece, holders in held:
            common = wanted.region.intersect(piece.region)
            if common is not None:
                yield Cell(
                    common.shape,
                    _offset_in(piece, common.starts),
                    _offset_in(wanted, common.starts),
                    holders,
                    receivers,
                )


def _offset_in(piece: Piece, starts: Offset) -> Offset:
    return tuple(start - first + at for start, first, at in zip(starts, piece.region.starts, piece.offset, strict=True))
