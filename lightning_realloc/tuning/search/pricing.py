"""What does a whole plan cost, and what do the plans cost that one would take without a search?

A search compares parts of plans; here plans are priced from end to end, with the simulator's timeline and the memory
forecast of every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.forecast import SET_UP, MemoryForecast, PhaseMemory, forecast_memory
from lightning_realloc.tuning.memory.parts import HEADROOM, MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.infeasible import NothingFitsError
from lightning_realloc.tuning.search.plan_search import SearchResult, search_plan
from lightning_realloc.tuning.search.space import CallOptions, legal_dims
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.timeline.simulator import Timeline, simulate

MOST_SEARCHES = 3
"""A search counts the bytes of a rank less exactly than the forecast; it is repeated with a smaller budget at most so
often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTask:
    """What is to be run, and on what."""

    dataflow: Dataflow
    roles: Mapping[str, RoleMemory]
    cluster: ClusterSpec
    settings: MemorySettings
    workload: Workload
    memory_budget: int
    """Bytes of a device."""
    headroom: float = HEADROOM
    """Share of them that a plan leaves free; 0 where plans are the user's own."""
    generation_parts: int = 1
    """In how many portions samples go to inference on ranks of its own."""

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill of a device."""
        return usable_bytes(self.memory_budget, self.headroom)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Every role's parameters."""
        return {name: role.model for name, role in self.roles.items()}

    def on_nodes(self, num_nodes: int) -> PlanningTask:
        """Return the same on another number of nodes."""
        return replace(self, cluster=replace(self.cluster, num_nodes=num_nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan, how long its iterations take, and what they need."""

    plan: ExecutionPlan
    timeline: Timeline = field(repr=False)
    forecast: MemoryForecast = field(repr=False)
    memory_budget: int
    """Bytes of a device."""
    usable_bytes: int
    """What a plan may fill of them."""

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.timeline.seconds_per_iteration

    @property
    def peak(self) -> PhaseMemory:
        """The phase of an iteration that needs most, on the rank where it does."""
        running = (entry for entry in self.forecast.phases if entry.phase != SET_UP)
        return max(running, key=lambda entry: entry.parts.total)

    @property
    def set_up_bytes(self) -> int:
        """What the fullest rank needs before the first iteration, while models are built."""
        return max(entry.parts.total for entry in self.forecast.phases if entry.phase == SET_UP)

    @property
    def missing_bytes(self) -> int:
        """What the fullest rank needs beyond what it may fill during iterations; 0 where the plan fits."""
        return max(0, self.peak.parts.total - self.usable_bytes)

    @property
    def can_start(self) -> bool:
        """Whether a device has room for building the models; a run asks that before its first iteration."""
        return self.set_up_bytes <= self.memory_budget

    @property
    def can_run(self) -> bool:
        """Whether it can start, and fits."""
        return self.can_start and not self.missing_bytes


class PlanPricer:
    """Prices plans of one task."""

    def __init__(self, task: PlanningTask, estimator: Estimator, *, options: CallOptions | None = None) -> None:
        self.task, self.estimator, self.options = task, estimator, options or CallOptions()

    def price(self, plan: ExecutionPlan) -> PricedPlan:
        """Return what a plan costs.

        Raises:
            PlanError: for a plan that does not fit the dataflow or the cluster.
            LayoutError: for a layout that does not fit its model.
        """
        task, world_size = self.task, self.task.cluster.num_devices
        plan = plan.completed(task.dataflow)
        plan.check(task.dataflow, world_size)
        plan.check_models(task.dataflow, task.models)
        forecast = forecast_memory(
            task.dataflow, plan, task.roles, task.settings, task.workload, ranks=range(world_size)
        )
        timeline = simulate(task.dataflow, plan, self.estimator, generation_parts=task.generation_parts)
        return PricedPlan(
            plan=plan, timeline=timeline, forecast=forecast, memory_budget=task.memory_budget,
            usable_bytes=task.usable_bytes,
        )  # fmt: skip

    def search(
        self, *, seed: int, seconds: float, clock: Callable[[], float], max_evaluations: int | None = None
    ) -> tuple[PricedPlan, SearchResult]:
        """Return the best plan found, one that fits also by the forecast of every rank.

        A search does not know what building models needs, which depends on a plan in part. So where its plan cannot
        start, a slower one that can is returned, if one is found.

        Raises:
            NothingFitsError: as it says.
        """
        task = self.task

        def search_within(budget: int) -> tuple[PricedPlan, SearchResult]:
            found = search_plan(
                task.dataflow, task.models, task.cluster, self.estimator, seed=seed, seconds=seconds,
                memory_budget=budget, options=self.options, clock=clock, max_evaluations=max_evaluations,
                generation_parts=task.generation_parts,
            )  # fmt: skip
            return self.price(found.plan), found

        budget = task.usable_bytes
        for _ in range(MOST_SEARCHES):
            best, found = search_within(budget)
            if not best.missing_bytes:
                break
            budget -= best.missing_bytes
        else:
            raise NothingFitsError(
                f"the best plans found need {best.missing_bytes} bytes more than the {task.usable_bytes} of a device "
                f"that they may fill; use devices with that much more memory, or more nodes than "
                f"{task.cluster.num_nodes}"
            )
        if best.can_start:
            return best, found
        starting = self._starting(best, search_within, budget)
        if starting is None:
            return best, found
        return starting, replace(found, plan=starting.plan, seconds=starting.seconds)

    def _starting(
        self, best: PricedPlan, search_within: Callable[[int], tuple[PricedPlan, SearchResult]], budget: int
    ) -> PricedPlan | None:
        """Return the fastest plan that can start, found by a second search or without one; None where there is none."""
        found = [priced for priced in (self.heuristic(), *self.static()) if priced.can_run]
        if not found:
            return None
        with contextlib.suppress(NothingFitsError):  # less room divides more of the weights
            found.append(search_within(budget - (best.set_up_bytes - best.memory_budget))[0])
        return min((priced for priced in found if priced.can_run), key=lambda priced: priced.seconds)

    def heuristic(self) -> PricedPlan:
        """Return the layouts that a run without a plan would have, with the options that suit them."""
        task = self.task
        layouts = heuristic_plan(
            task.dataflow, task.models, task.cluster, world_size=task.cluster.num_devices,
            element_bytes=task.settings.copy_bytes,
        )  # fmt: skip
        return self.price(self.with_best_options(layouts))

    def static(self) -> list[PricedPlan]:
        """Return every plan of one layout for all calls on all ranks, the fastest that fit first."""
        flow, cluster = self.task.dataflow, self.task.cluster
        ranks = tuple(range(cluster.num_devices))
        plans = [self.price(self.with_best_options(ExecutionPlan.static(flow, Layout(dims, ranks))))
                 for dims in self._common_dims()]  # fmt: skip
        return sorted(plans, key=lambda priced: (priced.missing_bytes, priced.seconds))

    def _common_dims(self) -> list[ParallelDims]:
        """Return the degrees that every call allows on all ranks."""
        task = self.task
        allowed = [legal_dims(task.models[str(call.role)], call.kind, task.cluster.num_devices, task.cluster)
                   for call in task.dataflow.model_calls]  # fmt: skip
        return [dims for dims in allowed[0] if all(dims in others for others in allowed[1:])]

    # ---- options
    def with_best_options(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan's layouts, each call with the fastest options that fit, or, where none do, the smallest."""
        kept = list(self._kept_by_rank(plan))
        chosen = []
        for name, before in plan.calls:
            call = self.task.dataflow.call(name)
            room = self.task.usable_bytes - max(kept[rank] for rank in before.layout.ranks)
            chosen.append((name, self._best_options(call, before.layout, room)))
        return replace(plan, calls=tuple(chosen))

    def _best_options(self, call: ModelFunctionCall, layout: Layout, room: int) -> CallPlan:
        def cost(plan: CallPlan) -> tuple[int, float]:
            beyond = max(0, self.estimator.active_bytes(call.name, plan) - room)
            return beyond, math.inf if beyond else self.estimator.call_seconds(call.name, plan).total

        return min(self.options.plans(call.kind, layout), key=cost)

    def _kept_by_rank(self, plan: ExecutionPlan) -> Iterator[int]:
        """Yield what every rank keeps between calls: home replicas, and copies in other layouts."""
        flow = self.task.dataflow
        replicas = [
            (set(layout.ranks), self.estimator.resident_bytes(role, layout, is_home=layout == home))
            for role in flow.roles
            for home in (plan.layout(flow.home_call(role).name),)
            for layout in {plan.layout(call.name) for call in flow.calls_of(role)}
        ]
        for rank in range(self.task.cluster.num_devices):
            yield sum(size for ranks, size in replicas if rank in ranks)
