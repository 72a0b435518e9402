"""Heuristic plan without measurements: sharded training, and generation with the least division that fits.

With one trained model, every call runs on all ranks. With several, as in PPO, they train concurrently on disjoint
ranks, and so do inference calls that do not depend on each other. The pattern is that of the plans that the search of
ReaL (Mei et al., arXiv:2406.14088) finds for PPO.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.realloc.placement import choose_rank_order
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.search.space import MIN_SLICE_TOKENS, can_be_pipelined

WEIGHTS_SHARE_OF_MEMORY = 0.4
"""Largest fraction of a device's memory for one replica's weights; the rest is for KV cache and activations."""
TRAINING_SHARE_OF_MEMORY = 0.7
"""Largest fraction of a device's memory for one model's training; the rest is for activations and other replicas."""
TRAINING_BYTES_PER_ELEMENT = 16
"""Bytes of float32 weights, gradients and Adam's two moments."""
MAX_CONCURRENT_COST = 1.1
"""Largest cost of concurrent calls, relative to calls in turn, at which they still run concurrently: their fixed costs
overlap."""


def heuristic_plan(
    dataflow: Dataflow,
    models: Mapping[str, ModelSpec],
    cluster: ClusterSpec,
    *,
    world_size: int,
    element_bytes: int,
    sharers: Mapping[str, str] = MappingProxyType({}),
    workload: Workload | None = None,
    generates_in_stages: bool = True,
    generates_in_lockstep: bool = True,
    generates_in_tensor_parallel: bool = True,
    orders_ranks: bool = True,
) -> ExecutionPlan:
    """Return layouts that follow from the number of ranks, the models' sizes and the memory of a device.

    Training shards weights, gradients and optimizer state over its ranks, which needs the least memory, and no
    communication per token. Several trained models get disjoint ranks, in proportion to their sizes. If one does not
    fit there, or there are too few ranks, all train on all ranks. Generation and inference read weights once per token
    or micro-batch, so they hold whole replicas. These are divided as little as fits: by tensor or expert parallelism
    inside a node, then by pipeline stages of tensor-parallel groups. A model that fits at no degree stays sharded. The
    order of ranks is the one that moves the fewest bytes from the training layout.

    Where there are fewer samples than ranks of a training call, ranks divide the tokens of samples.

    Args:
        element_bytes: Bytes of a weight in generation and inference.
        sharers: Role without weights of its own -> the role whose base it uses, which its weights come from.
        workload: Number and lengths of samples; None: unknown.
        generates_in_stages: Whether generating calls may run in pipeline stages.
        generates_in_lockstep: Whether ranks of a generating call may run each block together.
        generates_in_tensor_parallel: Whether they may divide tensors.
        orders_ranks: Whether to look for the order of ranks, which takes seconds for a thousand; if not, they ascend.
    """
    for call in dataflow.model_calls:
        if call.role not in models:
            raise PlanError(f"call {call.name!r} needs a model for role {call.role!r}; there are {', '.join(models)}")
    ranks = _Ranks(models, cluster, world_size, element_bytes, workload, orders_ranks=orders_ranks)
    homes = _homes(dataflow, ranks)
    places = _inference_places(dataflow, ranks)
    calls = []
    for call in dataflow.model_calls:
        role = str(call.role)
        owner = sharers.get(role, role)
        home = homes.get(owner)
        layout = home if call.kind == "train" else None
        if layout is None:
            layout = ranks.replicated(
                role,
                places.get(call.name, ranks.all),
                home,
                in_stages=call.kind != "generate" or generates_in_stages,
                in_lockstep=not call.partners and (call.kind != "generate" or generates_in_lockstep),
                divides_tensors=call.kind != "generate" or generates_in_tensor_parallel,
            )
        if layout is None:
            layout = ranks.sharded(ranks.all if home is None else home.ranks)
        calls.append((call.name, CallPlan(layout)))
    return ExecutionPlan(tuple(calls))


class _Ranks:
    """Layouts of models on ranks of a cluster."""

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        cluster: ClusterSpec,
        world_size: int,
        element_bytes: int,
        workload: Workload | None,
        *,
        orders_ranks: bool,
    ) -> None:
        self.all = tuple(range(world_size))
        self._models = models
        self._cluster = cluster
        self._element_bytes = element_bytes
        self._workload = workload
        self._orders_ranks = orders_ranks

    def size(self, role: str) -> int:
        """Return the elements of a model, which the cost of its calls and the memory of its training grow with."""
        return max(1, self._models[role].num_elements)

    def sharded(self, ranks: tuple[int, ...]) -> Layout:
        """Return the layout of a call on some ranks that gathers blocks."""
        return Layout(ParallelDims(fsdp=len(ranks)), ranks)

    def home(self, role: str, ranks: tuple[int, ...]) -> Layout:
        """Return the layout of training on some ranks, which divide tokens if there are fewer samples than ranks."""
        load, model, per_node = self._workload, self._models[role], self._cluster.devices_per_node
        if load is None or (num_samples := load.num_sequences // load.num_minibatches) >= len(ranks):
            return self.sharded(ranks)
        most = min(len(ranks), per_node, load.longest // MIN_SLICE_TOKENS)
        degrees = [cp for cp in model.context_parallel_degrees(most) if len(ranks) % cp == 0] or [1]
        cp = next((cp for cp in degrees if len(ranks) // cp <= num_samples), degrees[-1])
        return Layout(ParallelDims(fsdp=len(ranks) // cp, cp=cp), ranks)

    def can_train(self, role: str, ranks: tuple[int, ...]) -> bool:
        """Whether a shard of weights, gradients and optimizer state fits into a device."""
        room = TRAINING_SHARE_OF_MEMORY * self._cluster.device_memory_bytes
        return self.size(role) * TRAINING_BYTES_PER_ELEMENT / len(ranks) <= room

    def replicated(
        self,
        role: str,
        ranks: tuple[int, ...],
        origin: Layout | None,
        *,
        in_stages: bool = True,
        in_lockstep: bool = True,
        divides_tensors: bool = True,
    ) -> Layout | None:
        """Return the layout of whole replicas of a model on ``ranks``; None if it does not fit.

        Ranks are in the order that moves the fewest bytes from ``origin``, the layout that its weights come from.

        Args:
            in_stages: Whether the call may run in pipeline stages.
            in_lockstep: Whether ranks with other samples may run each block together.
            divides_tensors: Whether ranks may divide tensors.
        """
        model, room = self._models[role], WEIGHTS_SHARE_OF_MEMORY * self._cluster.device_memory_bytes
        widest = len(ranks) if divides_tensors else 1
        divisions = self._divisions(model, len(ranks), widest, in_stages=in_stages, in_lockstep=in_lockstep)
        replica = next((dims for dims in divisions if self._largest_share(model, dims) <= room), None)
        if replica is None:
            return None
        dims = replace(replica, dp=replica.dp * len(ranks) // replica.size)
        if origin is not None and replica.size > 1 and self._orders_ranks:
            return choose_rank_order(ModelLayout(model, origin), dims, ranks, self._cluster)
        return Layout(dims, ranks)

    def _divisions(
        self, model: ModelSpec, num_ranks: int, widest: int, *, in_stages: bool, in_lockstep: bool
    ) -> Iterator[ParallelDims]:
        """Yield degrees of one replica: tp or ep inside a node, stages of the widest tp groups, then tp over nodes.

        ``widest`` is the largest tp.
        """
        degrees = [tp for tp in model.tensor_parallel_degrees(widest) if num_ranks % tp == 0]
        inside = [tp for tp in degrees if tp <= self._cluster.devices_per_node]
        yield from (ParallelDims(tp=tp) for tp in inside)
        shared = model.expert_parallel_degrees(self._cluster.devices_per_node) if in_lockstep else ()
        yield from (ParallelDims(dp=ep, ep=ep) for ep in shared if ep > 1 and num_ranks % ep == 0)
        stages = [pp for pp in range(2, num_ranks // inside[-1] + 1) if num_ranks // inside[-1] % pp == 0]
        yield from (ParallelDims(pp=pp, tp=inside[-1]) for pp in stages if in_stages and can_be_pipelined(model, pp))
        yield from (ParallelDims(tp=tp) for tp in degrees[len(inside) :])

    def _largest_share(self, model: ModelSpec, dims: ParallelDims) -> int:
        """Return the bytes of a replica on its fullest rank."""
        return _most_elements(model, dims) * self._element_bytes

    def divided(self, roles: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Return consecutive ranks for each role, in proportion to their sizes; None if there are too few ranks.

        With at least as many whole nodes as roles, nodes are not divided, so that fewer shards cross nodes.
        """
        per_node = self._cluster.devices_per_node
        nodes, rest = divmod(len(self.all), per_node)
        grain = per_node if rest == 0 and nodes >= len(roles) else 1
        counts = _apportioned([self.size(role) for role in roles], len(self.all) // grain)
        if counts is None:
            return None
        bounds = [sum(counts[:index]) * grain for index in range(len(counts) + 1)]
        return [self.all[begin:end] for begin, end in itertools.pairwise(bounds)]


@lru_cache(maxsize=256)
def _most_elements(model: ModelSpec, dims: ParallelDims) -> int:
    """Return the elements of a replica on its fullest rank: of the ranks of a stage, the first one holds the most.

    Heuristic plans for devices with other memory ask for the same ones, which take a tenth of a second each.
    """
    replica = ModelLayout(model, Layout(dims, tuple(range(dims.size))))
    return max(map(replica.num_local_elements, range(0, dims.size, dims.tp)))


def _homes(dataflow: Dataflow, ranks: _Ranks) -> dict[str, Layout]:
    """Return the training layout of every trained role: on disjoint ranks if they fit there, else on all ranks."""
    roles = dataflow.trained_roles
    parts = ranks.divided(roles) if len(roles) > 1 else None
    if parts is None or not all(ranks.can_train(role, part) for role, part in zip(roles, parts, strict=True)):
        return {role: ranks.home(role, ranks.all) for role in roles}
    return {role: ranks.home(role, part) for role, part in zip(roles, parts, strict=True)}


def _inference_places(dataflow: Dataflow, ranks: _Ranks) -> dict[str, tuple[int, ...]]:
    """Return the ranks of inference calls that run concurrently; the other calls run on all ranks."""
    if len(dataflow.trained_roles) < 2:
        return {}
    places: dict[str, tuple[int, ...]] = {}
    for calls in _waves(dataflow):
        # Trained models come last, as for training: with equal divisions most of their weights need not move.
        ordered = sorted(calls, key=lambda call: call.role in dataflow.trained_roles)
        places |= _concurrent(ordered, ranks)
    return places


def _concurrent(calls: Sequence[ModelFunctionCall], ranks: _Ranks) -> dict[str, tuple[int, ...]]:
    """Divide the ranks between calls; some of the largest calls may run on all ranks before the others.

    The cost of a call is its model's size over the number of its ranks. The slowest of concurrent calls counts.
    """
    sizes = {call.name: ranks.size(str(call.role)) for call in calls}
    in_turn = sum(sizes.values()) / len(ranks.all)
    largest = sorted(calls, key=lambda call: -sizes[call.name])
    best: dict[str, tuple[int, ...]] = {}
    best_cost = in_turn
    for alone in range(len(calls) - 1):
        together = [call for call in calls if call not in largest[:alone]]
        parts = ranks.divided([str(call.role) for call in together])
        if parts is None or not all(
            ranks.replicated(str(c.role), p, None) for c, p in zip(together, parts, strict=True)
        ):
            continue
        slowest = max(sizes[call.name] / len(part) for call, part in zip(together, parts, strict=True))
        cost = slowest + sum(sizes[call.name] for call in largest[:alone]) / len(ranks.all)
        if cost <= MAX_CONCURRENT_COST * in_turn and (not best or cost < best_cost):
            best = {call.name: part for call, part in zip(together, parts, strict=True)}
            best_cost = cost
    return best


def _waves(dataflow: Dataflow) -> list[list[ModelFunctionCall]]:
    """Return an iteration's inference calls in groups of equal depth in the dataflow."""
    depth: dict[str, int] = {}
    made_at = {name: 0 for name in dataflow.inputs}
    for call in dataflow.calls:
        depth[call.name] = 1 + max((made_at[name] for name in call.needs), default=0)
        made_at |= {name: depth[call.name] for name in call.produces}
    waves: dict[int, list[ModelFunctionCall]] = {}
    for call in dataflow.iteration_calls:
        if call.kind == "infer":
            waves.setdefault(depth[call.name], []).append(call)
    return list(waves.values())


def _apportioned(sizes: Sequence[int], total: int) -> list[int] | None:
    """Divide ``total`` in proportion to ``sizes``, at least one each; None if there are fewer than ``sizes``.

    Each further one goes to the entry with the most size per count, which minimizes the largest ratio.
    """
    if total < len(sizes):
        return None
    counts = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        counts[max(range(len(sizes)), key=lambda index: sizes[index] / counts[index])] += 1
    return counts
