"""Price whole plans by timeline and memory forecast: those of a search, the heuristic plan and static plans.

A search scores plans with fast approximations. Here each plan gets the simulator's timeline, and the forecast of every
rank's memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.advice import gibibytes
from lightning_realloc.tuning.memory.forecast import SET_UP, MemoryForecast, PhaseMemory
from lightning_realloc.tuning.memory.least_memory import least_by_phase
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.search.default_plan import default_plan, largest_by_phase
from lightning_realloc.tuning.search.infeasible import NothingFitsError, enough_nodes
from lightning_realloc.tuning.search.options import Pricing
from lightning_realloc.tuning.search.plan_search import SearchResult, search_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.space import CallOptions, common_dims
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.timeline.call_timeline import CallTimeline

MAX_SEARCHES = 4
"""Most searches for one plan. A search counts bytes less exactly than the forecast, and is repeated with a smaller
budget if its plan does not fit: smaller by what is missing, then by two and by four times as much."""

MAX_OVERESTIMATE = 1.25
"""Bytes of a plan as the search counts them, over those of its forecast: it adds up the most of every part, of
different ranks. Plans beyond are taken not to fit; raising it forecasts more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its timeline and its memory forecast."""

    plan: ExecutionPlan
    timeline: CallTimeline = field(repr=False)
    forecast: MemoryForecast = field(repr=False)
    memory_budget: int
    """Bytes of a device."""
    usable_bytes: int
    """Bytes of a device that a plan may fill."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.timeline.seconds_per_iteration

    @property
    def peak(self) -> PhaseMemory:
        """Phase of an iteration with the largest total, on its fullest rank."""
        return self.forecast.iteration_peak

    @property
    def set_up_bytes(self) -> int:
        """Bytes of the fullest rank before the first iteration, while models are built."""
        return max(entry.parts.total for entry in self.forecast.phases if entry.phase == SET_UP)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the fullest rank beyond `usable_bytes` during iterations; 0 if the plan fits."""
        return max(0, self.peak.parts.total - self.usable_bytes)

    @property
    def can_start(self) -> bool:
        """Whether building the models fits into a device, which a run checks before its first iteration."""
        return self.set_up_bytes <= self.memory_budget

    @property
    def can_run(self) -> bool:
        """Whether the plan can start, and fits during iterations."""
        return self.can_start and not self.missing_bytes


SearchWithin: TypeAlias = Callable[[int], tuple[PricedPlan, SearchResult]]
"""Searches for a plan within a budget of bytes."""


class PlanPricer:
    """Prices plans for one task, and searches for the best one; `PlanEvaluator` proposes plans to a run."""

    def __init__(self, task: PlanningTask, estimator: Estimator, *, options: CallOptions | None = None) -> None:
        self.task, self.estimator = task, estimator
        self.options = task.call_options(options or CallOptions())
        self._memory = MemoryModel(task.dataflow, task.roles, task.settings, task.workload)
        self._static: dict[ParallelDims, ExecutionPlan] = {}
        self._heuristic: list[PricedPlan] | None = None
        """The results of `heuristic`, whose forecasts take seconds for a thousand devices."""

    def price(self, plan: ExecutionPlan) -> PricedPlan:
        """Return a plan with its timeline and its memory forecast.

        Raises:
            PlanError: for a plan that does not fit the dataflow or the cluster.
            LayoutError: for a layout that does not fit its model.
        """
        task = self.task
        plan = plan.completed(task.dataflow)
        plan.check(task.dataflow, task.cluster.num_devices)
        plan.check_models(task.dataflow, task.models)
        return PricedPlan(
            plan=plan,
            timeline=task.timeline(plan, self.estimator),
            forecast=task.forecast(plan),
            memory_budget=task.memory_budget,
            usable_bytes=task.usable_bytes,
        )

    def search(
        self, *, seed: int, seconds: float, clock: Callable[[], float], max_evaluations: int | None = None
    ) -> tuple[PricedPlan, SearchResult]:
        """Return the best plan found that fits by the forecast of every rank, with the result of its search.

        A search ignores the memory for building models, which depends on the plan in part. If its plan cannot start, a
        slower plan that can start is returned, if one is found. If a search finds no plan that fits, the fastest of the
        heuristic and the static plans that fits is returned.

        Args:
            seed: Seed of the search.
            seconds: Duration of the search; further ones, within fewer bytes, take half as long.
            clock: Returns the current time in seconds.
            max_evaluations: Most scored plans of one search; None: no limit.

        Raises:
            NothingFitsError: if no plan fits.
        """
        task = self.task

        def search_within(budget: int) -> tuple[PricedPlan, SearchResult]:
            is_first = budget == task.usable_bytes
            found = search_plan(
                task.models,
                self.estimator,
                seed=seed,
                seconds=seconds if is_first else seconds / 2,
                memory_budget=budget,
                options=self.options,
                clock=clock,
                max_evaluations=max_evaluations,
                overlap=task.overlap,
                generation_chunks=task.generation_chunks,
            )
            return self.price(found.plan), found

        try:
            best, found, budget = self._fitting(search_within)
        except NothingFitsError as error:  # a plan with one layout for all calls may fit all the same
            simple = self._fastest_simple()
            if simple is None:
                raise error.with_closest(self._closest()) from None
            bound = SearchResult(plan=simple.plan, seconds=simple.seconds, lower_bound=0.0, evaluations=0, history=())
            return simple, bound
        # A search that ran out of time may not have reached a plan with one layout, or that of a run without a plan.
        simple = self._fastest_simple()
        known = [best] if simple is None else [best, simple]
        chosen = min(known, key=lambda priced: priced.seconds) if best.can_start else None
        chosen = chosen or self._starting(best, search_within, budget) or best
        return chosen, found if chosen is best else replace(found, plan=chosen.plan, seconds=chosen.seconds)

    def _fitting(self, search_within: SearchWithin) -> tuple[PricedPlan, SearchResult, int]:
        """Return the first found plan that fits by its forecast, and the budget of its search."""
        budget = self.task.usable_bytes
        for number in range(MAX_SEARCHES):
            best, found = search_within(budget)
            if not best.missing_bytes:
                return best, found, budget
            budget -= best.missing_bytes << number
        raise NothingFitsError(
            f"the best plans found need {best.missing_bytes} bytes more than the {self.task.usable_bytes} of a device "
            f"that they may fill; use devices with that much more memory, or more nodes than "
            f"{self.task.cluster.num_nodes}"
        )

    def _starting(self, best: PricedPlan, search_within: SearchWithin, budget: int) -> PricedPlan | None:
        """Return the fastest plan that can start, of a second search and of the simple plans; None without one."""
        simple = self._fastest_simple()
        if simple is None:
            return None
        found = [simple]
        with contextlib.suppress(NothingFitsError):  # a smaller budget shards more of the weights
            found.append(search_within(budget - (best.set_up_bytes - best.memory_budget))[0])
        return min((priced for priced in found if priced.can_run), key=lambda priced: priced.seconds)

    def _fastest_simple(self) -> PricedPlan | None:
        """Return the fastest of the heuristic and the static plans that can run; None without one."""
        static = self.static(1, wanted=lambda priced: priced.can_run)
        able = (priced for priced in (*self.heuristic(), *static) if priced.can_run)
        return min(able, key=lambda priced: priced.seconds, default=None)

    def enough_nodes(self, is_over: Callable[[], bool]) -> int | None:
        """Return about the smallest larger number of nodes on which plans fit; see `infeasible.enough_nodes`."""
        task, options = self.task, self.options
        room = task.usable_bytes
        pricing = Pricing(models=task.models, estimator=self.estimator, options=options, memory_budget=room)
        return enough_nodes(pricing, is_over)

    def heuristic(self) -> list[PricedPlan]:
        """Return the heuristic plan, and the plan that a run without one takes if it is another."""
        task = self.task
        if self._heuristic is None:
            found = default_plan(
                task,
                lambda plan: largest_by_phase(task.forecast(plan)),
                world_size=task.cluster.num_devices,
                least_bytes=partial(least_by_phase, self._memory),
            )
            self._heuristic = [self.price(plan) for plan in dict.fromkeys((found.heuristic, found.plan))]
        return self._heuristic

    def static(
        self, count: int, *, wanted: Callable[[PricedPlan], bool] = lambda priced: not priced.missing_bytes
    ) -> list[PricedPlan]:
        """Return the fastest of the `static_plans` that fit; without any, the one that needs the fewest bytes.

        Plans are tried in the order of the search's estimates, since the forecasts of a thousand ranks take long.

        Args:
            count: Most plans to return.
            wanted: Which of the priced plans to return.
        """
        room, layouts = self.task.usable_bytes, self._static_layouts
        kept = {layout: max(self._kept_by_rank(ExecutionPlan.static(self.task.dataflow, layout))) for layout in layouts}
        most = MAX_OVERESTIMATE * room
        plans = [self._static_plan(layout) for layout in layouts if kept[layout] <= most]
        near = [plan for plan in plans if kept[plan.layouts[0]] + self._most_active(plan) <= most]
        possible = (
            plan
            for plan in sorted(near, key=self._seconds_in_turn)
            if max(least_by_phase(self._memory, plan).values()) <= room
        )
        found = list(itertools.islice(filter(wanted, map(self.price, possible)), count))
        if not found and layouts:
            return [self.price(self._smallest_static(kept))]
        return sorted(found, key=lambda priced: priced.seconds)

    def _smallest_static(self, kept: Mapping[Layout, int]) -> ExecutionPlan:
        """Return the static plan that needs the fewest bytes; ``kept`` are those that stay between its calls."""
        smallest, least = None, math.inf
        for layout in sorted(kept, key=lambda one: kept[one]):
            if kept[layout] >= least:
                break
            plan = self._static_plan(layout)
            if (needed := kept[layout] + self._most_active(plan)) < least:
                smallest, least = plan, needed
        assert smallest is not None, "there is a layout"
        return smallest

    def _closest(self) -> str:
        """Return a sentence about the simple plan that lacks fewest bytes: its fullest phase, with all its parts."""
        priced = min((*self.heuristic(), *self.static(1)), key=lambda one: one.missing_bytes)
        peak, task = priced.peak, self.task
        call = task.dataflow.call(peak.phase.removeprefix("-> "))
        parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in peak.parts.by_size(None) if size)
        text = (
            f"the closest of the simple plans, {call.name}: {priced.plan.call(call.name).to_text()}, needs "
            f"{gibibytes(peak.parts.total)} of the {gibibytes(task.usable_bytes)} in {peak.phase} ({parts})"
        )
        shape = task.roles[self.estimator.owner(str(call.role))].shape
        if call.kind != "generate" or shape is None or task.workload is None:
            return text
        size = shape.kv_cache_elements(1) * task.settings.copy_bytes * task.workload.longest
        return f"{text}; {describe_sample_cache(shape, size)}"

    def static_plans(self) -> list[ExecutionPlan]:
        """Return every plan with one layout for all calls on all ranks, with its best options."""
        return [self._static_plan(layout) for layout in self._static_layouts]

    @property
    def num_static_plans(self) -> int:
        """Number of the `static_plans`, most of which a large cluster makes only on demand."""
        return len(self._static_layouts)

    @cached_property
    def _static_layouts(self) -> list[Layout]:
        flow, cluster = self.task.dataflow, self.task.cluster
        ranks = tuple(range(cluster.num_devices))
        return [Layout(dims, ranks) for dims in common_dims(flow, self.task.models, cluster, self.options)]

    def _static_plan(self, layout: Layout) -> ExecutionPlan:
        if layout.dims not in self._static:
            self._static[layout.dims] = self.with_best_options(ExecutionPlan.static(self.task.dataflow, layout))
        return self._static[layout.dims]

    def _seconds_in_turn(self, plan: ExecutionPlan) -> float:
        calls = (call for call in self.task.dataflow.iteration_calls if call.role is not None)
        return sum(self.estimator.call_seconds(call.name, plan.call(call.name)).total for call in calls)

    def _most_active(self, plan: ExecutionPlan) -> int:
        calls = (call for call in self.task.dataflow.iteration_calls if call.role is not None)
        return max(self.estimator.active_bytes(call.name, plan.call(call.name)) for call in calls)

    # ---- options
    def with_best_options(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan with the fastest options that fit for each call; if none fit, with those that need least."""
        kept = self._kept_by_rank(plan)
        chosen = []
        for name, before in plan.calls:
            call = self.task.dataflow.call(name)
            room = self.task.usable_bytes - max(kept[rank] for rank in before.layout.ranks)
            chosen.append((name, self._best_options(call, before.layout, room)))
        return replace(plan, calls=tuple(chosen))

    def _best_options(self, call: ModelFunctionCall, layout: Layout, room: int) -> CallPlan:
        """Return the fastest options that need at most ``room`` bytes, or those that need the fewest."""
        plans = self.options.plans(call.kind, layout)
        by_seconds = sorted(plans, key=lambda plan: self.estimator.call_seconds(call.name, plan).total)
        fitting = (plan for plan in by_seconds if self.estimator.active_bytes(call.name, plan) <= room)
        return next(fitting, None) or min(plans, key=lambda plan: self.estimator.active_bytes(call.name, plan))

    def _kept_by_rank(self, plan: ExecutionPlan) -> list[int]:
        """Return the bytes that each rank keeps between calls: homes, and replicas."""
        flow, prices = self.task.dataflow, self.estimator
        replicas: set[tuple[str, Layout, bool]] = set()
        for call in flow.model_calls:
            layout = plan.layout(call.name)
            for role in (prices.owner(str(call.role)), *call.further_roles):
                home = plan.layout(flow.home_call(role).name)
                replicas.add((role, home, True))
                if layout != home or (call.kind == "generate" and prices.generates_in_copy(role, layout)):
                    replicas.add((role, layout, False))
        kept = [0] * self.task.cluster.num_devices
        for role, layout, is_home in replicas:
            size = prices.resident_bytes(role, layout, is_home=is_home)
            for rank in layout.ranks:
                kept[rank] += size
        return kept


def describe_sample_cache(shape: ModelShape, num_bytes: int) -> str:
    """Return a sentence about the cache of one sample, and which degrees of a layout divide it."""
    if shape.cached_latent is not None:
        return f"latents of one sample are {gibibytes(num_bytes)}, which stages divide, but tp does not"
    return f"keys and values of one sample are {gibibytes(num_bytes)}, which stages and tp divide"
