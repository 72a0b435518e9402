"""A plan that needs no measurement: train sharded, generate with as little tensor parallelism as memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.realloc.placement import choose_rank_order
from lightning_realloc.tuning.dataflow import Dataflow
from lightning_realloc.tuning.execution_plan import CallPlan, ExecutionPlan

WEIGHTS_SHARE_OF_MEMORY = 0.4
"""The most of a device's memory that a copy of the weights may take; the rest is for KV cache and activations."""


def heuristic_plan(
    dataflow: Dataflow, models: Mapping[str, ModelSpec], cluster: ClusterSpec, *, world_size: int, element_bytes: int
) -> ExecutionPlan:
    """Return layouts worked out from the number of ranks, the models' sizes and the memory of a device.

    Training shards weights, gradients and optimizer state over every rank: the least memory, and no communication per
    token. Generation and inference read weights once per token or micro-batch, so they hold whole copies, split by the
    smallest tensor-parallel degree whose share fits; a model that no degree makes fit stays sharded. Rank order is
    the one that moves the fewest bytes from the training layout.

    Args:
        element_bytes: Bytes of one weight in generation and inference.
    """
    home = Layout(ParallelDims(fsdp=world_size), tuple(range(world_size)))
    calls = []
    for call in dataflow.model_calls:
        role = str(call.role)
        if role not in models:
            raise PlanError(f"call {call.name!r} needs a model for role {role!r}; there are {', '.join(models)}")
        if call.kind == "train":
            calls.append((call.name, CallPlan(home)))
            continue
        dims = _copy_dims(models[role], cluster, world_size, element_bytes)
        trained = role in dataflow.trained_roles
        if dims is None:
            layout = home
        elif trained and dims.tp > 1:
            layout = choose_rank_order(ModelLayout(models[role], home), dims, home.ranks, cluster)
        else:
            layout = Layout(dims, home.ranks)
        calls.append((call.name, CallPlan(layout)))
    return ExecutionPlan(tuple(calls))


def _copy_dims(model: ModelSpec, cluster: ClusterSpec, world_size: int, element_bytes: int) -> ParallelDims | None:
    room = WEIGHTS_SHARE_OF_MEMORY * cluster.device_memory_bytes
    for tp in _degrees(model, world_size):
        if model.num_elements * element_bytes / tp <= room:
            return ParallelDims(dp=world_size // tp, tp=tp)
    return None


def _degrees(model: ModelSpec, world_size: int) -> Sequence[int]:
    return [tp for tp in model.tensor_parallel_degrees(world_size) if world_size % tp == 0]
