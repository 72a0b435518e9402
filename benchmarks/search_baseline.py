"""What a search of execution plans is compared with: trying everything, and plain Metropolis-Hastings.

The latter as ReaL does it (Mei et al., arXiv:2406.14088; constants of its released search): start from every call's
fastest candidate; propose one call's change to any other candidate, uniformly over all pairs of a call and a candidate;
accept what is better, else with probability exp(-beta * n), n the lost tenths of a second over five iterations; a plan
that does not fit costs three times its seconds.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, chain, combinations, product

from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.search.options import Option
from lightning_realloc.tuning.search.problem import Choice, Problem, Score
from lightning_realloc.tuning.search.progress import Progress
from lightning_realloc.tuning.search.space import RankSet, legal_dims, node_counts, node_run, parts, rank_sets

BETA = 0.001
GRAIN_S = 0.1
ITERATIONS = 5
MISFIT = 3.0


def every_state(problem: Problem) -> Iterator[tuple[list[Choice], frozenset[str]]]:
    """Yield every legal combination, without tables, dominance or symmetry."""
    estimator, per_call = problem.estimator, []
    for i, call in enumerate(problem.calls):
        choices = []
        for ranks in rank_sets(problem.cluster):
            for dims in legal_dims(problem.models[str(call.role)], call.kind, ranks.size, problem.cluster):
                layout = Layout(dims, ranks.ranks)
                kept = estimator.resident_bytes(str(call.role), layout, is_home=problem.home[i] == i)
                for plan in problem.options.plans(call.kind, layout):
                    seconds = estimator.call_seconds(call.name, plan).total
                    if math.isfinite(seconds):
                        option = Option(dims, plan, seconds, estimator.active_bytes(call.name, plan), kept)
                        choices.append(problem.choose(option, ranks))
        per_call.append(choices)
    frozen = [role for role in problem.dataflow.roles if role not in problem.dataflow.trained_roles
              and len(problem.dataflow.calls_of(role)) == 1 and estimator.owner(role) == role]  # fmt: skip
    offloads = chain.from_iterable(combinations(frozen, count) for count in range(len(frozen) + 1))
    for offload in offloads:
        for state in product(*per_call):
            yield list(state), frozenset(offload)


def metropolis_hastings(problem: Problem, rng: random.Random, progress: Progress) -> None:
    """Walk until the effort is spent; the best plan is left in ``progress``."""
    sets = _rank_sets(problem)
    weights = [[len(problem.tables[i].get(ranks.size, ())) for ranks in sets] for i in problem.numbers]
    flat = [(i, ranks) for i in problem.numbers for ranks in sets]
    ends = list(accumulate(weight for row in weights for weight in row))
    state = [_fastest(problem, i, sets) for i in problem.numbers]
    current = _cost(progress.score(problem, state, frozenset()))
    while progress.share < 1.0:
        i, ranks = flat[bisect_right(ends, rng.randrange(ends[-1]))]
        old = state[i]
        state[i] = problem.choose(rng.choice(problem.tables[i][ranks.size]), ranks)
        cost = _cost(progress.score(problem, state, frozenset()))
        lost = math.floor((cost - current) * ITERATIONS / GRAIN_S)
        if cost <= current or rng.random() < math.exp(-BETA * lost):
            current = cost
        else:
            state[i] = old


def _rank_sets(problem: Problem) -> list[RankSet]:
    """Return parts of nodes and runs of whole nodes: the meshes of the paper."""
    nodes = problem.cluster.num_nodes
    runs = [node_run(problem.cluster, first, count) for count in node_counts(problem.cluster)
            for first in range(nodes - count + 1)]  # fmt: skip
    return [*parts(problem.cluster), *runs]


def _fastest(problem: Problem, i: int, sets: list[RankSet]) -> Choice:
    seconds = {size: min(options, key=lambda one: one.seconds) for size, options in problem.tables[i].items()}
    size = min(seconds, key=lambda size: seconds[size].seconds)
    return problem.choose(seconds[size], next(ranks for ranks in sets if ranks.size == size))


def _cost(score: Score) -> float:
    return score.seconds * (1.0 if score.is_legal else MISFIT)
