"""Plan a reallocation through shared memory: one writer for every box of every shared shard.

On one host a target shard needs to exist once, however many ranks read it, and nothing is sent. Every rank writes boxes
of its source tensors, and together the ranks write each distinct shard once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_realloc.layout import ModelLayout
from lightning_realloc.realloc.families import Cell, Family, match_families
from lightning_realloc.realloc.planner import MAX_CHOICES, check_element_bytes, locate_ranks, plan_digest


@dataclass(frozen=True, slots=True)
class SharedShard:
    """One distinct local tensor of the target, stored once."""

    param: str
    shape: tuple[int, ...]
    """Local shape; it may have no elements."""
    ranks: tuple[int, ...]
    """Target ranks that use this shard as their local tensor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of one box from a rank's source tensor into a shared shard."""

    param: str
    shape: tuple[int, ...]
    writer: int
    writer_offset: tuple[int, ...]
    """First index of the box in the writer's source tensor."""
    shard: int
    """Index into the plan's shards."""
    shard_offset: tuple[int, ...]
    """First index of the box in the shard."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """Every distinct shard of the target, and the writes that fill it."""

    source: ModelLayout
    target: ModelLayout
    element_bytes: int
    rank: int | None
    """Rank whose writes are listed; None lists those of all ranks. Shards and digest are always complete."""
    shards: tuple[SharedShard, ...] = field(repr=False)
    """All shards, in the same order on every rank. Every parameter of a target rank is in exactly one."""
    writes: tuple[Write, ...] = field(repr=False)
    digest: str

    @property
    def bytes_written(self) -> int:
        """Bytes of one copy of each distinct shard, over all ranks."""
        return self.element_bytes * sum(shard.numel for shard in self.shards)

    def shards_of(self, rank: int) -> dict[str, int]:
        """Return parameter name -> shard index for the parameters of a target rank."""
        return {shard.param: index for index, shard in enumerate(self.shards) if rank in shard.ranks}


def plan_publication(
    source: ModelLayout, target: ModelLayout, *, element_bytes: int = 2, rank: int | None = None
) -> PublicationPlan:
    """Plan the writes that fill the target's shards, spread evenly over the ranks that hold the source's tensors.

    Raises PlanError when the models differ.
    """
    check_element_bytes(element_bytes)
    families = match_families(source, target)
    written: dict[int, int] = {}
    shards: list[SharedShard] = []
    writes: list[Write] = []
    _count_forced(families, written)
    for family in families:
        variants = _choose_writers(family, written)
        for index, name in enumerate(family.names):
            chosen = variants[index % len(variants)]
            for number, shard in enumerate(family.shards):
                writes.extend(
                    Write(name, cell.shape, writer, cell.source_offset, len(shards), cell.target_offset)
                    for cell, writer in zip(shard.cells, chosen[number], strict=True)
                    if rank is None or writer == rank
                )
                shards.append(SharedShard(name, shard.shape, shard.ranks))
    digest = plan_digest("publication", source, target, locate_ranks(source, target, None), element_bytes)
    return PublicationPlan(source, target, element_bytes, rank, tuple(shards), tuple(writes), digest)


def _count_forced(families: tuple[Family, ...], written: dict[int, int]) -> None:
    """Count the cells that only one rank can write before choosing writers for the others."""
    for family in families:
        for cell in family.cells:
            if len(cell.holders) == 1:
                written[cell.holders[0]] = written.get(cell.holders[0], 0) + cell.numel * len(family.names)


def _choose_writers(family: Family, written: dict[int, int]) -> list[list[list[int]]]:
    """Return writers as [variant][shard][cell]. Parameter k of the family uses variant ``k % num_variants``."""
    choices = sum(len(cell.holders) for cell in family.cells)
    most = max((len(cell.holders) for cell in family.cells), default=1)
    num_variants = max(1, min(most, MAX_CHOICES // max(1, choices), len(family.names)))
    return [
        [
            list(_writers(shard.cells, written, len(range(index, len(family.names), num_variants))))
            for shard in family.shards
        ]
        for index in range(num_variants)
    ]


def _writers(cells: tuple[Cell, ...], written: dict[int, int], weight: int) -> Iterator[int]:
    for cell in cells:
        if len(cell.holders) == 1:
            yield cell.holders[0]
            continue
        writer = min(cell.holders, key=lambda rank: (written.get(rank, 0), rank))
        written[writer] = written.get(writer, 0) + cell.numel * weight
        yield writer
