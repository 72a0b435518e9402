"""Explain why a plan does not fit into memory, and find changes of the plan and of settings with which it would fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, CallPlan, ExecutionPlan
from lightning_realloc.errors import LayoutError
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.limits import DEFAULT_MICRO_BATCH_TOKENS
from lightning_realloc.tuning.memory.forecast import MemoryForecast, PhaseMemory
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings

Forecast = Callable[[ExecutionPlan], MemoryForecast]
"""Plan -> its memory forecast."""
SUGGESTED_ADAPTERS: Mapping[str, Any] = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
"""Adapters whose memory suggestions show."""


def find_excess(
    dataflow: Dataflow,
    plan: ExecutionPlan,
    forecast: Forecast,
    *,
    budget_bytes: int,
    lighter: Callable[[], Iterable[tuple[str, Forecast]]] = tuple,
) -> str | None:
    """Return a message about the largest excess over the budget, with changes that would fit; None if the plan fits.

    Args:
        dataflow: Calls of the algorithm.
        plan: The plan.
        forecast: Its forecast under the current settings.
        budget_bytes: Bytes of a device that a plan may fill.
        lighter: Returns other settings, as text, with the forecast under each; called only if the plan does not fit.
    """
    worst = forecast(plan).peak()
    if worst.parts.total <= budget_bytes:
        return None
    changes = [(text, _total(forecast, other)) for text, other in _alternatives(dataflow, plan)]
    changes += [(text, _total(changed, plan)) for text, changed in lighter()]
    fitting = [f"{text} ({gibibytes(size)})" for text, size in changes if size <= budget_bytes]
    way_out = f"one of these would fit: {'; or '.join(fitting)}" if fitting else _without_alternative(worst, changes)
    return (
        f"the plan needs {gibibytes(worst.parts.total)} on rank {worst.rank} in {worst.phase}, and a device has "
        f"{gibibytes(budget_bytes)} ({_largest(worst.parts)}); {way_out}"
    )


def in_half_precision(settings: MemorySettings) -> MemorySettings:
    """Return the settings under ``precision="bf16-true"``."""
    state = settings.optimizer_bytes * 2 // settings.master_bytes
    return replace(settings, master_bytes=2, copy_bytes=2, gathered_bytes=2, optimizer_bytes=state)


def _total(forecast: Forecast, plan: ExecutionPlan) -> int:
    try:
        return forecast(plan).peak().parts.total
    except LayoutError:  # the model does not allow the degree
        return sys.maxsize


def _alternatives(dataflow: Dataflow, plan: ExecutionPlan) -> Iterator[tuple[str, ExecutionPlan]]:
    """Yield single changes of a call or of ``offload``: the text for the plan, and the changed plan."""
    for call in dataflow.iteration_calls:
        if call.role is None:
            continue
        before = plan.call(call.name)
        for other in _other_call_plans(call, before):
            changed = [(name, other if name == call.name else chosen) for name, chosen in plan.calls]
            yield f"{call.name}: {other.to_text()}", replace(plan, calls=tuple(changed))
    for role in dataflow.roles:
        part = role + OPTIMIZER_SUFFIX if role in dataflow.trained_roles else role
        if part not in plan.offload:
            yield f"offload: [{', '.join((*plan.offload, part))}]", replace(plan, offload=(*plan.offload, part))


def _other_call_plans(call: ModelFunctionCall, plan: CallPlan) -> Iterator[CallPlan]:
    if call.kind == "train" and not plan.gradient_checkpointing:
        yield replace(plan, gradient_checkpointing=True)
    if call.kind == "generate":
        yield replace(plan, max_slots=max(1, plan.max_slots // 4))
    else:
        yield replace(plan, micro_batch_tokens=max(1, (plan.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS) // 4))
        yield from (replace(plan, layout=layout) for layout in plan.layout.row_divisions)
    dims = plan.layout.dims
    if dims.dp > 1:
        yield replace(plan, layout=Layout(replace(dims, dp=1, fsdp=dims.fsdp * dims.dp), plan.layout.ranks))
        yield replace(plan, layout=Layout(ParallelDims(tp=dims.size), plan.layout.ranks))


def _without_alternative(worst: PhaseMemory, changes: Sequence[tuple[str, int]]) -> str:
    text, size = min(changes, key=lambda change: change[1], default=("", sys.maxsize))
    nearest = f" (the nearest: {text}, {gibibytes(size)})" if size < worst.parts.total else ""
    way_out = "smaller models, or devices with more memory"
    if worst.phase == "set-up":
        return f"given modules are whole on every rank before they are divided{nearest}; use {way_out}"
    return f"no change that was tried makes it fit{nearest}; use more ranks, {way_out}"


def _largest(parts: MemoryParts) -> str:
    return ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.by_size() if size)


def gibibytes(size: int) -> str:
    """Return an amount of memory as text, in MiB if it is small."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
