"""A plan that needs no measurement: train sharded, generate with as little tensor parallelism as memory allows.

An algorithm that trains one model does everything on all ranks. One that trains several, as PPO does, trains them side
by side, and runs inference calls that do not wait for each other side by side. Source of that pattern: the plans that
the search of ReaL (Mei et al., arXiv:2406.14088) finds for PPO.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.realloc.placement import choose_rank_order

WEIGHTS_SHARE_OF_MEMORY = 0.4
"""The most of a device's memory that a copy of the weights may take; the rest is for KV cache and activations."""
TRAINING_SHARE_OF_MEMORY = 0.7
"""The most of it that one model's training may take; the rest is for activations and copies of other models."""
TRAINING_BYTES_PER_ELEMENT = 16
"""float32 weights, gradients, and Adam's two moments."""
SIDE_BY_SIDE_COST = 1.1
"""How much longer side by side may look than in turn, and is still taken: each call's fixed costs are paid at once."""


def heuristic_plan(
    dataflow: Dataflow, models: Mapping[str, ModelSpec], cluster: ClusterSpec, *, world_size: int, element_bytes: int,
    sharers: Mapping[str, str] = MappingProxyType({}),
) -> ExecutionPlan:  # fmt: skip
    """Return layouts worked out from the number of ranks, the models' sizes and the memory of a device.

    Training shards weights, gradients and optimizer state over its ranks: the least memory, and no communication per
    token. Several trained models get ranks of their own, as many as their sizes ask for; where one would not fit there,
    or there are too few ranks, all get all ranks. Generation and inference read weights once per token or micro-batch,
    so they hold whole copies, split by the smallest tensor-parallel degree whose share fits; a model that no degree
    makes fit stays sharded. Rank order is the one that moves the fewest bytes from the training layout.

    Args:
        element_bytes: Bytes of one weight in generation and inference.
        sharers: Role without weights of its own -> the role whose base it is: its weights come from there.
    """
    for call in dataflow.model_calls:
        if call.role not in models:
            raise PlanError(f"call {call.name!r} needs a model for role {call.role!r}; there are {', '.join(models)}")
    ranks = _Ranks(models, cluster, world_size, element_bytes)
    homes = _homes(dataflow, ranks)
    places = _inference_places(dataflow, ranks)
    calls = []
    for call in dataflow.model_calls:
        role = str(call.role)
        owner = sharers.get(role, role)
        home = homes.get(owner, ranks.sharded(ranks.all))
        layout = home if call.kind == "train" else None
        if layout is None:
            origin = home if owner in homes else None
            layout = ranks.copy(role, places.get(call.name, ranks.all), origin) or home
        calls.append((call.name, CallPlan(layout)))
    return ExecutionPlan(tuple(calls))


class _Ranks:
    """What can be laid where."""

    def __init__(
        self, models: Mapping[str, ModelSpec], cluster: ClusterSpec, world_size: int, element_bytes: int
    ) -> None:
        self.all = tuple(range(world_size))
        self._models = models
        self._cluster = cluster
        self._element_bytes = element_bytes

    def size(self, role: str) -> int:
        """Elements of a model: what its calls cost, and its training holds, in proportion."""
        return max(1, self._models[role].num_elements)

    def sharded(self, ranks: tuple[int, ...]) -> Layout:
        """Return the layout of training."""
        return Layout(ParallelDims(fsdp=len(ranks)), ranks)

    def can_train(self, role: str, ranks: tuple[int, ...]) -> bool:
        """Whether a device has room for its shard of weights, gradients and optimizer state."""
        room = TRAINING_SHARE_OF_MEMORY * self._cluster.device_memory_bytes
        return self.size(role) * TRAINING_BYTES_PER_ELEMENT / len(ranks) <= room

    def copy(self, role: str, ranks: tuple[int, ...], origin: Layout | None) -> Layout | None:
        """Return the layout of whole copies of a model on ``ranks``, None where it does not fit them.

        Ranks are ordered to move little from ``origin``, where its weights come from.
        """
        dims = _copy_dims(self._models[role], self._cluster, len(ranks), self._element_bytes)
        if dims is None:
            return None
        if origin is not None and dims.tp > 1:
            return choose_rank_order(ModelLayout(self._models[role], origin), dims, ranks, self._cluster)
        return Layout(dims, ranks)

    def divided(self, roles: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Return a run of ranks for each role, in proportion to their sizes; None where there are too few.

        Where there are as many whole nodes as roles, nodes stay whole: training would otherwise shard across them.
        """
        per_node = self._cluster.devices_per_node
        nodes, rest = divmod(len(self.all), per_node)
        unit = per_node if rest == 0 and nodes >= len(roles) else 1
        counts = _apportioned([self.size(role) for role in roles], len(self.all) // unit)
        if counts is None:
            return None
        bounds = [sum(counts[:index]) * unit for index in range(len(counts) + 1)]
        return [self.all[begin:end] for begin, end in itertools.pairwise(bounds)]


def _homes(dataflow: Dataflow, ranks: _Ranks) -> dict[str, Layout]:
    """Return the training layout of every trained role: side by side where they fit, else each on all ranks."""
    roles = dataflow.trained_roles
    parts = ranks.divided(roles) if len(roles) > 1 else None
    if parts is None or not all(ranks.can_train(role, part) for role, part in zip(roles, parts, strict=True)):
        return {role: ranks.sharded(ranks.all) for role in roles}
    return {role: ranks.sharded(part) for role, part in zip(roles, parts, strict=True)}


def _inference_places(dataflow: Dataflow, ranks: _Ranks) -> dict[str, tuple[int, ...]]:
    """Return the ranks of inference calls that run side by side; the others run on all."""
    if len(dataflow.trained_roles) < 2:
        return {}
    places: dict[str, tuple[int, ...]] = {}
    for calls in _waves(dataflow):
        # Trained models last, where they are trained: ranks divided alike keep most of their weights where they are.
        ordered = sorted(calls, key=lambda call: call.role in dataflow.trained_roles)
        places |= _side_by_side(ordered, ranks)
    return places


def _side_by_side(calls: Sequence[ModelFunctionCall], ranks: _Ranks) -> dict[str, tuple[int, ...]]:
    """Divide the ranks between calls, the largest ones perhaps left to run on all ranks before the others.

    A call takes its model's size over its ranks; ranks that do not divide evenly would wait for the slowest part.
    """
    sizes = {call.name: ranks.size(str(call.role)) for call in calls}
    in_turn = sum(sizes.values()) / len(ranks.all)
    largest = sorted(calls, key=lambda call: -sizes[call.name])
    best: dict[str, tuple[int, ...]] = {}
    best_cost = in_turn
    for alone in range(len(calls) - 1):
        together = [call for call in calls if call not in largest[:alone]]
        parts = ranks.divided([str(call.role) for call in together])
        if parts is None or not all(ranks.copy(str(c.role), p, None) for c, p in zip(together, parts, strict=True)):
            continue
        slowest = max(sizes[call.name] / len(part) for call, part in zip(together, parts, strict=True))
        cost = slowest + sum(sizes[call.name] for call in largest[:alone]) / len(ranks.all)
        if cost <= SIDE_BY_SIDE_COST * in_turn and (not best or cost < best_cost):
            best = {call.name: part for call, part in zip(together, parts, strict=True)}
            best_cost = cost
    return best


def _waves(dataflow: Dataflow) -> list[list[ModelFunctionCall]]:
    """Return an iteration's inference calls, those together that have equally many calls before them in a chain."""
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
    """Divide ``total`` units in proportion to ``sizes``, at least one each; None where there are too few.

    Every next unit goes to whoever has the most to do with the units it has, which makes the longest share shortest.
    """
    if total < len(sizes):
        return None
    counts = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        counts[max(range(len(sizes)), key=lambda index: sizes[index] / counts[index])] += 1
    return counts


def _copy_dims(model: ModelSpec, cluster: ClusterSpec, world_size: int, element_bytes: int) -> ParallelDims | None:
    room = WEIGHTS_SHARE_OF_MEMORY * cluster.device_memory_bytes
    for tp in _degrees(model, world_size):
        if model.num_elements * element_bytes / tp <= room:
            return ParallelDims(dp=world_size // tp, tp=tp)
    return None


def _degrees(model: ModelSpec, world_size: int) -> Sequence[int]:
    return [tp for tp in model.tensor_parallel_degrees(world_size) if world_size % tp == 0]
