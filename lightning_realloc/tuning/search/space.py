"""Which plans of a call are legal on a cluster, and which of them differ in nothing but names of equal machines?

A call runs on whole nodes, or on an aligned part of one node that has a power of two devices. Ranks are listed in
ascending order, so that tensor-parallel groups lie inside nodes. Which order of the ranks moves least is chosen later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec

EVERY_COUNT_UP_TO = 16
"""Beyond this many nodes, only counts whose prime factors are 2, 3 and 5, and the whole cluster, are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call's plan chooses besides its layout."""

    micro_batch_tokens: tuple[int | None, ...] = (4096, 8192, 16384, 32768)
    """Of training and inference."""
    gradient_checkpointing: tuple[bool, ...] = (False, True)
    """Of training."""
    max_slots: tuple[int, ...] = (64, 256)
    """Of generation."""
    num_ranks: int | None = None
    """How many ranks every call has; None: each call any legal number."""

    def plans(self, kind: CallKind, layout: Layout) -> tuple[CallPlan, ...]:
        """Return a call's plans under one layout."""
        if kind == "generate":
            return tuple(CallPlan(layout, max_slots=slots) for slots in self.max_slots)
        checkpointing = self.gradient_checkpointing if kind == "train" else (False,)
        choices = itertools.product(self.micro_batch_tokens, checkpointing)
        return tuple(CallPlan(layout, tokens, recompute) for tokens, recompute in choices)


@dataclass(frozen=True)
class RankSet:
    """Ranks that one call runs on, ascending."""

    ranks: tuple[int, ...]

    @cached_property
    def mask(self) -> int:
        """The ranks as bits."""
        return sum(1 << rank for rank in self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks. Sets of one size have one shape: as many nodes, or as large a part of one."""
        return len(self.ranks)


def part_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the sizes of the parts of a node: powers of two that divide it, itself left out."""
    devices = cluster.devices_per_node
    powers = itertools.takewhile(lambda size: size < devices, (1 << power for power in itertools.count()))
    return tuple(size for size in powers if devices % size == 0)


def node_counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return how many whole nodes a call may have."""
    few = min(EVERY_COUNT_UP_TO, cluster.num_nodes)
    smooth = (count for count in range(few + 1, cluster.num_nodes + 1) if _is_smooth(count))
    return tuple(sorted({*range(1, few + 1), *smooth, cluster.num_nodes}))


def sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the numbers of ranks that a call may have."""
    return (*part_sizes(cluster), *(count * cluster.devices_per_node for count in node_counts(cluster)))


def node_run(cluster: ClusterSpec, first: int, count: int) -> RankSet:
    """Return ``count`` whole nodes in a row."""
    devices = cluster.devices_per_node
    return RankSet(tuple(range(first * devices, (first + count) * devices)))


def parts(cluster: ClusterSpec) -> Iterator[RankSet]:
    """Return every part of every node."""
    for size in part_sizes(cluster):
        for first in range(0, cluster.num_devices, size):
            # Where a node is no power of two (6 = 3 x 2), its parts still start at multiples of their size.
            yield RankSet(tuple(range(first, first + size)))


def rank_sets(cluster: ClusterSpec) -> Iterator[RankSet]:
    """Return every legal set of ranks, nodes in any combination: exponential in the number of nodes."""
    yield from parts(cluster)
    nodes = [node_run(cluster, node, 1).ranks for node in range(cluster.num_nodes)]
    for count in node_counts(cluster):
        for chosen in itertools.combinations(nodes, count):
            yield RankSet(tuple(itertools.chain.from_iterable(chosen)))


def legal_dims(model: ModelSpec, kind: CallKind, num_ranks: int, cluster: ClusterSpec) -> tuple[ParallelDims, ...]:
    """Return the degrees that a model and a kind of call allow on a legal set of ``num_ranks`` ranks."""
    per_node = min(num_ranks, cluster.devices_per_node)
    found = []
    for tp in model.tensor_parallel_degrees(per_node):
        if per_node % tp:
            continue
        for pp in _divisors(num_ranks // tp):
            if pp > 1 and (kind == "generate" or not _may_be_staged(model, pp)):
                continue
            rest = num_ranks // tp // pp
            for dp in _divisors(rest) if _may_be_sharded(model) else (rest,):
                found.append(ParallelDims(pp=pp, dp=dp, fsdp=rest // dp, tp=tp))
    return tuple(found)


def canonical_sets(candidates: Iterable[RankSet], placed: Sequence[RankSet], cluster: ClusterSpec) -> list[RankSet]:
    """Return one of all candidates that differ by a renaming of machines which keeps the ``placed`` sets as they are.

    Nodes are equal, and so are the halves of a node, the halves of a half, and so on: renamings permute the children
    of this tree. Two sets are renamings of each other where their trees, leaves marked by the sets that hold them and
    children sorted, are the same.
    """
    steps = [1, *part_sizes(cluster)[1:], cluster.devices_per_node] if cluster.devices_per_node > 1 else [1]
    base = [sum(1 << index for index, one in enumerate(placed) if one.mask >> rank & 1)
            for rank in range(cluster.num_devices)]  # fmt: skip
    own = 1 << len(placed)
    first: dict[object, RankSet] = {}
    for candidate in candidates:
        marks = list(base)
        for rank in candidate.ranks:
            marks[rank] |= own
        first.setdefault(_tree(marks, steps), candidate)
    return list(first.values())


def _tree(marks: Sequence[int], steps: Sequence[int]) -> object:
    level: list[object] = list(marks)
    for small, large in itertools.pairwise(steps):
        width = large // small
        level = [tuple(sorted(level[i : i + width], key=repr)) for i in range(0, len(level), width)]
    return tuple(sorted(level, key=repr))


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def _may_be_staged(model: ModelSpec, pp: int) -> bool:
    tied = any(model.param(owner).section != "block" for _, owner in model.aliases)
    return pp <= model.num_blocks and not tied


def _may_be_sharded(model: ModelSpec) -> bool:
    return all(param.shape for param in model.params)
