"""The best execution plan that can be found in the time given, and how much better any other could be.

Pure but for the clock it is handed: the same seed and the same number of evaluations give the same plan.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.parts import usable_bytes
from lightning_realloc.tuning.search.bound import lower_bound
from lightning_realloc.tuning.search.exact import BranchAndBound
from lightning_realloc.tuning.search.infeasible import nothing_fits
from lightning_realloc.tuning.search.local import LocalSearch
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.progress import Improvement, Progress
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.timeline.simulator import Overlap

MOST_NODES_FOR_EXACT = 4
"""Sets of nodes are tried one by one; beyond this there are too many for a search that ends."""
SHARE_OF_PRICING, SHARE_OF_EXACT = 0.6, 0.7
"""Of the effort, at the latest: when pricing options stops; when an exact search gives up."""
START_EVALUATIONS = 2000
"""Evaluations of the search for a first plan, where an exact one follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan, and what is known about it."""

    plan: ExecutionPlan
    seconds: float
    """Of an iteration, as estimated."""
    lower_bound: float
    """Seconds that no plan of the space is faster than; 0 where the time did not suffice to know."""
    evaluations: int
    history: tuple[Improvement, ...] = field(repr=False)
    """Every better plan met, in order."""

    @property
    def gap(self) -> float:
        """The share of its seconds that the best plan can save at most; 0: this is the best."""
        return 1.0 - self.lower_bound / self.seconds if self.seconds else 0.0


def search_plan(
    dataflow: Dataflow,
    models: Mapping[str, ModelSpec],
    cluster: ClusterSpec,
    estimator: Estimator,
    *,
    seed: int,
    seconds: float,
    memory_budget: int | None = None,
    overlap: Overlap = "iterations",
    options: CallOptions | None = None,
    max_evaluations: int | None = None,
    generation_parts: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Return the best plan found.

    Small spaces are searched by branch and bound, which ends early, with a gap of 0; others until the time is over.

    Args:
        models: The parameters of every role.
        seconds: How long to search. Pricing the options comes first and may take most of it on a large cluster.
        memory_budget: Bytes of a device that plans may fill; by default all but `HEADROOM`, since forecasts err.
        max_evaluations: End after so many plans, for results that do not depend on the machine's speed.
        generation_parts: In how many portions samples go to inference on ranks of its own, as `simulate` has it.

    Raises:
        NothingFitsError: where no plan fits the budget, with what is missing and how many nodes would do.
        PlanError: for a role without a model, and for an estimator of another cluster or dataflow.
    """
    if seconds <= 0:
        raise PlanError(f"seconds={seconds} of a search must be positive; ten are enough for 16 nodes")
    if estimator.cluster != cluster or estimator.dataflow != dataflow:
        raise PlanError("the estimator prices another cluster or dataflow than is searched; build it from the same two")
    progress = Progress(clock, seconds, max_evaluations)
    budget = usable_bytes(cluster.device_memory_bytes) if memory_budget is None else memory_budget
    problem = Problem(
        dataflow, models, estimator, options=options or CallOptions(), overlap=overlap, memory_budget=budget,
        is_late=lambda: progress.elapsed_s >= SHARE_OF_PRICING * seconds, generation_parts=generation_parts,
    )  # fmt: skip
    if not all(problem.tables):
        raise nothing_fits(problem, None)
    bound = lower_bound(problem)
    bound = max(bound, _search(problem, random.Random(seed), progress))
    if progress.best is None or not progress.best.is_legal:
        raise nothing_fits(problem, progress.best)
    plan = problem.execution_plan(progress.state, progress.offload)
    plan.check(dataflow, cluster.num_devices)
    found = progress.best.seconds
    return SearchResult(
        plan=plan, seconds=found, lower_bound=min(bound, found), evaluations=progress.evaluations,
        history=tuple(progress.history),
    )  # fmt: skip


def _search(problem: Problem, rng: random.Random, progress: Progress) -> float:
    """Fill ``progress`` with the best plan; return a bound from below, 0 for none."""
    local = LocalSearch(problem, rng, progress)
    if problem.cluster.num_nodes > MOST_NODES_FOR_EXACT or not problem.is_complete:
        local.run()
        return 0.0
    limit = progress.max_evaluations
    progress.max_evaluations = min(START_EVALUATIONS, limit or START_EVALUATIONS)
    local.run()
    progress.max_evaluations = limit
    assert progress.best is not None, "a local search evaluates its starts"

    def is_over() -> bool:
        progress.evaluations += 1
        return progress.share >= SHARE_OF_EXACT

    exact = BranchAndBound(problem, progress.best, progress.keep, is_over)
    exact.run()
    if not exact.is_stopped:
        return progress.best.seconds if progress.best.is_legal else math.inf
    local.run()
    return min(exact.bound, progress.best.seconds)
