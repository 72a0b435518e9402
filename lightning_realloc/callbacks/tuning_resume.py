"""May a run go on with the tuning that a checkpoint has of an earlier one?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_realloc.tuning.execution_plan import ExecutionPlan


def ranks_of(plan: ExecutionPlan) -> set[int]:
    """Return every rank that a plan uses: all ranks of its run."""
    return {rank for layout in plan.layouts for rank in layout.ranks}


def obstacle(state: Mapping[str, Any], strategy: Any) -> str | None:
    """Return why a run cannot go on from a checkpoint's tuning; None where it can."""
    calls = [name for name, _ in strategy.plan.calls]
    if state["world_size"] != strategy.world_size:
        return f"the checkpoint was tuned on {state['world_size']} ranks, this run has {strategy.world_size}"
    if state["calls"] != calls:
        return f"the checkpoint was tuned for {', '.join(state['calls'])}, this algorithm has {', '.join(calls)}"
    known = [state["tuner"]["current"], *(trial["plan"] for trial in state["tuner"]["trials"])]
    known += [] if state["yardstick"] is None else [state["yardstick"]["plan"]]
    if strategy.plan not in map(ExecutionPlan.from_mapping, known):
        return "this run was given another plan than the checkpoint's"
    return None
