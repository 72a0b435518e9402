"""Read an execution plan from a file, a mapping or an object, or make one by name (``heuristic``, ``static``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.tuning.search.heuristic import heuristic_plan

PlanSource = Mapping[str, Any] | str | Path | ExecutionPlan  # the command line takes the first type that fits
NamedPlan = ExecutionPlan | Literal["heuristic", "static"]
"""A plan, or the name of the way to make one."""


def read_plan_source(plan: PlanSource) -> NamedPlan:
    """Read a plan from a file or a mapping; plans and names are returned unchanged.

    Raises:
        PlanError: for anything else.
    """
    if isinstance(plan, ExecutionPlan):
        return plan
    if isinstance(plan, Mapping):
        return ExecutionPlan.from_mapping(plan)
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan={plan!r} is a {type(plan).__name__}; give a path, a mapping, or an ExecutionPlan")
    if plan == "heuristic" or plan == "static":
        return plan  # type: ignore[return-value]
    if isinstance(plan, str) and not Path(plan).exists() and not Path(plan).suffix:
        raise PlanError(f"plan={plan!r} is neither 'heuristic' nor 'static', and there is no such file in {Path.cwd()}")
    return ExecutionPlan.load(plan)


def work_out_plan(
    source: NamedPlan,
    dataflow: Dataflow,
    models: Mapping[str, ModelSpec],
    cluster: ClusterSpec,
    *,
    world_size: int,
    element_bytes: int,
    sharers: Mapping[str, str],
) -> ExecutionPlan:
    """Return the plan itself, or make the one that is named; see `heuristic_plan`."""
    if isinstance(source, ExecutionPlan):
        return source
    if source == "static":
        return ExecutionPlan.static(dataflow, Layout(ParallelDims(fsdp=world_size), tuple(range(world_size))))
    return heuristic_plan(
        dataflow, models, cluster, world_size=world_size, element_bytes=element_bytes, sharers=sharers
    )


def require_equal_plans(plan: ExecutionPlan) -> None:
    """Raise PlanError on every rank unless all hold the same plan. Collective."""
    if len(set(gather_objects(plan.digest))) > 1:
        raise PlanError("ranks hold different execution plans; give every process the same file or object")
