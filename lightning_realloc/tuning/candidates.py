"""What would other plans of a running algorithm take, and which few of them are worth a try?

The best plan that a search finds is best by estimates, which are wrong in places. So what is proposed differs in kind:
calls on ranks of their own, every call on all ranks, one layout for everything, and the heuristic's plan. Where an
estimate misjudges one kind (moves, overlaps, small parts of work), another one wins on real iterations.
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
from lightning_realloc.tuning.search.space import CallOptions, legal_dims
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.timeline.simulator import Overlap, simulate
from lightning_realloc.tuning.tuner_actions import Candidate

SHARE_OF_ALL_PLANS = 0.8
"""Of a search's seconds, for plans of any kind; the rest is for plans whose calls all have all ranks."""
SHORTEST_SEARCH = 16
"""The first search takes this fraction of the seconds that there are."""
LEAST_SEARCH_S = 0.25
"""A first search that is shorter has seen little but plans of one kind, and twice the time would not change that."""
WORTH_SEARCHING = 0.005
"""What twice the time must save of an iteration for a search to go on."""
NUM_STATIC = 2
"""Layouts for everything that are proposed, the best ones by estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvaluator:
    """What plans of one algorithm are judged by."""

    dataflow: Dataflow
    estimate: Callable[[TypicalLengths], Estimator]
    """Makes what prices plans for iterations of such lengths."""
    lengths: TypicalLengths
    """Of the iterations to come."""
    roles: dict[str, RoleMemory]
    settings: MemorySettings
    workload: Workload
    """What memory must have room for."""
    memory_budget: int
    """Bytes of a device that a plan may fill."""
    overlap: Overlap
    generation_parts: int = 1
    """In how many portions samples go to inference on ranks of its own."""

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Role -> its parameters."""
        return {name: role.model for name, role in self.roles.items()}

    # ---- judging
    def seconds(self, plan: ExecutionPlan, estimator: Estimator | None = None) -> float:
        """Return how long an iteration should take."""
        prices = estimator or self.estimate(self.lengths)
        timeline = simulate(self.dataflow, plan, prices, overlap=self.overlap, generation_parts=self.generation_parts)
        return timeline.seconds_per_iteration

    def call_seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Return how long every call should take, with the move of its weights where one comes before it."""
        prices = self.estimate(self.lengths)
        timeline = simulate(
            self.dataflow, plan, prices, iterations=2, overlap=self.overlap, generation_parts=self.generation_parts
        )
        seconds: dict[str, float] = {}
        for entry in timeline.entries:
            if entry.iteration == 1:
                call = entry.phase.removeprefix("-> ")
                seconds[call] = seconds.get(call, 0.0) + entry.seconds
        return seconds

    def work(self, plan: ExecutionPlan, lengths: TypicalLengths) -> float:
        """Return the seconds of all calls, one after the other, in iterations of other lengths."""
        prices = self.estimate(lengths)
        calls = [call.name for call in self.dataflow.iteration_calls if call.role is not None]
        return sum(prices.call_seconds(name, plan.call(name)).total for name in calls)

    def peak_bytes(self, plan: ExecutionPlan) -> dict[tuple[int, ...], int]:
        """Return the most bytes that ranks should need in the calls of an iteration, alike ranks together.

        Raises:
            LayoutError: for a layout that does not fit its model.
        """
        groups = interchangeable_ranks(plan)
        firsts = [ranks[0] for ranks in groups]  # shards are padded: no other one of the group holds more
        forecast = forecast_memory(self.dataflow, plan, self.roles, self.settings, self.workload, ranks=firsts)
        calls = {f"{arrow}{call.name}" for call in self.dataflow.iteration_calls for arrow in ("", "-> ")}
        return {
            ranks: max(e.parts.total for e in forecast.phases if e.rank == ranks[0] and e.phase in calls)
            for ranks in groups
        }

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether a plan is legal and has room on every rank."""
        num_ranks = self.estimate(self.lengths).cluster.num_devices
        try:
            plan.check(self.dataflow, num_ranks)
            plan.check_models(self.dataflow, self.models)
            return max(self.peak_bytes(plan).values()) <= self.memory_budget
        except ReallocError:
            return False

    # ---- proposing
    def propose(
        self, start: ExecutionPlan, *, seconds: float, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> list[Candidate]:
        """Return distinct plans that fit, the best of each kind first by estimate; ``start`` is none of them.

        Calls that no iteration runs any more stay where the start has them.
        """
        prices = self.estimate(self.lengths)
        found: dict[ExecutionPlan, float] = {}
        for judged in self._plans(prices, start, seconds, seed, clock):
            plan = judged.with_rest_of(start)
            if plan != start and plan not in found and self.fits(judged):
                found[plan] = self.seconds(judged, prices)
        return sorted((Candidate(plan, took) for plan, took in found.items()), key=lambda one: one.predicted_s)

    def _plans(
        self, prices: Estimator, start: ExecutionPlan, seconds: float, seed: int, clock: Callable[[], float]
    ) -> Iterator[ExecutionPlan]:
        options = self._options(start)
        wholly = replace(options, num_ranks=prices.cluster.num_devices)
        shares = ((options, SHARE_OF_ALL_PLANS), (wholly, 1 - SHARE_OF_ALL_PLANS))
        for chosen, share in shares:
            try:
                yield self._search(prices, chosen, share * seconds, seed, clock)
            except ReallocError:
                break  # nothing fits; much less what is bound to all ranks
        yield from self._static_plans(prices, options)
        try:
            yield heuristic_plan(
                self.dataflow, self.models, prices.cluster, world_size=prices.cluster.num_devices,
                element_bytes=self.settings.copy_bytes,
                sharers={name: role.shares for name, role in self.roles.items() if role.shares is not None},
            ).completed(self.dataflow)  # fmt: skip
        except ReallocError:
            return

    def _search(
        self, prices: Estimator, options: CallOptions, seconds: float, seed: int, clock: Callable[[], float]
    ) -> ExecutionPlan:
        """Return the best plan found, after as much of ``seconds`` as it is worth.

        A search does not know that nothing better will come. So it is made again with twice the time, until that finds
        nothing better by `WORTH_SEARCHING`: small clusters are done after a fraction of a second.
        """
        begin, allowed, best = clock(), min(seconds, max(LEAST_SEARCH_S, seconds / SHORTEST_SEARCH)), None
        while True:
            found = search_plan(
                self.dataflow, self.models, prices.cluster, prices, seed=seed, seconds=allowed,
                memory_budget=self.memory_budget, overlap=self.overlap, options=options, clock=clock,
                generation_parts=self.generation_parts,
            )  # fmt: skip
            if best is not None and found.seconds > (1 - WORTH_SEARCHING) * best.seconds:
                return min(best, found, key=lambda one: one.seconds).plan
            if found.gap == 0 or clock() - begin + 2 * allowed > seconds:
                return found.plan
            best, allowed = found, 2 * allowed

    def _options(self, start: ExecutionPlan) -> CallOptions:
        """Return what calls may choose: what the start has, and what takes less memory."""
        chosen = {plan.micro_batch_tokens for _, plan in start.calls}
        tokens = sorted({size for size in chosen if size is not None} | {max(1, self.workload.micro_batch_tokens // 4)})
        generating = [call.name for call in self.dataflow.model_calls if call.kind == "generate"]
        slots = sorted({start.call(name).max_slots for name in generating} or {64})
        return CallOptions(micro_batch_tokens=(None, *tokens), max_slots=tuple(slots))

    def _static_plans(self, prices: Estimator, options: CallOptions) -> list[ExecutionPlan]:
        """Return the best plans of one layout for everything that fit."""
        cluster, size = prices.cluster, prices.cluster.num_devices
        kinds = {(str(call.role), call.kind) for call in self.dataflow.model_calls}
        legal = [set(legal_dims(self.models[role], kind, size, cluster)) for role, kind in kinds]
        layouts = [Layout(dims, tuple(range(size))) for dims in sorted(set.intersection(*legal), key=str)]
        plain = [self._static_plan(layout, options, recompute=False) for layout in layouts]
        plain.sort(key=lambda plan: self.seconds(plan, prices))
        fitting = (self._fitting(plan, options) for plan in plain)
        return list(itertools.islice((plan for plan in fitting if plan is not None), NUM_STATIC))

    def _fitting(self, plan: ExecutionPlan, options: CallOptions) -> ExecutionPlan | None:
        """Return a static plan that fits: as it is, or with activations computed again."""
        variants = (plan, self._static_plan(plan.layouts[0], options, recompute=True))
        return next(filter(self.fits, variants), None)

    def _static_plan(self, layout: Layout, options: CallOptions, *, recompute: bool) -> ExecutionPlan:
        calls = []
        for call in self.dataflow.model_calls:
            chosen = CallPlan(layout, None, recompute, options.max_slots[-1]).suited(call.kind)
            calls.append((call.name, chosen))
        return ExecutionPlan(tuple(calls))


class WorkUnit:
    """Measures iterations by what their lengths should take under one plan; 1 for lengths like those given."""

    def __init__(self, prospects: PlanEvaluator, plan: ExecutionPlan, iterations: Sequence[Lengths]) -> None:
        self.plan = plan
        self.iterations = tuple(iterations)
        self._evaluator = prospects
        self._unit = prospects.work(plan, TypicalLengths.of(iterations))

    def work(self, lengths: Lengths) -> float:
        """Return an iteration's work."""
        return self._evaluator.work(self.plan, TypicalLengths.of([lengths])) / self._unit

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the lengths, as plain values."""
        lengths = [[list(one.prompts), list(one.responses)] for one in self.iterations]
        return {"plan": self.plan.to_mapping(), "lengths": lengths}


def interchangeable_ranks(plan: ExecutionPlan) -> list[tuple[int, ...]]:
    """Return groups of ranks that take part in the same calls, in the same stages."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({rank for layout in plan.layouts for rank in layout.ranks}):
        place = tuple(layout.coordinate(rank).pp if rank in layout else -1 for layout in plan.layouts)
        groups.setdefault(place, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
