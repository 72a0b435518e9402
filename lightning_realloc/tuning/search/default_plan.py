"""Choose the plan of a run that is given none: the heuristic plan, or the first of a few others that fits into memory.

Pure. The others are in a fixed order, from changes that cost little time to those that cost much: options of calls,
training and inference on all ranks, replicas divided further, training with tensor parallelism, offloading. Seconds are
not estimated, so that the choice depends on no measured rate, and all ranks of all runs make the same one.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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
    describe_shortage: Callable[[], str] | None = field(repr=False, compare=False)
    """Returns the `shortage`, which takes further forecasts; None if a plan fits."""

    @property
    def shortage(self) -> str | None:
        """Bytes of the smallest plan that was tried and of a device, and what needs less, if none fits; else None."""
        return None if self.describe_shortage is None else self.describe_shortage()


def default_plan(
    task: PlanningTask, phase_bytes: PhaseBytes, *, world_size: int, least_bytes: PhaseBytes | None = None
) -> DefaultPlan:
    """Return the heuristic plan if it fits; else the first other one that fits; the heuristic plan if none does.

    A plan fits if iterations leave the task's headroom free, and building the models fits into a device. Where no plan
    leaves so much free, one that fills devices is taken.

    Args:
        phase_bytes: Forecasts a plan's memory.
        world_size: Number of ranks.
        least_bytes: A lower bound on ``phase_bytes`` that takes less time, which spares most forecasts; None: no bound.
    """
    found = _Candidates(task, phase_bytes, least_bytes, world_size)
    heuristic = found.heuristic(1)
    for limit in (task.usable_bytes, task.memory_budget):
        plan = heuristic if found.fits(heuristic, limit) else found.first_that_fits(limit)
        if plan is not None:
            break
    if plan is None:
        shortage = functools.partial(_shortage, task, heuristic, found, world_size)
        return DefaultPlan(plan=heuristic, heuristic=heuristic, reason=None, describe_shortage=shortage)
    reason = None if plan == heuristic else _reason(task, found.sizes_of, heuristic, plan)
    return DefaultPlan(plan=plan, heuristic=heuristic, reason=reason, describe_shortage=None)


def largest_by_phase(forecast: MemoryForecast) -> dict[str, int]:
    """Return the bytes of each phase on its fullest rank."""
    largest: dict[str, int] = {}
    for entry in forecast.phases:
        largest[entry.phase] = max(largest.get(entry.phase, 0), entry.parts.total)
    return largest


def _reason(task: PlanningTask, sizes: PhaseBytes, heuristic: ExecutionPlan, plan: ExecutionPlan) -> str:
    phase, size = _largest(sizes(heuristic))
    without = "" if task.workload is not None else " without activations and caches, as lengths are unknown,"
    return (
        f"the heuristic plan needs{without} {gibibytes(size)} in {phase}, and plans may fill "
        f"{gibibytes(task.usable_bytes)} of a device; took one that needs "
        f"{gibibytes(_largest(sizes(plan))[1])}: {_changes(heuristic, plan)}"
    )


def _shortage(task: PlanningTask, heuristic: ExecutionPlan, found: _Candidates, world_size: int) -> str:
    plan = found.smallest()
    phase, size = _largest(found.sizes_of(plan))
    included, shorter = (", even without them", "") if task.workload is None else (" with them", ", shorter sequences")
    devices = f"at least {math.ceil(world_size * size / task.memory_budget)} such devices, "  # were all of it divided
    return (
        f"none of the {found.num_tried} plans tried fits{included}: the smallest needs {gibibytes(size)} in {phase}, "
        f"and a device has {gibibytes(task.memory_budget)} ({_changes(heuristic, plan) or 'the heuristic plan'}); use "
        f"{'' if phase == SET_UP else devices}a smaller model{shorter} or adapters (peft_config), also over 4-bit "
        f"weights (quantization_config)"
    )


def _largest(sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the phase with the most bytes, and these."""
    return max(sizes.items(), key=lambda item: item[1])


def _changes(heuristic: ExecutionPlan, plan: ExecutionPlan) -> str:
    changes = [f"{name}: {call.to_text()}" for name, call in plan.calls if call != heuristic.call(name)]
    return "; ".join([*changes, *([f"offload: [{', '.join(plan.offload)}]"] if plan.offload else [])])


_Layouts: TypeAlias = Callable[[Callable[[int], ExecutionPlan]], ExecutionPlan]
"""Makes a plan from the heuristic plans for devices with a fraction of the memory."""


class _Candidates:
    """Plans in the order in which they are tried."""

    def __init__(
        self, task: PlanningTask, phase_bytes: PhaseBytes, least_bytes: PhaseBytes | None, world_size: int
    ) -> None:
        self._task = task
        self._ranks = tuple(range(world_size))
        self._per_node = min(world_size, task.cluster.devices_per_node)
        self._sharers = sharers_of(task.roles)
        self._row_tokens = task.call_options(CallOptions()).row_tokens
        self._kinds = {call.name: call.kind for call in task.dataflow.iteration_calls if call.role is not None}
        """Call with a model -> its kind."""
        self._phase_bytes, self._least_bytes = phase_bytes, least_bytes
        self._sizes: dict[ExecutionPlan, Mapping[str, int]] = {}
        self._least: dict[ExecutionPlan, Mapping[str, int]] = {}
        self.heuristic = functools.cache(self._heuristic)
        """Divisor of the memory -> the heuristic plan."""
        self._sketch = functools.cache(functools.partial(self._heuristic, orders_ranks=False))

    # ---- memory
    @property
    def num_tried(self) -> int:
        """Number of plans tried."""
        return len(self._sizes.keys() | self._least.keys())

    def sizes_of(self, plan: ExecutionPlan) -> Mapping[str, int]:
        """Return the bytes of each phase on its fullest rank."""
        if plan not in self._sizes:
            self._sizes[plan] = self._phase_bytes(plan)
        return self._sizes[plan]

    def fits(self, plan: ExecutionPlan, limit: int) -> bool:
        """Whether iterations need at most ``limit`` bytes of every device, and building the models fits."""
        return not self._surely_too_large(plan, limit) and not self._too_large(plan, limit)

    def smallest(self) -> ExecutionPlan:
        """Return the tried plan with the smallest peak; only plans whose bound is smaller are forecast for it."""
        plans = list(dict.fromkeys((*self._sizes, *self._least)))
        bounds = [(_largest(self._least.get(plan) or self._sizes[plan])[1], False, i) for i, plan in enumerate(plans)]
        heapq.heapify(bounds)
        while not bounds[0][1]:
            number = bounds[0][2]
            heapq.heapreplace(bounds, (_largest(self.sizes_of(plans[number]))[1], True, number))
        return plans[bounds[0][2]]

    def _surely_too_large(self, plan: ExecutionPlan, limit: int) -> set[str]:
        """Return the phases that do not fit by the lower bound; none without one."""
        if self._least_bytes is None:
            return set()
        if plan not in self._least:
            self._least[plan] = self._least_bytes(plan)
        return self._beyond(self._least[plan], limit)

    def _too_large(self, plan: ExecutionPlan, limit: int) -> set[str]:
        """Return the phases that do not fit."""
        return self._beyond(self.sizes_of(plan), limit)

    def _beyond(self, sizes: Mapping[str, int], limit: int) -> set[str]:
        limits = {SET_UP: self._task.memory_budget}
        return {phase for phase, size in sizes.items() if size > limits.get(phase, limit)}

    def first_that_fits(self, limit: int) -> ExecutionPlan | None:
        """Return the first plan that fits, with as few changed options as it needs; None without one."""
        for min_slots, offloads in ((MIN_SLOTS, ((),)), (1, ((),)), (1, self._offloads())):
            for offload, layouts in itertools.product(offloads, list(self._layouts())):
                if self._least_bytes is not None:  # which depends on no order of ranks
                    sketch = replace(layouts(self._sketch), offload=offload)
                    if self._never_fits(self._steps(sketch, min_slots), limit):
                        continue
                plan = replace(layouts(self.heuristic), offload=offload)
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
        steps, calls = self._steps(plan, min_slots), self._kinds
        if self._never_fits(steps, limit) or self._is_hopeless(self._too_large(steps[-1], limit)):
            return None
        chosen: dict[str, CallPlan] = {}
        for current in steps:
            if self._surely_too_large(current, limit) >= calls.keys() - chosen.keys():
                continue
            too_large = self._too_large(current, limit)
            chosen = {name: current.call(name) for name in calls if name not in too_large} | chosen
            if len(chosen) == len(calls):
                found = _with_calls(plan, chosen)
                return found if self.fits(found, limit) else None
        return None

    def _steps(self, plan: ExecutionPlan, min_slots: int) -> list[ExecutionPlan]:
        """Return the plan with the first option of every call, with the second ones, and so on to the last ones."""
        options = {name: self._options(plan, name, min_slots) for name in self._kinds}
        return [
            _with_calls(plan, {name: steps[min(number, len(steps) - 1)] for name, steps in options.items()})
            for number in range(max(map(len, options.values())))
        ]

    def _never_fits(self, steps: Sequence[ExecutionPlan], limit: int) -> bool:
        """Whether a call does not fit with any option, by the lower bound."""
        last = self._surely_too_large(steps[-1], limit)
        return self._is_hopeless(last) or bool(last.intersection(*(self._surely_too_large(s, limit) for s in steps)))

    def _is_hopeless(self, too_large: Set[str]) -> bool:
        """Whether phases do not fit with the last options, of which only training calls may need less with others."""
        return any(self._kinds.get(phase) != "train" for phase in too_large)

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
    def _heuristic(self, divisor: int, *, orders_ranks: bool = True) -> ExecutionPlan:
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
            generates_in_tensor_parallel=task.generates_in_tensor_parallel,
            orders_ranks=orders_ranks,
        ).completed(task.dataflow)

    def _layouts(self) -> Iterator[_Layouts]:
        """Yield makers of the heuristic plan, then of plans that train and infer on all ranks.

        Their replicas for generation are divided further from plan to plan, and at last sharded as for training. Plans
        that divide rows come last.
        """
        nothing_fits = self._task.cluster.device_memory_bytes
        common = math.gcd(self._per_node, len(self._ranks))
        degrees = [tp for tp in range(1, common + 1) if common % tp == 0]
        yield lambda heuristic: heuristic(1)
        slices = self._row_tokens // MIN_SLICE_TOKENS
        for cp, tp, divisor in itertools.product(degrees, degrees, (*MEMORY_DIVISORS, nothing_fits)):
            if cp == 1 or (cp <= slices and common % (cp * tp) == 0):
                yield functools.partial(self._sharded, divisor, tp, cp)

    def _sharded(self, divisor: int, tp: int, cp: int, heuristic: Callable[[int], ExecutionPlan]) -> ExecutionPlan:
        """Return the heuristic plan with training and inference sharded over all ranks, and generation if it is there.

        Args:
            divisor: Divisor of a device's memory in the heuristic plan.
        """
        plan = heuristic(divisor)
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

    def _offloads(self) -> tuple[tuple[str, ...], ...]:
        """Return the parts to offload: the frozen roles, then the optimizer states, too."""
        flow = self._task.dataflow
        frozen = tuple(r for r in flow.roles if r not in flow.trained_roles and r not in self._sharers)
        states = tuple(role + OPTIMIZER_SUFFIX for role in flow.trained_roles)
        return frozen, frozen + states


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
