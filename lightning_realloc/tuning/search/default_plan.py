"""Choose the plan of a run that is given none: the heuristic plan, or the first of a few others that fits into memory.

Pure. The others are in a fixed order, from changes that cost little time to those that cost much: options of calls,
training and inference on all ranks, replicas divided further, training with tensor parallelism, offloading. Seconds are
not estimated, so that the choice depends on no measured rate, and all ranks of all runs make the same one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, CallPlan, ExecutionPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.memory.advice import gibibytes
from lightning_realloc.tuning.memory.call_shape import CallShape
from lightning_realloc.tuning.memory.forecast import SET_UP, MemoryForecast
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.space import MIN_SLICE_TOKENS, CallOptions
from lightning_realloc.tuning.shapes.role_memory import sharers_of

PhaseBytes: TypeAlias = Callable[[ExecutionPlan], Mapping[str, int]]
"""Plan -> phase -> bytes of the fullest rank."""
MEMORY_DIVISORS = (1, 2, 4, 8)
"""Replicas are divided as the heuristic does it for devices with these fractions of the memory, in turn."""
MIN_SLOTS = 16
"""Fewest slots of a generating call before layouts are divided further, and 1 after that. Fewer decode slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPlan:
    """The plan of a run that is given none, and the heuristic plan that it may replace."""

    plan: ExecutionPlan
    heuristic: ExecutionPlan
    reason: str | None
    """Bytes that the heuristic plan lacks, with the calls that are changed; None if it is taken."""
    shortage: str | None
    """Bytes of the smallest plan that was tried and of a device, and what needs less, if none fits; else None."""


def default_plan(task: PlanningTask, phase_bytes: PhaseBytes, *, world_size: int) -> DefaultPlan:
    """Return the heuristic plan if it fits; else the first other one that fits; the heuristic plan if none does.

    A plan fits if iterations leave the task's headroom free, and building the models fits into a device. Where no plan
    leaves so much free, one that fills devices is taken.

    Args:
        phase_bytes: Forecasts a plan's memory.
        world_size: Number of ranks.
    """
    found = _Candidates(task, phase_bytes, world_size)
    heuristic = found.heuristic(1)
    for limit in (task.usable_bytes, task.memory_budget):
        plan = heuristic if found.fits(heuristic, limit) else found.first_that_fits(limit)
        if plan is not None:
            break
    if plan is None:
        shortage = _shortage(task, heuristic, found.sizes, world_size)
        return DefaultPlan(plan=heuristic, heuristic=heuristic, reason=None, shortage=shortage)
    reason = None if plan == heuristic else _reason(task, found.sizes, heuristic, plan)
    return DefaultPlan(plan=plan, heuristic=heuristic, reason=reason, shortage=None)


def largest_by_phase(forecast: MemoryForecast) -> dict[str, int]:
    """Return the bytes of each phase on its fullest rank."""
    largest: dict[str, int] = {}
    for entry in forecast.phases:
        largest[entry.phase] = max(largest.get(entry.phase, 0), entry.parts.total)
    return largest


_Sizes: TypeAlias = Mapping[ExecutionPlan, Mapping[str, int]]


def _reason(task: PlanningTask, sizes: _Sizes, heuristic: ExecutionPlan, plan: ExecutionPlan) -> str:
    phase, size = _largest(sizes[heuristic])
    without = "" if task.workload is not None else " without activations and caches, as lengths are unknown,"
    return (
        f"the heuristic plan needs{without} {gibibytes(size)} in {phase}, and plans may fill "
        f"{gibibytes(task.usable_bytes)} of a device; took one that needs "
        f"{gibibytes(_largest(sizes[plan])[1])}: {_changes(heuristic, plan)}"
    )


def _shortage(task: PlanningTask, heuristic: ExecutionPlan, sizes: _Sizes, world_size: int) -> str:
    plan = min(sizes, key=lambda one: _largest(sizes[one])[1])
    phase, size = _largest(sizes[plan])
    included, shorter = (", even without them", "") if task.workload is None else (" with them", ", shorter sequences")
    devices = f"at least {math.ceil(world_size * size / task.memory_budget)} such devices, "  # were all of it divided
    return (
        f"none of the {len(sizes)} plans tried fits{included}: the smallest needs {gibibytes(size)} in {phase}, and a "
        f"device has {gibibytes(task.memory_budget)} ({_changes(heuristic, plan) or 'the heuristic plan'}); use "
        f"{'' if phase == SET_UP else devices}a smaller model{shorter} or adapters (peft_config), also over 4-bit "
        f"weights (quantization_config)"
    )


def _largest(sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the phase with the most bytes, and these."""
    return max(sizes.items(), key=lambda item: item[1])


def _changes(heuristic: ExecutionPlan, plan: ExecutionPlan) -> str:
    changes = [f"{name}: {call.to_text()}" for name, call in plan.calls if call != heuristic.call(name)]
    return "; ".join([*changes, *([f"offload: [{', '.join(plan.offload)}]"] if plan.offload else [])])


class _Candidates:
    """Plans in the order in which they are tried."""

    def __init__(self, task: PlanningTask, phase_bytes: PhaseBytes, world_size: int) -> None:
        self._task = task
        self._ranks = tuple(range(world_size))
        self._per_node = min(world_size, task.cluster.devices_per_node)
        self._sharers = sharers_of(task.roles)
        self._row_tokens = task.call_options(CallOptions()).row_tokens
        self._phase_bytes = phase_bytes
        self.sizes: dict[ExecutionPlan, Mapping[str, int]] = {}
        self.heuristic = functools.cache(self._heuristic)

    # ---- memory
    def fits(self, plan: ExecutionPlan, limit: int) -> bool:
        """Whether iterations need at most ``limit`` bytes of every device, and building the models fits."""
        return not self._too_large(plan, limit)

    def _too_large(self, plan: ExecutionPlan, limit: int) -> set[str]:
        if plan not in self.sizes:
            self.sizes[plan] = self._phase_bytes(plan)
        limits = {SET_UP: self._task.memory_budget}
        return {phase for phase, size in self.sizes[plan].items() if size > limits.get(phase, limit)}

    def first_that_fits(self, limit: int) -> ExecutionPlan | None:
        """Return the first plan that fits, with as few changed options as it needs; None without one."""
        for min_slots, plans in ((MIN_SLOTS, self._layouts), (1, self._layouts), (1, self._offloaded)):
            for plan in plans():
                fitting = self._with_options(plan, limit, min_slots)
                if fitting is not None:
                    return fitting
        return None

    # ---- options
    def _with_options(self, plan: ExecutionPlan, limit: int, min_slots: int) -> ExecutionPlan | None:
        """Return the plan with the first options of each call with which it fits; None if it fits with none.

        The bytes of a call depend on its own options alone, unless caches stay between calls. So one forecast tries an
        option of every call.
        """
        calls = {call.name: call.kind for call in self._task.dataflow.iteration_calls if call.role is not None}
        options = {name: self._options(plan, name, min_slots) for name in calls}
        cheapest = _with_calls(plan, {name: steps[-1] for name, steps in options.items()})
        if any(calls.get(phase) != "train" for phase in self._too_large(cheapest, limit)):
            return None  # only training calls may need less with an earlier option
        chosen: dict[str, CallPlan] = {}
        for number in range(max(map(len, options.values()))):
            current = {name: steps[min(number, len(steps) - 1)] for name, steps in options.items()}
            too_large = self._too_large(_with_calls(plan, current), limit)
            chosen = {name: current[name] for name in calls if name not in too_large} | chosen
            if len(chosen) == len(calls):
                found = _with_calls(plan, chosen)
                return found if self.fits(found, limit) else None
        return None

    def _options(self, plan: ExecutionPlan, name: str, min_slots: int) -> list[CallPlan]:
        """Return the plans of a call in its layout, the fastest first."""
        call, chosen, load = self._task.dataflow.call(name), plan.call(name), self._task.workload
        if load is None:
            return [chosen]
        if call.kind == "generate":
            return [replace(chosen, max_slots=number) for number in _halvings(chosen.max_slots, min_slots)]
        _, *sizes = _halvings(load.micro_batch_tokens, load.group_size * load.longest)
        smaller = [replace(chosen, micro_batch_tokens=size) for size in sizes]
        if call.kind == "infer":
            return [chosen, *smaller]
        share = CallShape.from_plan("train", chosen, load, load.longest).share
        whole = replace(chosen, micro_batch_tokens=_doubled(load.micro_batch_tokens, share * load.longest))
        if not self._task.roles[str(call.role)].can_recompute:
            return [chosen, *smaller, whole]
        recomputing = [replace(one, gradient_checkpointing=True) for one in (chosen, whole, *smaller)]
        return [chosen, *smaller[:1], *recomputing]

    # ---- layouts
    def _heuristic(self, divisor: int) -> ExecutionPlan:
        """Return the heuristic plan for devices with a fraction of the memory."""
        task = self._task
        memory_bytes = max(1, task.cluster.device_memory_bytes // divisor)
        return heuristic_plan(
            task.dataflow,
            task.models,
            replace(task.cluster, device_memory_bytes=memory_bytes),
            world_size=len(self._ranks),
            element_bytes=task.settings.copy_bytes,
            sharers=self._sharers,
            workload=task.workload,
            generates_in_stages=task.generates_in_stages,
            generates_in_lockstep=task.generates_in_lockstep,
        ).completed(task.dataflow)

    def _layouts(self) -> Iterator[ExecutionPlan]:
        """Yield the heuristic plan, then plans that train and infer on all ranks.

        Their replicas for generation are divided further from plan to plan, and at last sharded as for training. Plans
        that divide rows come last.
        """
        nothing_fits = self._task.cluster.device_memory_bytes
        common = math.gcd(self._per_node, len(self._ranks))
        degrees = [tp for tp in range(1, common + 1) if common % tp == 0]
        yield self.heuristic(1)
        slices = self._row_tokens // MIN_SLICE_TOKENS
        for cp, tp, divisor in itertools.product(degrees, degrees, (*MEMORY_DIVISORS, nothing_fits)):
            if cp == 1 or (cp <= slices and common % (cp * tp) == 0):
                yield self._sharded(self.heuristic(divisor), tp, cp)

    def _sharded(self, plan: ExecutionPlan, tp: int, cp: int) -> ExecutionPlan:
        """Return a plan with training and inference sharded over all ranks, and generation too if it is in ``plan``."""
        calls = {}
        for call in self._task.dataflow.model_calls:
            before = plan.call(call.name)
            is_replicated = call.kind == "generate" and before.layout.dims.fsdp == 1
            calls[call.name] = before if is_replicated else CallPlan(self._sharded_layout(call, tp, cp))
        return _with_calls(plan, calls)

    def _sharded_layout(self, call: ModelFunctionCall, tp: int, cp: int) -> Layout:
        """Return the layout over all ranks with the largest degrees up to ``tp`` and ``cp`` that are possible."""
        model = self._task.roles[self._sharers.get(str(call.role), str(call.role))].model
        degree = max(one for one in model.tensor_parallel_degrees(tp) if tp % one == 0)
        possible = (1,) if call.kind == "generate" else model.context_parallel_degrees(cp)
        slices = max(one for one in possible if cp % one == 0)
        fsdp = len(self._ranks) // (degree * slices)
        return Layout(ParallelDims(fsdp=fsdp, cp=slices, tp=degree), self._ranks)

    def _offloaded(self) -> Iterator[ExecutionPlan]:
        """Yield plans that offload frozen roles, then those that offload optimizer states, too."""
        flow = self._task.dataflow
        frozen = tuple(r for r in flow.roles if r not in flow.trained_roles and r not in self._sharers)
        states = tuple(role + OPTIMIZER_SUFFIX for role in flow.trained_roles)
        for parts in (frozen, frozen + states):
            yield from (replace(plan, offload=parts) for plan in self._layouts())


def _with_calls(plan: ExecutionPlan, calls: Mapping[str, CallPlan]) -> ExecutionPlan:
    return replace(plan, calls=tuple((name, calls.get(name, before)) for name, before in plan.calls))


def _doubled(size: int, least: int) -> int:
    """Return ``size`` times the smallest power of two with which it is at least ``least``.

    One micro-batch for all samples of a rank leaves FSDP's gradients divided, which are whole from the second one on.
    """
    while size < least:
        size *= 2
    return size


def _halvings(most: int, least: int) -> list[int]:
    """Return ``most``, its half, its quarter and so on, as far as they are at least ``least``."""
    found = [most]
    while found[-1] // 2 >= max(1, least):
        found.append(found[-1] // 2)
    return found
