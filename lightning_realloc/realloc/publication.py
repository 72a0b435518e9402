"""Plan a reallocation through the shared memory of every node: one writer for every box of every shared shard.

On one node a target shard needs to exist once, however many ranks read it, and nothing is sent. Every rank writes boxes
of its source tensors, and together the ranks of a node write each distinct shard once. Boxes that no rank of the node
holds are left out: they arrive by the messages between nodes of a `ReallocationPlan`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_realloc.layout import ClusterSpec, ModelLayout
from lightning_realloc.realloc.families import Cell, Family, match_families
from lightning_realloc.realloc.planner import MAX_CHOICES, check_element_bytes, locate_ranks


@dataclass(frozen=True, slots=True)
class SharedShard:
    """One distinct local tensor of the target, stored once on a node."""

    param: str
    shape: tuple[int, ...]
    """Local shape; it may have no elements."""
    ranks: tuple[int, ...]
    """Target ranks of the node that use this shard as their local tensor."""
    node: int

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
    """Every distinct shard of the target on every node, and the writes that fill it."""

    element_bytes: int
    shards: tuple[SharedShard, ...] = field(repr=False)
    """All shards, in the same order on every rank. Every parameter of a target rank is in exactly one."""
    writes: tuple[Write, ...] = field(repr=False)
    """Writes of all ranks, or of the rank that was given."""

    def shards_of(self, rank: int) -> dict[str, int]:
        """Return parameter name -> shard index for the parameters of a target rank."""
        return {shard.param: index for index, shard in enumerate(self.shards) if rank in shard.ranks}


def plan_publication(
    source: ModelLayout,
    target: ModelLayout,
    cluster: ClusterSpec | None = None,
    *,
    element_bytes: int = 2,
    rank: int | None = None,
) -> PublicationPlan:
    """Plan the writes that fill the target's shards, spread evenly over the ranks of a node that hold the elements.

    Without ``cluster`` all ranks count as one node. Raises PlanError when the models differ or a rank lies outside the
    cluster.
    """
    check_element_bytes(element_bytes)
    node_of = dict(locate_ranks(source, target, cluster))
    families = match_families(source, target)
    local = [tuple(_local_shards(family, node_of)) for family in families]
    written: Counter[int] = Counter()
    shards: list[SharedShard] = []
    writes: list[Write] = []
    for family, parts in zip(families, local, strict=True):
        _count_forced(parts, len(family.names), written)
    for family, parts in zip(families, local, strict=True):
        variants = _choose_writers(parts, len(family.names), written)
        for index, name in enumerate(family.names):
            for part, writers in zip(parts, variants[index % len(variants)], strict=True):
                writes.extend(
                    Write(name, cell.shape, writer, cell.source_offset, len(shards), cell.target_offset)
                    for (cell, _), writer in zip(part.cells, writers, strict=True)
                    if rank is None or writer == rank
                )
                shards.append(SharedShard(name, part.shape, part.ranks, part.node))
    return PublicationPlan(element_bytes, tuple(shards), tuple(writes))


@dataclass(frozen=True, slots=True)
class _LocalShard:
    """A distinct shard of a family on one node."""

    node: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cells: tuple[tuple[Cell, tuple[int, ...]], ...]
    """Cells that ranks of the node hold, with these ranks."""


def _local_shards(family: Family, node_of: Mapping[int, int]) -> Iterator[_LocalShard]:
    for shard in family.shards:
        for node in dict.fromkeys(node_of[rank] for rank in shard.ranks):
            held = ((cell, tuple(rank for rank in cell.holders if node_of[rank] == node)) for cell in shard.cells)
            ranks = tuple(rank for rank in shard.ranks if node_of[rank] == node)
            yield _LocalShard(node, shard.shape, ranks, tuple((cell, holders) for cell, holders in held if holders))


def _count_forced(parts: Sequence[_LocalShard], num_params: int, written: Counter[int]) -> None:
    """Count the cells that only one rank can write before choosing writers for the others."""
    for cell, holders in dict.fromkeys(pair for part in parts for pair in part.cells):
        if len(holders) == 1:
            written[holders[0]] += cell.numel * num_params


def _choose_writers(parts: Sequence[_LocalShard], num_params: int, written: Counter[int]) -> list[list[list[int]]]:
    """Return writers as [variant][shard][cell]. Parameter k of the family uses variant ``k % num_variants``."""
    counts = [len(holders) for part in parts for _, holders in part.cells]
    num_variants = max(1, min(max(counts, default=1), MAX_CHOICES // max(1, sum(counts)), num_params))
    return [
        [list(_writers(part, written, len(range(index, num_params, num_variants)))) for part in parts]
        for index in range(num_variants)
    ]


def _writers(part: _LocalShard, written: Counter[int], weight: int) -> Iterator[int]:
    for cell, holders in part.cells:
        if len(holders) == 1:
            yield holders[0]
            continue
        writer = min(holders, key=lambda rank: (written[rank], rank))
        written[writer] += cell.numel * weight
        yield writer
