"""Price other plans of a running algorithm, and propose a few that are worth a trial.

The search's best plan is best by estimates, which have errors. The proposed plans therefore differ in kind: the best of
all plans, the best with every call on all ranks, plans with one layout for all calls, and the heuristic plan. If an
estimate misjudges one kind (its moves, its overlap, its small calls), another kind wins on real iterations.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import ReallocError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.plan_search import search_plan
from lightning_realloc.tuning.search.space import CallOptions, common_dims
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.shapes.role_memory import RoleMemory, sharers_of
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap
from lightning_realloc.tuning.timeline.simulator import simulate
from lightning_realloc.tuning.tuner_actions import Candidate

ANY_PLAN_SHARE = 0.8
"""Fraction of the search's seconds for plans of any kind; the rest is for plans with every call on all ranks."""
FIRST_SEARCH_DIVISOR = 16
"""The first search gets the available seconds divided by this. A larger value ends sooner on small clusters."""
MIN_FIRST_SEARCH_S = 0.25
"""Least seconds of the first search. A shorter one sees little but plans of one kind, even with twice the time."""
MIN_IMPROVEMENT = 0.005
"""Fraction of an iteration that a search with twice the time must save for the search to continue."""
NUM_STATIC_PLANS = 2
"""Number of proposed plans with one layout for all calls, the best ones by estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvaluator:
    """Estimates the seconds and the memory of plans for one algorithm, and proposes plans.

    ``strategy.plan_evaluator()`` returns one for a running algorithm.
    """

    dataflow: Dataflow
    estimate: Callable[[TypicalLengths], Estimator]
    """Lengths of iterations -> the estimator that prices plans for them."""
    lengths: TypicalLengths
    """Expected lengths of the next iterations."""
    roles: dict[str, RoleMemory]
    """Role -> the model that its memory depends on."""
    settings: MemorySettings
    workload: Workload
    """Largest workload that memory must have room for."""
    memory_budget: int
    """Bytes of a device that a plan may fill."""
    overlap: Overlap
    generation_chunks: int = 1
    """Number of chunks in which samples go to inference on other ranks."""

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Role -> its model."""
        return {name: role.model for name, role in self.roles.items()}

    # ---- estimates
    def seconds(self, plan: ExecutionPlan, estimator: Estimator | None = None) -> float:
        """Return the estimated seconds of an iteration."""
        prices = estimator or self.estimate(self.lengths)
        timeline = simulate(self.dataflow, plan, prices, overlap=self.overlap, generation_chunks=self.generation_chunks)
        return timeline.seconds_per_iteration

    def call_seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Return the estimated seconds of every call, with the move of its weights."""
        prices = self.estimate(self.lengths)
        timeline = simulate(
            self.dataflow, plan, prices, iterations=2, overlap=self.overlap, generation_chunks=self.generation_chunks
        )
        seconds: dict[str, float] = {}
        for entry in timeline.entries:
            if entry.iteration == 1:
                call = entry.phase.removeprefix("-> ")
                seconds[call] = seconds.get(call, 0.0) + entry.seconds
        return seconds

    def work(self, plan: ExecutionPlan, lengths: TypicalLengths) -> float:
        """Return the sum of the estimated seconds of all calls, in iterations of some lengths."""
        prices = self.estimate(lengths)
        calls = [call.name for call in self.dataflow.iteration_calls if call.role is not None]
        return sum(prices.call_seconds(name, plan.call(name)).total for name in calls)

    def peak_bytes(self, plan: ExecutionPlan) -> dict[tuple[int, ...], int]:
        """Return the forecast peak bytes of ranks in an iteration, by group of interchangeable ranks.

        Raises:
            LayoutError: for a layout that does not fit its model.
        """
        groups = interchangeable_ranks(plan)
        counted = [rank for ranks in groups for rank in _ranks_with_other_heads(plan, ranks)]
        forecast = forecast_memory(self.dataflow, plan, self.roles, self.settings, self.workload, ranks=counted)
        calls = {f"{arrow}{call.name}" for call in self.dataflow.iteration_calls for arrow in ("", "-> ")}
        return {
            ranks: max(e.parts.total for e in forecast.phases if e.rank in ranks and e.phase in calls)
            for ranks in groups
        }

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether a plan is legal and fits into the memory of every rank."""
        num_ranks = self.estimate(self.lengths).cluster.num_devices
        try:
            plan.check(self.dataflow, num_ranks)
            plan.check_models(self.dataflow, self.models)
            return max(self.peak_bytes(plan).values()) <= self.memory_budget
        except ReallocError:
            return False

    # ---- proposals
    def propose(
        self, start: ExecutionPlan, *, seconds: float, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> list[Candidate]:
        """Return distinct plans other than ``start`` that fit, fastest first by estimate.

        Calls that no iteration runs keep their plan from ``start``.
        """
        prices = self.estimate(self.lengths)
        found: dict[ExecutionPlan, float] = {}
        for proposed in self._plans(prices, start, seconds, seed, clock):
            plan = proposed.with_rest_of(start)
            if plan != start and plan not in found and self.fits(proposed):
                found[plan] = self.seconds(proposed, prices)
        return sorted((Candidate(plan, took) for plan, took in found.items()), key=lambda one: one.predicted_s)

    def _plans(
        self, prices: Estimator, start: ExecutionPlan, seconds: float, seed: int, clock: Callable[[], float]
    ) -> Iterator[ExecutionPlan]:
        options = self._options(start)
        wholly = replace(options, num_ranks=prices.cluster.num_devices)
        shares = ((options, ANY_PLAN_SHARE), (wholly, 1 - ANY_PLAN_SHARE))
        for chosen, share in shares:
            try:
                yield self._search(prices, chosen, share * seconds, seed, clock)
            except ReallocError:
                break  # no plan fits, and so none with every call on all ranks
        yield from self._static_plans(prices, options)
        try:
            yield heuristic_plan(
                self.dataflow,
                self.models,
                prices.cluster,
                world_size=prices.cluster.num_devices,
                element_bytes=self.settings.copy_bytes,
                sharers=sharers_of(self.roles),
            ).completed(self.dataflow)
        except ReallocError:
            return

    def _search(
        self, prices: Estimator, options: CallOptions, seconds: float, seed: int, clock: Callable[[], float]
    ) -> ExecutionPlan:
        """Return the best plan found, in as much of ``seconds`` as improves it.

        A search cannot know that no better plan exists. It is repeated with twice the time until that saves less than
        `MIN_IMPROVEMENT`, so that small clusters take a fraction of a second.
        """
        begin, allowed, best = clock(), min(seconds, max(MIN_FIRST_SEARCH_S, seconds / FIRST_SEARCH_DIVISOR)), None
        while True:
            found = search_plan(
                self.dataflow,
                self.models,
                prices.cluster,
                prices,
                seed=seed,
                seconds=allowed,
                memory_budget=self.memory_budget,
                overlap=self.overlap,
                options=options,
                clock=clock,
                generation_chunks=self.generation_chunks,
            )
            if best is not None and found.seconds > (1 - MIN_IMPROVEMENT) * best.seconds:
                return min(best, found, key=lambda one: one.seconds).plan
            if found.gap == 0 or clock() - begin + 2 * allowed > seconds:
                return found.plan
            best, allowed = found, 2 * allowed

    def _options(self, start: ExecutionPlan) -> CallOptions:
        """Return the options of calls: those of the start plan, and those that need less memory."""
        chosen = {plan.micro_batch_tokens for _, plan in start.calls}
        tokens = sorted({size for size in chosen if size is not None} | {max(1, self.workload.micro_batch_tokens // 4)})
        generating = [call.name for call in self.dataflow.model_calls if call.kind == "generate"]
        slots = sorted({start.call(name).max_slots for name in generating} or {64})
        return CallOptions(micro_batch_tokens=(None, *tokens), max_slots=tuple(slots))

    def _static_plans(self, prices: Estimator, options: CallOptions) -> list[ExecutionPlan]:
        """Return the best plans with one layout for all calls that fit."""
        ranks = tuple(range(prices.cluster.num_devices))
        common = sorted(common_dims(self.dataflow, self.models, prices.cluster), key=str)
        layouts = [Layout(dims, ranks) for dims in common]
        plain = [self._static_plan(layout, options, recompute=False) for layout in layouts]
        plain.sort(key=lambda plan: self.seconds(plan, prices))
        fitting = (self._fitting(plan, options) for plan in plain)
        return list(itertools.islice((plan for plan in fitting if plan is not None), NUM_STATIC_PLANS))

    def _fitting(self, plan: ExecutionPlan, options: CallOptions) -> ExecutionPlan | None:
        """Return a static plan as it is or with gradient checkpointing, whichever fits first; None if neither does."""
        variants = (plan, self._static_plan(plan.layouts[0], options, recompute=True))
        return next(filter(self.fits, variants), None)

    def _static_plan(self, layout: Layout, options: CallOptions, *, recompute: bool) -> ExecutionPlan:
        calls = []
        for call in self.dataflow.model_calls:
            chosen = CallPlan(layout, None, recompute, options.max_slots[-1]).suited(call.kind)
            calls.append((call.name, chosen))
        return ExecutionPlan(tuple(calls))


class WorkUnit:
    """Measures the work of iterations: the estimated seconds of their lengths under a fixed plan.

    Args:
        evaluator: Estimates the seconds.
        plan: The fixed plan.
        iterations: Lengths that have a mean work of 1.
    """

    def __init__(self, evaluator: PlanEvaluator, plan: ExecutionPlan, iterations: Sequence[Lengths]) -> None:
        self.plan = plan
        self.iterations = tuple(iterations)
        self._evaluator = evaluator
        self._unit = evaluator.work(plan, TypicalLengths.from_iterations(iterations))

    def work(self, lengths: Lengths) -> float:
        """Return the work of an iteration."""
        return self._evaluator.work(self.plan, TypicalLengths.from_iterations([lengths])) / self._unit

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the lengths as plain values."""
        lengths = [[list(one.prompts), list(one.responses)] for one in self.iterations]
        return {"plan": self.plan.to_mapping(), "lengths": lengths}


def interchangeable_ranks(plan: ExecutionPlan) -> list[tuple[int, ...]]:
    """Return groups of ranks with the same calls and the same pipeline stages."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for rank in sorted({rank for layout in plan.layouts for rank in layout.ranks}):
        place = tuple(_index(layout, rank, layout.stage_axes) for layout in plan.layouts)
        groups.setdefault(place, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _ranks_with_other_heads(plan: ExecutionPlan, ranks: Sequence[int]) -> list[int]:
    """Return one of some interchangeable ranks for each place along ``tp``, where ranks may hold more or fewer heads.

    FSDP pads its shards, so ranks with the same place along ``tp`` hold equally much.
    """
    by_place: dict[tuple[int | None, ...], int] = {}
    for rank in ranks:
        by_place.setdefault(tuple(_index(layout, rank, layout.tensor_axes) for layout in plan.layouts), rank)
    return list(by_place.values())


def _index(layout: Layout, rank: int, axes: Sequence[str]) -> int | None:
    return layout.share(rank, *axes).position if rank in layout else None
