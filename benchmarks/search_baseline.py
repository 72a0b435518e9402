"""Baselines for the plan search: enumeration of all plans, and plain Metropolis-Hastings.

Metropolis-Hastings follows ReaL (Mei et al., arXiv:2406.14088, with the constants of its released search). It starts
with the fastest candidate of every call. A proposal changes one call to another candidate, uniformly over all pairs of
a call and a candidate. A better plan is accepted, another one with probability exp(-beta * n), where n is the loss in
tenths of a second over five iterations. A plan that does not fit costs three times its seconds.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, chain, combinations, product

from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.search.local import SearchProgress
from lightning_realloc.tuning.search.options import Option, PlacedOption, further_bytes
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import RankSet, call_dims, node_counts, node_run, parts, rank_sets

BETA = 0.001
GRAIN_S = 0.1
ITERATIONS = 5
MISFIT = 3.0


def every_state(problem: Problem) -> Iterator[tuple[list[PlacedOption], frozenset[str]]]:
    """Yield every legal state, without option tables, dominance or symmetry."""
    estimator, per_call = problem.estimator, []
    for call in problem.calls:
        choices = []
        for ranks in rank_sets(problem.cluster):
            asked = estimator.dataflow.call(call.name)
            for dims in call_dims(asked, problem.models, ranks.size, problem.cluster, problem.options):
                layout = Layout(dims, ranks.ranks)
                kept = estimator.resident_bytes(call.role, layout, is_home=call.is_home)
                further = further_bytes(estimator, call, layout)
                is_copied = call.kind == "generate" and estimator.generates_in_copy(call.owner, layout)
                for plan in problem.options.plans(call.kind, layout):
                    seconds = estimator.call_seconds(call.name, plan).total
                    if math.isfinite(seconds):
                        active = estimator.active_bytes(call.name, plan)
                        option = Option(dims, plan, seconds, active, kept, is_copied, further)
                        choices.append(problem.place(option, ranks))
        per_call.append(choices)
    frozen = [
        role
        for role in problem.dataflow.roles
        if role not in problem.dataflow.trained_roles
        and len(problem.dataflow.calls_of(role)) == 1
        and estimator.owner(role) == role
    ]
    offloads = chain.from_iterable(combinations(frozen, count) for count in range(len(frozen) + 1))
    for offload in offloads:
        for state in product(*per_call):
            yield list(state), frozenset(offload)


def metropolis_hastings(problem: Problem, rng: random.Random, progress: SearchProgress) -> None:
    """Walk until the effort is spent, and leave the best plan in ``progress``."""
    sets = _rank_sets(problem)
    weights = [[len(problem.tables[i].get(ranks.size, ())) for ranks in sets] for i in problem.numbers]
    flat = [(i, ranks) for i in problem.numbers for ranks in sets]
    ends = list(accumulate(weight for row in weights for weight in row))
    state = [_fastest(problem, i, sets) for i in problem.numbers]
    current = _cost(progress.score(problem, state, frozenset()))
    while progress.share < 1.0:
        i, ranks = flat[bisect_right(ends, rng.randrange(ends[-1]))]
        old = state[i]
        state[i] = problem.place(rng.choice(problem.tables[i][ranks.size]), ranks)
        cost = _cost(progress.score(problem, state, frozenset()))
        lost = math.floor((cost - current) * ITERATIONS / GRAIN_S)
        if cost <= current or rng.random() < math.exp(-BETA * lost):
            current = cost
        else:
            state[i] = old


def _rank_sets(problem: Problem) -> list[RankSet]:
    """Return parts of nodes and runs of whole nodes, the device meshes of the paper."""
    nodes = problem.cluster.num_nodes
    runs = [
        node_run(problem.cluster, first, count)
        for count in node_counts(problem.cluster)
        for first in range(nodes - count + 1)
    ]
    return [*parts(problem.cluster), *runs]


def _fastest(problem: Problem, i: int, sets: list[RankSet]) -> PlacedOption:
    seconds = {size: min(options, key=lambda one: one.seconds) for size, options in problem.tables[i].items()}
    size = min(seconds, key=lambda size: seconds[size].seconds)
    return problem.place(seconds[size], next(ranks for ranks in sets if ranks.size == size))


def _cost(score: Score) -> float:
    return score.seconds * (1.0 if score.is_legal else MISFIT)
