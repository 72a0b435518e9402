"""Which rank should take which coordinate of the target, so that least has to move?

Degrees and ranks are given; only the order of the ranks is free, and it costs nothing. What a rank already holds
of a coordinate's shards need not be sent to it, so the best order is the one with the largest overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ParallelDims
from lightning_realloc.realloc.assignment import assign_jobs
from lightning_realloc.realloc.families import match_families

EXACT_RANKS = 64
"""Up to this many ranks (or tp groups, or ranks of one node) the assignment is solved exactly."""

IMPROVED_CANDIDATES = 8
"""How many of the candidates are improved node by node."""

Order = tuple[int, ...]


def choose_rank_order(
    source: ModelLayout, dims: ParallelDims, ranks: Sequence[int], cluster: ClusterSpec | None = None
) -> Layout:
    """Lay ``dims`` over ``ranks`` in the order that moves the fewest bytes from ``source``.

    With several nodes, tensor-parallel groups come first: no order with more groups that cross nodes is considered.
    The result is optimal for up to ``EXACT_RANKS`` ranks of one node, or without tensor parallelism; otherwise it is
    the best of several candidates, each optimal inside every node. The given order wins ties. Raises LayoutError
    when the degrees do not multiply to the ranks or do not fit the model.
    """
    given = Layout(dims, tuple(ranks))
    gains = _overlaps(source, ModelLayout(source.model, given))
    node_of = {rank: 0 if cluster is None else cluster.node_of(rank) for rank in ranks}

    def cost(order: Order) -> tuple[int, int]:
        return _crossings(order, dims.tp, node_of), -sum(gains[rank][index] for index, rank in enumerate(order))

    candidates = sorted(dict.fromkeys(_candidates(source.layout, given, gains, node_of)), key=cost)
    improved = [_improved_inside_nodes(order, gains, node_of) for order in candidates[:IMPROVED_CANDIDATES]]
    return Layout(dims, min((given.ranks, *candidates, *improved), key=cost))


def _overlaps(source: ModelLayout, target: ModelLayout) -> dict[int, list[int]]:
    """By rank: the elements that it holds of every coordinate's shards, in the row-major order of coordinates."""
    position = {rank: index for index, rank in enumerate(target.layout.ranks)}
    gains = {rank: [0] * len(position) for rank in position}
    for family in match_families(source, target):
        for cell in family.cells:
            amount = cell.numel * len(family.names)
            columns = [position[receiver] for receiver in cell.receivers]
            for holder in cell.holders:
                if holder in gains:
                    for column in columns:
                        gains[holder][column] += amount
    return gains


def _crossings(order: Order, tp: int, node_of: Mapping[int, int]) -> int:
    """How many node borders the tensor-parallel groups cross."""
    groups = (order[start : start + tp] for start in range(0, len(order), tp))
    return sum(len({node_of[rank] for rank in group}) - 1 for group in groups)


def _candidates(
    source: Layout, given: Layout, gains: Mapping[int, Sequence[int]], node_of: Mapping[int, int]
) -> Iterator[Order]:
    packed = _packed(given.ranks, given.dims.tp, node_of)
    bases = [given.ranks, packed]
    if set(source.ranks) == set(given.ranks):
        bases.extend(tuple(source.ranks[index] for index in indices) for indices in _axis_orders(source.dims))
    yield from bases
    for base in bases:
        for indices in _axis_orders(given.dims):
            yield _in_order(base, indices)
    if len(packed) <= EXACT_RANKS:
        yield _in_order(packed, assign_jobs([gains[rank] for rank in packed]))
    yield from _by_group(packed, given.dims.tp, gains, node_of)


def _packed(ranks: Order, tp: int, node_of: Mapping[int, int]) -> Order:
    """Ranks node by node, whole tensor-parallel groups first; what is left over of the nodes comes last."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(node_of[rank], []).append(rank)
    whole = [rank for members in nodes.values() for rank in members[: len(members) // tp * tp]]
    return (*whole, *(rank for members in nodes.values() for rank in members[len(members) // tp * tp :]))


def _axis_orders(dims: ParallelDims) -> Iterator[Order]:
    """Row-major positions over ``dims``, listed with the axes in every order of significance."""
    axes = [index for index, degree in enumerate(dims.degrees) if degree > 1]
    strides = [math.prod(dims.degrees[axis + 1 :]) for axis in range(len(dims.degrees))]
    for significance in itertools.permutations(axes):
        spans = [range(0, dims.degrees[axis] * strides[axis], strides[axis]) for axis in significance]
        yield tuple(sum(steps) for steps in itertools.product(*spans))


def _in_order(ranks: Sequence[int], positions: Sequence[int]) -> Order:
    """Ranks sorted by the position that each was given."""
    return tuple(rank for _, rank in sorted(zip(positions, ranks, strict=True)))


def _by_group(
    packed: Order, tp: int, gains: Mapping[int, Sequence[int]], node_of: Mapping[int, int]
) -> Iterator[Order]:
    """Whole blocks of ranks assigned to tensor-parallel groups, a block valued alone or with its node's help."""
    starts = range(0, len(packed), tp)
    if tp == 1 or len(starts) > EXACT_RANKS:
        return
    blocks = [packed[start : start + tp] for start in starts]
    homes = [[rank for rank in packed if node_of[rank] in {node_of[r] for r in block}] for block in blocks]
    for pools in (blocks, homes):
        # The value of a block at a group: the best that the pool's ranks could do there. A node has the same pool
        # for all its blocks, so it is worked out once.
        values: dict[tuple[int, ...], list[int]] = {}
        for pool in map(tuple, pools):
            if pool not in values:
                values[pool] = [_best_value(pool, range(start, start + tp), gains) for start in starts]
        chosen = assign_jobs([values[tuple(pool)] for pool in pools])
        order: dict[int, int] = {}
        for block, group in zip(blocks, chosen, strict=True):
            columns = range(group * tp, group * tp + tp)
            for rank, job in zip(block, assign_jobs([[gains[r][c] for c in columns] for r in block]), strict=True):
                order[columns[job]] = rank
        yield tuple(order[index] for index in range(len(packed)))


def _best_value(pool: Sequence[int], columns: Sequence[int], gains: Mapping[int, Sequence[int]]) -> int:
    rows = [[gains[rank][column] for rank in pool] for column in columns]
    return sum(row[job] for row, job in zip(rows, assign_jobs(rows), strict=True))


def _improved_inside_nodes(order: Order, gains: Mapping[int, Sequence[int]], node_of: Mapping[int, int]) -> Order:
    """The best order that leaves every coordinate on its node."""
    places: dict[int, list[int]] = {}
    for index, rank in enumerate(order):
        places.setdefault(node_of[rank], []).append(index)
    improved = list(order)
    for columns in places.values():
        if len(columns) <= EXACT_RANKS:
            members = sorted(order[index] for index in columns)
            rows = [[gains[rank][column] for column in columns] for rank in members]
            for rank, job in zip(members, assign_jobs(rows), strict=True):
                improved[columns[job]] = rank
    return tuple(improved)
