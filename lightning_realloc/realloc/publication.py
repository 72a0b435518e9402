"""Which rank writes which box into which shared shard, when all ranks see the same memory?

On one host a target shard needs to exist once, however many ranks read it. Then nothing is sent: every rank writes
boxes of its source tensors, and together they write each distinct shard once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_realloc.layout import ModelLayout
from lightning_realloc.realloc.families import Cell, Family, match_families
from lightning_realloc.realloc.planner import MAX_CHOICES, check_element_bytes, digest_of, locate_ranks


@dataclass(frozen=True, slots=True)
class SharedShard:
    """One distinct local tensor of the target, stored once."""

    param: str
    shape: tuple[int, ...]
    """The local shape; it may have no elements."""
    ranks: tuple[int, ...]
    """The target ranks whose local tensor this is."""

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Write:
    """A box that one rank copies from its source tensor into a shared shard."""

    param: str
    shape: tuple[int, ...]
    writer: int
    writer_offset: tuple[int, ...]
    """Where the box begins in the writer's source tensor."""
    shard: int
    """Index into the plan's shards."""
    shard_offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements written."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """Every distinct shard of the target, and who writes what into it."""

    source: ModelLayout
    target: ModelLayout
    element_bytes: int
    rank: int | None
    """None: everybody's writes. Otherwise those of one rank; shards and digest are always complete."""
    shards: tuple[SharedShard, ...] = field(repr=False)
    """The same on every rank, in the same order; every parameter of a target rank is in exactly one."""
    writes: tuple[Write, ...] = field(repr=False)
    digest: str

    @property
    def bytes_written(self) -> int:
        """One copy of each distinct shard, over all ranks."""
        return self.element_bytes * sum(shard.numel for shard in self.shards)

    def shards_of(self, rank: int) -> dict[str, int]:
        """Parameter name to shard index, for the parameters of a target rank."""
        return {shard.param: index for index, shard in enumerate(self.shards) if rank in shard.ranks}


def plan_publication(
    source: ModelLayout, target: ModelLayout, *, element_bytes: int = 2, rank: int | None = None
) -> PublicationPlan:
    """Plan the writes that fill the target's shards from the source's tensors, evenly over the ranks that hold them.

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
    digest = digest_of("publication", source, target, locate_ranks(source, target, None), element_bytes)
    return PublicationPlan(source, target, element_bytes, rank, tuple(shards), tuple(writes), digest)


def _count_forced(families: tuple[Family, ...], written: dict[int, int]) -> None:
    """Count the cells that only one rank can write before choosing the others."""
    for family in families:
        for cell in family.cells:
            if len(cell.holders) == 1:
                written[cell.holders[0]] = written.get(cell.holders[0], 0) + cell.numel * len(family.names)


def _choose_writers(family: Family, written: dict[int, int]) -> list[list[list[int]]]:
    """Writers as [variant][shard][cell]; parameter k of the family takes variant ``k % len``."""
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
