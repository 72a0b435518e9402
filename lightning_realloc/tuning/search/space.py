"""Enumerate the legal plans of a call on a cluster, up to renaming of equal machines.

A call runs on whole nodes, or on an aligned part of one node whose size is a power of two. Ranks are in ascending
order, so that tensor- and context-parallel groups lie inside nodes, but for nodes of one device. The rank order that
moves least is chosen later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from lightning_realloc.dataflow.dataflow import CallKind, Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec

MAX_DENSE_NODES = 16
"""Every number of nodes up to this one is tried; beyond it only products of 2, 3 and 5, and the whole cluster."""
MIN_SLICE_TOKENS = 2048
"""Fewest tokens of the longest row for each context-parallel rank. Shorter slices save little memory, and layouts with
them make searches longer."""

MANY_CACHED_TOKENS = 1 << 20
"""Tokens in the caches of the fewest slots that are tried, from which on fewer slots are tried, too. Raising it makes
searches for long responses shorter, and may leave them without a plan that fits."""
FEW_SLOTS = (1, 4, 16)
"""Slots that are tried for such responses."""
RUNS_OF_A_STAGE = (2, 4)
"""Degrees vpp that are tried for training in stages, ascending. Higher ones send more messages to save less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Values that a search tries for the options of a call, apart from its layout."""

    micro_batch_tokens: tuple[int | None, ...] = (4096, 8192, 16384, 32768)
    """Limits of a micro-batch in training and inference, for each context-parallel rank; None: the algorithm's own."""
    gradient_checkpointing: tuple[bool, ...] = (False, True)
    """Values for training calls."""
    max_slots: tuple[int, ...] = (64, 256)
    """Values for generating calls."""
    num_ranks: int | None = None
    """Number of ranks of every call; None: any legal number."""
    row_tokens: int = 0
    """Tokens of the longest row, or of rows that stay together; 0 if unknown. Micro-batches hold it, and context
    parallelism divides it into slices of at least `MIN_SLICE_TOKENS`."""
    divides_rows: bool = True
    """Whether training and inference may divide rows by context parallelism."""
    generates_in_stages: bool = True
    """Whether generating calls may run in pipeline stages."""
    generates_in_lockstep: bool = True
    """Whether ranks of a generating call may run each block together, as they do with ``fsdp`` and ``ep``."""
    generates_in_tensor_parallel: bool = True
    """Whether ranks of generating calls may divide tensors."""
    delays_weight_gradients: bool = True
    """Whether training in pipeline stages may follow the schedule ``zero_bubble``."""

    def plans(self, kind: CallKind, layout: Layout) -> tuple[CallPlan, ...]:
        """Return the plans of a call under one layout."""
        if kind == "generate":
            return tuple(CallPlan(layout, max_slots=slots) for slots in self._slots)
        checkpointing = self.gradient_checkpointing if kind == "train" else (False,)
        cp = layout.count(*Layout.token_axes)
        limits = (None if limit is None else max(cp * limit, self.row_tokens) for limit in self.micro_batch_tokens)
        is_delayed = kind == "train" and layout.dims.pp > 1 and self.delays_weight_gradients
        schedules: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble") if is_delayed else ("1f1b",)
        choices = itertools.product(schedules, dict.fromkeys(limits), checkpointing)
        return tuple(
            CallPlan(layout, tokens, recompute, pipeline_schedule=schedule) for schedule, tokens, recompute in choices
        )

    @property
    def _slots(self) -> tuple[int, ...]:
        """Values of ``max_slots``, and fewer slots where rows are so long that few caches fit."""
        is_long = min(self.max_slots) * self.row_tokens > MANY_CACHED_TOKENS
        return (*(slots for slots in FEW_SLOTS if is_long and slots < min(self.max_slots)), *self.max_slots)


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


def node_order(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return all nodes in an order in which those with fast links are next to each other, and slow ones are last.

    It starts with the node with fewest slow links. Each next node has the fastest slowest link to those before it.
    """
    if not cluster.node_links:
        return tuple(range(cluster.num_nodes))
    rates = np.full((cluster.num_nodes, cluster.num_nodes), cluster.inter_node_bytes_per_s)
    for link in cluster.slow_links(range(cluster.num_nodes)):
        rates[link.first, link.second] = rates[link.second, link.first] = link.bytes_per_s
    sums = rates.sum(axis=1)
    order, left = [int(sums.argmax())], set(range(cluster.num_nodes))
    slowest = rates[order[0]]
    while left := left - {order[-1]}:
        order.append(max(left, key=lambda node: (slowest[node], sums[node], -node)))
        slowest = np.minimum(slowest, rates[order[-1]])
    return tuple(order)


def node_run(cluster: ClusterSpec, first: int, count: int, order: Sequence[int] | None = None) -> RankSet:
    """Return the ranks of ``count`` nodes that are next to each other.

    Args:
        order: Order of the nodes; None: their numbers.
    """
    devices = cluster.devices_per_node
    if order is None:
        return RankSet(tuple(range(first * devices, (first + count) * devices)))
    nodes = sorted(order[first : first + count])
    return RankSet(tuple(rank for node in nodes for rank in range(node * devices, (node + 1) * devices)))


def best_linked_ranks(cluster: ClusterSpec, size: int) -> tuple[int, ...]:
    """Return a number of ranks with the fastest links, which calls on as many ranks are priced on."""
    devices = cluster.devices_per_node
    if size < devices or not cluster.node_links:
        return tuple(range(size))
    return node_run(cluster, 0, size // devices, node_order(cluster)).ranks


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


def legal_dims(
    model: ModelSpec, kind: CallKind, num_ranks: int, cluster: ClusterSpec, options: CallOptions | None = None
) -> tuple[ParallelDims, ...]:
    """Return the parallel degrees that a model and a kind of call allow on ``num_ranks`` ranks.

    Args:
        options: Limits of the search; None: the defaults, which divide no rows.
    """
    options, per_node = options or CallOptions(), cluster.devices_per_node
    widest = min(num_ranks, per_node) if per_node > 1 else num_ranks
    pipelines = kind != "generate" or options.generates_in_stages
    found = []
    divides_tensors = kind != "generate" or options.generates_in_tensor_parallel
    for tp, cp in _token_degrees(model, kind, widest, options):
        if tp > 1 and not divides_tensors:
            continue
        for pp in _divisors(num_ranks // (tp * cp)):
            if pp > 1 and not (pipelines and can_be_pipelined(model, pp)):
                continue
            rest = num_ranks // (tp * cp * pp)
            for dp in _divisors(rest) if _can_be_sharded(model) else (rest,):
                found.append(ParallelDims(pp=pp, dp=dp, fsdp=rest // dp, cp=cp, tp=tp))
    if kind == "generate" and not options.generates_in_lockstep:
        return tuple(dims for dims in found if dims.fsdp == 1)
    experts = set(model.expert_parallel_degrees(num_ranks)) - {1}
    divided = [replace(dims, ep=ep) for dims in found for ep in dims.expert_degrees if ep in experts]
    return (*found, *divided)


def _token_degrees(model: ModelSpec, kind: CallKind, widest: int, options: CallOptions) -> Iterator[tuple[int, int]]:
    """Yield the degrees tp and cp, whose ranks together divide the widest group."""
    is_divided = options.divides_rows and kind != "generate" and _can_be_sharded(model)
    most = options.row_tokens // MIN_SLICE_TOKENS if is_divided else 1
    for tp in model.tensor_parallel_degrees(widest):
        for cp in model.context_parallel_degrees(max(1, min(most, widest))):
            if widest % (tp * cp) == 0:
                yield tp, cp


def call_dims(
    call: ModelFunctionCall,
    models: Mapping[str, ModelSpec],
    num_ranks: int,
    cluster: ClusterSpec,
    options: CallOptions | None = None,
) -> tuple[ParallelDims, ...]:
    """Return the parallel degrees that all models of a call allow; those that answer environments gather nothing."""
    roles = (str(call.role), *call.further_roles)
    dims, *others = (legal_dims(models[role], call.kind, num_ranks, cluster, options) for role in roles)
    common = set(dims).intersection(*others)
    return tuple(one for one in dims if one in common and not (call.partners and max(one.fsdp, one.ep) > 1))


def common_dims(
    dataflow: Dataflow, models: Mapping[str, ModelSpec], cluster: ClusterSpec, options: CallOptions | None = None
) -> tuple[ParallelDims, ...]:
    """Return the parallel degrees that every call allows on all ranks."""
    first, *others = (call_dims(call, models, cluster.num_devices, cluster, options) for call in dataflow.model_calls)
    common = set(first).intersection(*others)
    return tuple(dims for dims in first if dims in common)


def canonical_sets(candidates: Iterable[RankSet], placed: Sequence[RankSet], cluster: ClusterSpec) -> list[RankSet]:
    """Return one candidate of each class that renaming machines maps onto each other, with ``placed`` sets fixed.

    Nodes with equal links are equal, and so are the halves of a node, the halves of a half, and so on. Renamings
    permute the children of this tree. Each leaf is marked with the sets that hold it, and children are sorted. Two sets
    belong to the same class if their trees are equal.
    """
    steps = [1, *part_sizes(cluster)[1:], cluster.devices_per_node] if cluster.devices_per_node > 1 else [1]
    base = [
        sum(1 << index for index, one in enumerate(placed) if one.mask >> rank & 1)
        for rank in range(cluster.num_devices)
    ]
    kinds = node_kinds(cluster)
    own = 1 << len(placed)
    first: dict[object, RankSet] = {}
    for candidate in candidates:
        marks = list(base)
        for rank in candidate.ranks:
            marks[rank] |= own
        first.setdefault(_tree(marks, steps, kinds), candidate)
    return list(first.values())


@lru_cache(maxsize=64)
def node_kinds(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return a number for each node, which nodes share if exchanging them changes no link."""
    links = {(link.first, link.second): (link.bytes_per_s, link.latency_s) for link in cluster.node_links}
    nodes = range(cluster.num_nodes)

    def rates(one: int, other: int) -> tuple[float, float] | None:
        return links.get((min(one, other), max(one, other)))

    firsts, kinds = list[int](), list[int]()
    for node in nodes:
        equal = (
            kind
            for kind, first in enumerate(firsts)
            if all(rates(node, other) == rates(first, other) for other in nodes if other not in (node, first))
        )
        kinds.append(next(equal, len(firsts)))
        if kinds[-1] == len(firsts):
            firsts.append(node)
    return tuple(kinds)


def _tree(marks: Sequence[int], steps: Sequence[int], kinds: Sequence[int]) -> object:
    level: list[object] = list(marks)
    for small, large in itertools.pairwise(steps):
        width = large // small
        level = [tuple(sorted(level[i : i + width], key=repr)) for i in range(0, len(level), width)]
    return tuple(sorted(zip(kinds, level, strict=True), key=repr))


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def can_be_pipelined(model: ModelSpec, pp: int) -> bool:
    """Return whether a model can be divided into ``pp`` stages."""
    tied = any(model.param(owner).section in ("input", "output") for _, owner in model.aliases)
    return pp <= model.num_blocks and not tied


def interleaved(model: ModelSpec, dims: ParallelDims) -> tuple[ParallelDims, ...]:
    """Return the degrees with several runs of blocks for each pipeline stage; none without stages."""
    if dims.pp == 1:
        return ()
    return tuple(replace(dims, vpp=vpp) for vpp in RUNS_OF_A_STAGE if dims.pp * vpp <= model.num_blocks)


def _can_be_sharded(model: ModelSpec) -> bool:
    return all(param.shape for param in model.params)
