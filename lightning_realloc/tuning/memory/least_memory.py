"""Bound a plan's memory from below in a millisecond, so that searches forecast only plans that may fit.

The bound leaves out buffers of moves, replicas of other calls and caches that are kept, and looks at one rank of each
pipeline stage.
"""

from __future__ import annotations

from collections.abc import Set

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, ExecutionPlan
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.shapes.role_elements import RankElements


def least_by_phase(model: MemoryModel, plan: ExecutionPlan) -> dict[str, int]:
    """Return a lower bound on the bytes of each call of an iteration, on its fullest rank.

    Raises:
        LayoutError: for a layout that does not fit its model.
    """
    calls = [call for call in model.dataflow.iteration_calls if call.role is not None]
    return {call.name: _least(model, plan, call) for call in calls}


def _least(model: MemoryModel, plan: ExecutionPlan, call: ModelFunctionCall) -> int:
    chosen, owner = plan.call(call.name), model.owner(str(call.role))
    layout, home = chosen.layout, plan.layout(model.dataflow.home_call(owner).name)
    ranks, away = set(layout.ranks), set(plan.offload)
    others = sum(_least_home(model, plan, role, ranks, away) for role in model.dataflow.roles if role != owner)
    reads_copy = layout != home or (call.kind == "generate" and model.generates_in_copy(owner, layout))
    elsewhere = _least_home(model, plan, owner, ranks, away) if reads_copy else 0
    most = 0
    for memory in model.on_fullest_stages(call, chosen, is_home=not reads_copy):
        if reads_copy:
            kept = elsewhere + _own_copy(model, owner, layout, memory.sizes)
        else:
            needed = {owner, owner + OPTIMIZER_SUFFIX} if call.kind == "train" else {owner}
            kept = _home_bytes(model, owner, memory.sizes, away - needed)
        most = max(most, kept + memory.peak.total)
    return others + most


def _least_home(model: MemoryModel, plan: ExecutionPlan, role: str, ranks: Set[int], away: Set[str]) -> int:
    """Return the least bytes of a role's home on any of ``ranks``; 0 unless all of them hold a part of it."""
    if model.owner(role) != role:
        return 0
    home = plan.layout(model.dataflow.home_call(role).name)
    if not ranks <= set(home.ranks):
        return 0
    stages = model.elements[role].equal_stages(home.dims)
    return min(_home_bytes(model, role, sizes[0], away) for sizes in stages)


def _home_bytes(model: MemoryModel, role: str, sizes: RankElements, away: Set[str]) -> int:
    weights, optimizer = model.home_shard(role, sizes)
    return (0 if role in away else weights) + (0 if role + OPTIMIZER_SUFFIX in away else optimizer)


def _own_copy(model: MemoryModel, role: str, layout: Layout, sizes: RankElements) -> int:
    """Return the bytes of the replica that a call reads; 0 where its tensors may be those of the home."""
    settings = model.settings
    may_share = settings.shares_memory or settings.pushes_weights or model.home_bytes(role) == settings.copy_bytes
    return 0 if may_share and layout.dims.num_shards == 1 else sizes.num_sharded * settings.copy_bytes
