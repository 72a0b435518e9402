"""Propose a few plans that are worth a trial in a running algorithm, at the prices of a `PlanPricer`.

The search's best plan is best by estimates, which have errors. The proposed plans therefore differ in kind: the best of
all plans, the best with every call on all ranks, plans with one layout for all calls, and the heuristic plan. If an
estimate misjudges one kind (its moves, its overlap, its small calls), another kind wins on real iterations.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ReallocError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.plan_search import search_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.shapes.role_memory import sharers_of
from lightning_realloc.tuning.timeline.call_timeline import MOVE_PREFIX
from lightning_realloc.tuning.tuner_actions import Candidate

ANY_PLAN_SHARE = 0.8
"""Fraction of the search's seconds for plans of any kind; the rest is for plans with every call on all ranks."""
FIRST_SEARCH_DIVISOR = 16
"""The first search gets the available seconds divided by this. A larger value ends sooner on small clusters."""
MIN_FIRST_SEARCH_S = 0.25
"""Least seconds of the first search. A shorter one sees little but plans of one kind, even with twice the time."""
MIN_IMPROVEMENT = 0.005
"""Fraction of an iteration that a search with twice the time must save for the search to continue."""
PIPELINED_MICRO_BATCHES = (4, 8)
"""Micro-batches of an optimizer step that are tried where those of a usual size would be fewer: stages wait in turn for
a single one. More of them idle less, and compute less efficiently."""
NUM_STATIC_PLANS = 2
"""Number of proposed plans with one layout for all calls, the best ones by estimate."""


@dataclass(frozen=True, kw_only=True)
class PlanEvaluator:
    """Proposes plans for lengths that iterations of a running algorithm had, and predicts what a plan's calls take.

    Returned by ``strategy.plan_evaluator()``. `PlanPricer` says which plans are legal and fit.
    """

    task: PlanningTask
    """The algorithm on its ranks; the workload is the largest one that memory must have room for."""
    estimate: Callable[[TypicalLengths], Estimator]
    """Lengths of iterations -> the estimator that prices plans for them."""
    lengths: TypicalLengths
    """Expected lengths of the next iterations."""

    @cached_property
    def estimator(self) -> Estimator:
        """Estimator for the expected lengths."""
        return self.estimate(self.lengths)

    # ---- estimates
    def seconds(self, plan: ExecutionPlan) -> float:
        """Return the estimated seconds of an iteration."""
        return self.task.timeline(plan, self.estimator).seconds_per_iteration

    def call_seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Return the estimated seconds of every call, with the move of its weights."""
        seconds: dict[str, float] = {}
        for entry in self.task.timeline(plan, self.estimator, iterations=2).entries:
            if entry.iteration == 1:
                call = entry.phase.removeprefix(MOVE_PREFIX)
                seconds[call] = seconds.get(call, 0.0) + entry.seconds
        return seconds

    def work(self, plan: ExecutionPlan, lengths: TypicalLengths) -> float:
        """Return the sum of the estimated seconds of all calls, in iterations of some lengths."""
        prices = self.estimate(lengths)
        calls = [call.name for call in self.task.dataflow.iteration_calls if call.role is not None]
        return sum(prices.call_seconds(name, plan.call(name)).total for name in calls)

    def peak_bytes(self, plan: ExecutionPlan) -> dict[tuple[int, ...], int]:
        """Return the forecast peak bytes of ranks in an iteration, by group of interchangeable ranks.

        Raises:
            LayoutError: for a layout that does not fit its model.
        """
        largest: dict[int, int] = {}
        for entry in self.task.forecast(plan).iteration_phases:
            largest[entry.rank] = max(largest.get(entry.rank, 0), entry.parts.total)
        return {ranks: max(largest[rank] for rank in ranks) for ranks in interchangeable_ranks(plan)}

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether a plan is legal and fits into the memory of every rank."""
        try:
            return not PlanPricer(self.task, self.estimator).price(plan).missing_bytes
        except ReallocError:
            return False

    # ---- proposals
    def propose(
        self, start: ExecutionPlan, *, seconds: float, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> list[Candidate]:
        """Return distinct plans other than ``start`` that fit, fastest first by estimate.

        Calls that no iteration runs keep their plan from ``start``.
        """
        found: dict[ExecutionPlan, float] = {}
        for proposed in self._plans(start, seconds, seed, clock):
            plan = proposed.with_rest_of(start)
            if plan != start and plan not in found and self.fits(proposed):
                found[plan] = self.seconds(proposed)
        return sorted((Candidate(plan, took) for plan, took in found.items()), key=lambda one: one.predicted_s)

    def _plans(
        self, start: ExecutionPlan, seconds: float, seed: int, clock: Callable[[], float]
    ) -> Iterator[ExecutionPlan]:
        task, options = self.task, self._options(start)
        wholly = replace(options, num_ranks=task.cluster.num_devices)
        for chosen, share in ((options, ANY_PLAN_SHARE), (wholly, 1 - ANY_PLAN_SHARE)):
            try:
                yield self._search(chosen, share * seconds, seed, clock)
            except ReallocError:
                break  # no plan fits, and so none with every call on all ranks
        static = sorted(PlanPricer(task, self.estimator, options=options).static_plans(), key=self.seconds)
        yield from itertools.islice(filter(self.fits, static), NUM_STATIC_PLANS)
        try:
            yield heuristic_plan(
                task.dataflow,
                task.models,
                task.cluster,
                world_size=task.cluster.num_devices,
                element_bytes=task.settings.copy_bytes,
                sharers=sharers_of(task.roles),
                workload=task.workload,
                generates_in_stages=task.generates_in_stages,
                generates_in_lockstep=task.generates_in_lockstep,
                generates_in_tensor_parallel=task.generates_in_tensor_parallel,
            ).completed(task.dataflow)
        except ReallocError:
            return

    def _search(self, options: CallOptions, seconds: float, seed: int, clock: Callable[[], float]) -> ExecutionPlan:
        """Return the best plan found, in as much of ``seconds`` as improves it.

        A search cannot know that no better plan exists. It is repeated with twice the time until that saves less than
        `MIN_IMPROVEMENT`, so that small clusters take a fraction of a second.
        """
        task, begin, best = self.task, clock(), None
        allowed = min(seconds, max(MIN_FIRST_SEARCH_S, seconds / FIRST_SEARCH_DIVISOR))
        while True:
            found = search_plan(
                task.models,
                self.estimator,
                seed=seed,
                seconds=allowed,
                memory_budget=task.usable_bytes,
                overlap=task.overlap,
                options=options,
                clock=clock,
                generation_chunks=task.generation_chunks,
            )
            if best is not None and found.seconds > (1 - MIN_IMPROVEMENT) * best.seconds:
                return min(best, found, key=lambda one: one.seconds).plan
            if found.gap == 0 or clock() - begin + 2 * allowed > seconds:
                return found.plan
            best, allowed = found, 2 * allowed

    def _options(self, start: ExecutionPlan) -> CallOptions:
        """Return the options of calls: those of the start plan, and those that need less memory or fill a pipeline.

        Rows are divided only if the start plan divides some, since a loss of the user's may need whole rows.
        """
        assert self.task.workload is not None, "estimates of seconds need one"
        chosen = {plan.micro_batch_tokens for _, plan in start.calls}
        fewer = max(1, self.task.workload.micro_batch_tokens // 4)
        in_stages = {tokens for tokens in map(self._tokens_of_part, PIPELINED_MICRO_BATCHES) if tokens < fewer}
        divides = any(plan.layout.count(*Layout.token_axes) > 1 for _, plan in start.calls)
        tokens = sorted({size for size in chosen if size is not None} | {fewer} | in_stages)
        generating = [call.name for call in self.task.dataflow.model_calls if call.kind == "generate"]
        slots = sorted({start.call(name).max_slots for name in generating} or {64})
        options = CallOptions(micro_batch_tokens=(None, *tokens), max_slots=tuple(slots), divides_rows=divides)
        return self.task.call_options(options)

    def _tokens_of_part(self, count: int) -> int:
        """Return the tokens of a micro-batch where an optimizer step has ``count`` of them."""
        load, responses = self.task.workload, self.lengths.responses
        assert load is not None, "estimates of seconds need one"
        sequences = math.ceil(self.lengths.num_sequences / (load.num_minibatches * count))
        return math.ceil(sequences * (self.lengths.prompt_tokens + sum(responses) / len(responses)))


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
        place = tuple(
            layout.share(rank, *layout.stage_axes).position if rank in layout else None for layout in plan.layouts
        )
        groups.setdefault(place, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
