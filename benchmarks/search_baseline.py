"""Plain Metropolis-Hastings over execution plans, for comparison.

As ReaL describes it (Mei et al., arXiv:2406.14088, section 5; constants of its released search): start from every
call's fastest candidate; propose one call's change to any other candidate, uniformly over all pairs of a call and a
candidate; accept what is better, else with probability exp(-beta * n), n the lost tenths of a second over five
iterations; a plan that does not fit costs three times its seconds.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from lightning_realloc.tuning.search_problem import Choice, Problem, Score
from lightning_realloc.tuning.search_progress import Progress
from lightning_realloc.tuning.space import RankSet, node_counts, node_run, parts

BETA = 0.001
GRAIN_S = 0.1
ITERATIONS = 5
MISFIT = 3.0


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
