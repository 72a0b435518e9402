"""Choose the rank order of a target layout that moves the fewest bytes.

Degrees and ranks are given; only their order is free, and changing it costs nothing. A rank need not receive the
elements that it already holds, so the best order maximises the overlap of source and target. Solved exactly as an
assignment problem (Hungarian method) or by enumeration where that is affordable, else by local search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ParallelDims
from lightning_realloc.realloc.families import match_families

ENUMERATED_RANKS = 8
"""Largest number of ranks for which every order is tried. Raising it costs factorial time."""

ASSIGNED_RANKS = 64
"""Largest assignment problem, in ranks or tensor-parallel groups. Raising it costs cubic time."""

IMPROVED_CANDIDATES = 8
"""Number of candidates that local search improves. Raising it takes more time and may find a better order."""

Order = tuple[int, ...]


def choose_rank_order(
    source: ModelLayout, dims: ParallelDims, ranks: Sequence[int], cluster: ClusterSpec | None = None
) -> Layout:
    """Return a layout of ``dims`` over ``ranks`` in the order that moves the fewest bytes from ``source``.

    Orders are compared by the node borders that tensor-parallel groups cross, then by the bytes that move. The given
    order wins ties. The result is optimal for up to ``ENUMERATED_RANKS`` ranks, and on one node for up to
    ``ASSIGNED_RANKS``. Otherwise it is the best of several candidates after local search.

    Raises LayoutError when the degrees do not multiply to the number of ranks or do not fit the model.
    """
    given = Layout(dims, tuple(ranks))
    node_of = {rank: 0 if cluster is None else cluster.node_of(rank) for rank in ranks}
    gains = _overlaps(source, ModelLayout(source.model, given))
    positions = Layout(dims, tuple(range(dims.size)))
    problem = _Problem(dims, gains, node_of, positions.groups(*positions.tensor_axes))
    candidates = list(dict.fromkeys(_candidates(source.layout, given.ranks, problem)))
    if len(ranks) <= ENUMERATED_RANKS and min(map(problem.cost, candidates)) > problem.bound():
        candidates.extend(itertools.permutations(ranks))
    candidates.sort(key=problem.cost)  # stable: the given order, which comes first, wins ties
    improved = [_improved(order, problem) for order in candidates[:IMPROVED_CANDIDATES]]
    return Layout(dims, min((*candidates[:1], *improved), key=problem.cost))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Costs of rank orders."""

    dims: ParallelDims
    gains: Mapping[int, Sequence[int]]
    """Rank -> number of elements that it holds of each coordinate's shards, in row-major order of coordinates."""
    node_of: Mapping[int, int]
    groups: tuple[Order, ...]
    """Positions in an order of the ranks of each tensor-parallel group."""

    def bound(self) -> tuple[int, int]:
        """Return a lower bound on the cost of every order, which ignores node borders."""
        rows = list(self.gains.values())
        return 0, -sum(row[job] for row, job in zip(rows, assign_jobs(rows), strict=True))

    def cost(self, order: Order) -> tuple[int, int]:
        """Return the node borders that tensor-parallel groups cross, and the negated number of elements kept."""
        crossings = sum(len({self.node_of[order[index]] for index in group}) - 1 for group in self.groups)
        return crossings, -sum(self.gains[rank][index] for index, rank in enumerate(order))


def _overlaps(source: ModelLayout, target: ModelLayout) -> dict[int, list[int]]:
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


def _candidates(source: Layout, ranks: Order, problem: _Problem) -> Iterator[Order]:
    """Yield the given order, natural orders of both layouts' axes, and the optimum without regard to nodes."""
    packed = _packed(ranks, problem)
    bases = [ranks, packed]
    if set(source.ranks) == set(ranks):
        bases.extend(tuple(source.ranks[index] for index in indices) for indices in _axis_orders(source.dims))
    yield from bases
    for base in bases:
        for indices in _axis_orders(problem.dims):
            yield _in_order(base, indices)
    if len(packed) <= ASSIGNED_RANKS:
        yield _in_order(packed, assign_jobs([problem.gains[rank] for rank in packed]))
    if len(problem.groups) < len(packed) and len(problem.groups) <= ASSIGNED_RANKS:
        yield _assigned_by_group(packed, problem)


def _packed(ranks: Order, problem: _Problem) -> Order:
    """Return the ranks node by node, whole tensor-parallel groups first, then the remaining ranks of each node."""
    tp = len(problem.groups[0])
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(problem.node_of[rank], []).append(rank)
    whole = [rank for members in nodes.values() for rank in members[: len(members) // tp * tp]]
    return (*whole, *(rank for members in nodes.values() for rank in members[len(members) // tp * tp :]))


def _axis_orders(dims: ParallelDims) -> Iterator[Order]:
    """Yield the row-major positions over ``dims``, listed with the axes in every order of significance."""
    axes = [index for index, degree in enumerate(dims.degrees) if degree > 1]
    strides = [math.prod(dims.degrees[axis + 1 :]) for axis in range(len(dims.degrees))]
    for significance in itertools.permutations(axes):
        spans = [range(0, dims.degrees[axis] * strides[axis], strides[axis]) for axis in significance]
        yield tuple(sum(steps) for steps in itertools.product(*spans))


def _in_order(ranks: Sequence[int], positions: Sequence[int]) -> Order:
    """Return the ranks sorted by their positions."""
    return tuple(rank for _, rank in sorted(zip(positions, ranks, strict=True)))


def _assigned_by_group(packed: Order, problem: _Problem) -> Order:
    """Assign whole blocks of ranks to tensor-parallel groups, then ranks to coordinates inside each."""
    spans, tp = problem.groups, len(problem.groups[0])
    blocks = [packed[start : start + tp] for start in range(0, len(packed), tp)]
    tables = [
        [tuple(tuple(problem.gains[rank][column] for column in span) for rank in block) for span in spans]
        for block in blocks
    ]
    assigned = cache(assign_jobs)  # replicas of a tensor-parallel group have equal tables
    jobs = [[assigned(table) for table in row] for row in tables]
    values = [
        [
            sum(line[job] for line, job in zip(table, chosen, strict=True))
            for table, chosen in zip(row, picks, strict=True)
        ]
        for row, picks in zip(tables, jobs, strict=True)
    ]
    order = [0] * len(packed)
    for index, group in enumerate(assign_jobs(values)):
        for rank, job in zip(blocks[index], jobs[index][group], strict=True):
            order[spans[group][job]] = rank
    return tuple(order)


def _improved(order: Order, problem: _Problem) -> Order:
    """Solve the assignment inside every node exactly, then swap pairs of ranks while that lowers the cost."""
    best = min((order, _improved_inside_nodes(order, problem)), key=problem.cost)
    if len(order) > ASSIGNED_RANKS:
        return best
    gains, improving = problem.gains, True
    while improving:
        improving = False
        for i, j in itertools.combinations(range(len(best)), 2):
            a, b = best[i], best[j]
            if gains[a][j] + gains[b][i] <= gains[a][i] + gains[b][j]:
                continue
            swapped = (*best[:i], b, *best[i + 1 : j], a, *best[j + 1 :])
            if problem.cost(swapped) < problem.cost(best):
                best, improving = swapped, True
    return best


def _improved_inside_nodes(order: Order, problem: _Problem) -> Order:
    """Return the best order that leaves every coordinate on its node."""
    places: dict[int, list[int]] = {}
    for index, rank in enumerate(order):
        places.setdefault(problem.node_of[rank], []).append(index)
    improved = list(order)
    for columns in places.values():
        if len(columns) <= ASSIGNED_RANKS:
            members = sorted(order[index] for index in columns)
            rows = [[problem.gains[rank][column] for column in columns] for rank in members]
            for rank, job in zip(members, assign_jobs(rows), strict=True):
                improved[columns[job]] = rank
    return tuple(improved)


def assign_jobs(gains: Sequence[Sequence[int]]) -> list[int]:
    """Return the job of every worker that maximises the sum of ``gains[worker][job]``; no job is used twice.

    Needs at least as many jobs as workers. Takes O(workers² · jobs) time, in exact integers. Source: the Hungarian
    method by shortest augmenting paths, Jonker and Volgenant, Computing 38 (1987).
    """
    num_workers, num_jobs = len(gains), len(gains[0]) if gains else 0
    assert num_workers <= num_jobs or not gains, "every worker needs a job"
    # Row and column 0 are virtual: worker 0 is the one being assigned, and its path starts at job 0.
    worker_price, job_price = [0] * (num_workers + 1), [0] * (num_jobs + 1)
    worker_of = [0] * (num_jobs + 1)
    for worker in range(1, num_workers + 1):
        worker_of[0] = worker
        _augment(gains, worker_price, job_price, worker_of)
    jobs = [0] * num_workers
    for job in range(1, num_jobs + 1):
        if worker_of[job]:
            jobs[worker_of[job] - 1] = job - 1
    return jobs


def _augment(
    gains: Sequence[Sequence[int]], worker_price: list[int], job_price: list[int], worker_of: list[int]
) -> None:
    """Find a job for the worker in ``worker_of[0]`` along the cheapest alternating path, updating the prices."""
    num_jobs = len(job_price) - 1
    slack: list[float] = [float("inf")] * (num_jobs + 1)
    previous = [0] * (num_jobs + 1)
    open_jobs = list(range(1, num_jobs + 1))
    reached = [0]
    job = 0
    while worker_of[job]:
        worker = worker_of[job]
        row, offset = gains[worker - 1], worker_price[worker]
        for candidate in open_jobs:
            cost = -row[candidate - 1] - offset - job_price[candidate]
            if cost < slack[candidate]:
                slack[candidate], previous[candidate] = cost, job
        nearest = min(open_jobs, key=slack.__getitem__)
        step = int(slack[nearest])
        for done in reached:
            worker_price[worker_of[done]] += step
            job_price[done] -= step
        for candidate in open_jobs:
            slack[candidate] -= step
        open_jobs.remove(nearest)
        reached.append(nearest)
        job = nearest
    while job:
        worker_of[job] = worker_of[previous[job]]
        job = previous[job]
