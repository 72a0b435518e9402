"""Enumerate the legal plans of a call on a cluster, up to renaming of equal machines.

A call runs on whole nodes, or on an aligned part of one node whose size is a power of two. Ranks are in ascending
order, so that tensor-parallel groups lie inside nodes. The rank order that moves least is chosen later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_realloc.dataflow.dataflow import CallKind, Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec

MAX_DENSE_NODES = 16
"""Every number of nodes up to this one is tried; beyond it only products of 2, 3 and 5, and the whole cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Values that a search tries for the options of a call, apart from its layout."""

    micro_batch_tokens: tuple[int | None, ...] = (4096, 8192, 16384, 32768)
    """Limits of a micro-batch in training and inference; None: the algorithm's own."""
    gradient_checkpointing: tuple[bool, ...] = (False, True)
    """Values for training calls."""
    max_slots: tuple[int, ...] = (64, 256)
    """Values for generating calls."""
    num_ranks: int | None = None
    """Number of ranks of every call; None: any legal number."""

    def plans(self, kind: CallKind, layout: Layout) -> tuple[CallPlan, ...]:
        """Return the plans of a call under one layout."""
        if kind == "generate":
            return tuple(CallPlan(layout, max_slots=slots) for slots in self.max_slots)
        checkpointing = self.gradient_checkpointing if kind == "train" else (False,)
        choices = itertools.product(self.micro_batch_tokens, checkpointing)
        return tuple(CallPlan(layout, tokens, recompute) for tokens, recompute in choices)


@dataclass(frozen=True)
class RankSet:
    """Ranks of one call, ascending."""

    ranks: tuple[int, ...]

    @cached_property
    def mask(self) -> int:
        """The ranks as bits."""
        return sum(1 << rank for rank in self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks. Sets of the same size have the same number of nodes, or the same fraction of one."""
        return len(self.ranks)


def part_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the sizes of the parts of a node: powers of two that divide it, without the node itself."""
    devices = cluster.devices_per_node
    powers = itertools.takewhile(lambda size: size < devices, (1 << power for power in itertools.count()))
    return tuple(size for size in powers if devices % size == 0)


def node_counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the numbers of whole nodes that a call may have."""
    few = min(MAX_DENSE_NODES, cluster.num_nodes)
    smooth = (count for count in range(few + 1, cluster.num_nodes + 1) if _is_smooth(count))
    return tuple(sorted({*range(1, few + 1), *smooth, cluster.num_nodes}))


def sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the numbers of ranks that a call may have, ascending."""
    return (*part_sizes(cluster), *(count * cluster.devices_per_node for count in node_counts(cluster)))


def node_run(cluster: ClusterSpec, first: int, count: int) -> RankSet:
    """Return the ranks of ``count`` consecutive nodes."""
    devices = cluster.devices_per_node
    return RankSet(tuple(range(first * devices, (first + count) * devices)))


def parts(cluster: ClusterSpec) -> Iterator[RankSet]:
    """Return every part of every node."""
    for size in part_sizes(cluster):
        for first in range(0, cluster.num_devices, size):
            # In a node whose size is not a power of two (6 = 3 x 2), parts also start at multiples of their size.
            yield RankSet(tuple(range(first, first + size)))


def rank_sets(cluster: ClusterSpec) -> Iterator[RankSet]:
    """Yield every legal set of ranks, with all combinations of nodes: exponential in the number of nodes."""
    yield from parts(cluster)
    nodes = [node_run(cluster, node, 1).ranks for node in range(cluster.num_nodes)]
    for count in node_counts(cluster):
        for chosen in itertools.combinations(nodes, count):
            yield RankSet(tuple(itertools.chain.from_iterable(chosen)))


def legal_dims(model: ModelSpec, kind: CallKind, num_ranks: int, cluster: ClusterSpec) -> tuple[ParallelDims, ...]:
    """Return the parallel degrees that a model and a kind of call allow on ``num_ranks`` ranks, all with cp=1.

    To divide the tokens of rows only pays for rows that fit no device, which the search does not know.
    """
    per_node = min(num_ranks, cluster.devices_per_node)
    found = []
    for tp in model.tensor_parallel_degrees(per_node):
        if per_node % tp:
            continue
        for pp in _divisors(num_ranks // tp):
            if pp > 1 and (kind == "generate" or not _can_be_pipelined(model, pp)):
                continue
            rest = num_ranks // tp // pp
            for dp in _divisors(rest) if _can_be_sharded(model) else (rest,):
                found.append(ParallelDims(pp=pp, dp=dp, fsdp=rest // dp, tp=tp))
    return tuple(found)


def common_dims(dataflow: Dataflow, models: Mapping[str, ModelSpec], cluster: ClusterSpec) -> tuple[ParallelDims, ...]:
    """Return the parallel degrees that every call allows on all ranks."""
    kinds = dict.fromkeys((str(call.role), call.kind) for call in dataflow.model_calls)
    first, *others = (legal_dims(models[role], kind, cluster.num_devices, cluster) for role, kind in kinds)
    asks = any(call.partners for call in dataflow.model_calls)  # models that gather no blocks while they answer
    return tuple(dims for dims in first if all(dims in other for other in others) and not (asks and dims.fsdp > 1))


def canonical_sets(candidates: Iterable[RankSet], placed: Sequence[RankSet], cluster: ClusterSpec) -> list[RankSet]:
    """Return one candidate of each class that renaming machines maps onto each other, with ``placed`` sets fixed.

    Nodes are equal, and so are the halves of a node, the halves of a half, and so on. Renamings permute the children of
    this tree. Each leaf is marked with the sets that hold it, and children are sorted. Two sets belong to the same
    class if their trees are equal.
    """
    steps = [1, *part_sizes(cluster)[1:], cluster.devices_per_node] if cluster.devices_per_node > 1 else [1]
    base = [
        sum(1 << index for index, one in enumerate(placed) if one.mask >> rank & 1)
        for rank in range(cluster.num_devices)
    ]
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


def _can_be_pipelined(model: ModelSpec, pp: int) -> bool:
    tied = any(model.param(owner).section in ("input", "output") for _, owner in model.aliases)
    return pp <= model.num_blocks and not tied


def _can_be_sharded(model: ModelSpec) -> bool:
    return all(param.shape for param in model.params)
