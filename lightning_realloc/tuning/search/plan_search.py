"""Search for the fastest execution plan in a given time, with a bound on how much faster another one could be.

Small clusters are searched by branch and bound, larger ones by annealing. The result depends on the seed and on the
number of evaluations; the clock only ends the search.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.parts import usable_bytes
from lightning_realloc.tuning.search.bound import lower_bound
from lightning_realloc.tuning.search.exact import BranchAndBound
from lightning_realloc.tuning.search.infeasible import nothing_fits
from lightning_realloc.tuning.search.local import Improvement, LocalSearch, SearchProgress
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap

MAX_EXACT_NODES = 4
"""Largest cluster for branch and bound, which tries all sets of nodes; their number grows exponentially."""
PRICING_SHARE = 0.6
"""Fraction of the seconds after which pricing options stops. The search has the rest, also where pricing took
longer."""
MAX_PRICING_SHARE = 2.0
"""Times the seconds after which pricing options stops also where a call has none. Raising it tries more numbers of
ranks for calls that do not fit on all of them."""
EXACT_SHARE = 0.7
"""Fraction of the effort after which branch and bound gives up, and annealing continues."""
START_EVALUATIONS = 2000
"""Evaluations of the annealing that finds a first plan for branch and bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found, with a bound on all others."""

    plan: ExecutionPlan
    seconds: float
    """Estimated seconds of an iteration."""
    lower_bound: float
    """Seconds that no plan of the space is faster than; 0 if the time was too short to find a bound."""
    evaluations: int
    """Number of scored plans."""
    history: tuple[Improvement, ...] = field(repr=False)
    """Successive best plans, in order."""

    @property
    def gap(self) -> float:
        """Largest fraction of the seconds that another plan could save; 0 if this plan is the best."""
        return 1.0 - self.lower_bound / self.seconds if self.seconds else 0.0


def search_plan(
    models: Mapping[str, ModelSpec],
    estimator: Estimator,
    *,
    seed: int,
    seconds: float,
    memory_budget: int | None = None,
    overlap: Overlap = "iterations",
    options: CallOptions | None = None,
    max_evaluations: int | None = None,
    generation_chunks: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Return the best plan found.

    Branch and bound on a small space ends early, with a gap of 0; other searches use all their seconds.

    Args:
        models: Role -> its model.
        estimator: Has the dataflow and the cluster, too.
        seconds: Duration of the search. Pricing the options comes first, and may take as long again on a large cluster.
        memory_budget: Bytes of a device that plans may fill; None: all but `HEADROOM`, since forecasts have errors.
        options: Values to try for the options of calls; None: the defaults of `CallOptions`.
        max_evaluations: Most scored plans, for results that do not depend on the machine's speed; None: no limit.
        generation_chunks: Number of chunks in which samples go to inference on other ranks; see `simulate`.

    Raises:
        NothingFitsError: if no plan fits the budget, with the missing bytes and a sufficient number of nodes.
        PlanError: for a role without a model.

    Example:
        >>> from lightning_realloc import ClusterSpec, Dataflow, ModelFunctionCall, search_plan
        >>> from lightning_realloc.report.model_source import read_roles
        >>> from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
        >>> from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
        >>> flow = Dataflow((ModelFunctionCall("actor.train", "train", "actor", "loss", ("batch",)),))
        >>> cluster, roles = ClusterSpec.parse("h100:1x8"), read_roles({"actor": "Qwen2.5-0.5B"}, flow, is_priced=True)
        >>> load = Workload(num_sequences=64, prompt_tokens=256, response_tokens=512)
        >>> prices = RooflineEstimator(flow, cluster, roles, MemorySettings(), load)
        >>> search_plan({"actor": roles["actor"].model}, prices, seed=0, seconds=2).plan.layouts[0].ranks
        (0, 1, 2, 3, 4, 5, 6, 7)
    """
    if seconds <= 0:
        raise PlanError(f"seconds={seconds} of a search must be positive; ten are enough for 16 nodes")
    progress = SearchProgress(clock, seconds, max_evaluations)
    budget = usable_bytes(estimator.cluster.device_memory_bytes) if memory_budget is None else memory_budget
    problem = Problem(
        models,
        estimator,
        options=options or CallOptions(),
        overlap=overlap,
        memory_budget=budget,
        is_late=lambda: progress.elapsed_s >= PRICING_SHARE * seconds,
        is_over=lambda: progress.elapsed_s >= MAX_PRICING_SHARE * seconds,
        generation_chunks=generation_chunks,
    )
    progress.seconds = max(seconds, progress.elapsed_s + (1 - PRICING_SHARE) * seconds)  # where pricing took longer
    return _result(problem, progress, bound=_search(problem, random.Random(seed), progress))


def _result(problem: Problem, progress: SearchProgress, *, bound: float) -> SearchResult:
    if progress.best is None or not progress.best.is_legal:
        raise nothing_fits(problem, progress.best)
    plan = problem.execution_plan(progress.state, progress.offload)
    plan.check(problem.dataflow, problem.cluster.num_devices)
    return SearchResult(
        plan=plan,
        seconds=progress.best.seconds,
        lower_bound=min(bound, progress.best.seconds),
        evaluations=progress.evaluations,
        history=tuple(progress.history),
    )


def _search(problem: Problem, rng: random.Random, progress: SearchProgress) -> float:
    """Leave the best plan in ``progress``, and return a lower bound on the seconds of all plans; 0 for none."""
    if not all(problem.tables):
        raise nothing_fits(problem, None)
    bound = lower_bound(problem)
    local = LocalSearch(problem, rng, progress)
    if problem.cluster.num_nodes > MAX_EXACT_NODES or not problem.is_complete:
        local.run()
        return bound
    limit = progress.max_evaluations
    progress.max_evaluations = min(START_EVALUATIONS, limit or START_EVALUATIONS)
    local.run()
    progress.max_evaluations = limit
    assert progress.best is not None, "a local search evaluates its starts"

    def is_over() -> bool:
        progress.evaluations += 1
        return progress.share >= EXACT_SHARE

    exact = BranchAndBound(problem, progress.best, progress.keep, is_over)
    exact.run()
    if not exact.is_stopped:
        return progress.best.seconds if progress.best.is_legal else math.inf
    local.run()
    return max(bound, min(exact.bound, progress.best.seconds))
