"""The best plan of a small space, by branch and bound: every joint choice is tried or proven to be no better.

Calls are decided in turn, homes of weights first. Left out are options that another one beats in everything that
counts, branches whose bound is not below the best plan known, and placements that are renamings of each other. Only the
last needs something of the estimator: that equal machines are equal to it. One whose moves depend on which stage of a
pipeline lies on which node gives plans that are best up to the order of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, combinations

from lightning_realloc.tuning.search.options import Option, undominated
from lightning_realloc.tuning.search.problem import Choice, Problem, Score
from lightning_realloc.tuning.search.space import RankSet, canonical_sets, rank_sets

_ROUNDING = 1e-9
"""A branch must promise this much, as a share, to be worth a look."""


class BranchAndBound:
    """A search that ends by itself, unless it is stopped."""

    def __init__(
        self, problem: Problem, best: Score, found: Callable[[Score, Sequence[Choice], frozenset[str]], None],
        is_over: Callable[[], bool],
    ) -> None:  # fmt: skip
        """``found`` hears of every plan better than ``best``; ``is_over`` counts an evaluation and stops the search."""
        self._problem, self._best, self._found, self._is_over = problem, best, found, is_over
        self._sets = tuple(rank_sets(problem.cluster))
        self._canonical: dict[tuple[RankSet, ...], list[RankSet]] = {}
        homes = sorted((i for i in problem.numbers if problem.home[i] == i), key=lambda i: -problem.least_work[i])
        self._order = [*homes, *(i for i in problem.numbers if i not in homes)]
        if problem.portions is not None:
            self._order = problem.portions.decided_last(self._order, problem.home)
        self._state: list[Choice | None] = [None] * len(problem.calls)
        self._offload: frozenset[str] = frozenset()
        self.bound = math.inf
        """Seconds that no plan beats which was neither tried nor proven to be no better."""
        self.is_stopped = False

    def run(self) -> None:
        """Search everything, or until stopped."""
        for offload in offload_sets(self._problem):
            self._offload = offload
            self._branch(0)

    def _branch(self, depth: int) -> None:
        if depth == len(self._order):
            self._judge()
            return
        i = self._order[depth]
        children = []
        for choice in self._choices(depth):
            if self.is_stopped or self._is_over():
                self.is_stopped = True
                self.bound = min(self.bound, self._score().seconds)  # of all that this branch leaves
                break
            self._state[i] = choice
            score = self._score()
            if self._is_promising(score):
                children.append((score.seconds, choice))
            self._state[i] = None
        self._state[i] = None
        for bound, choice in sorted(children, key=lambda child: child[0]):
            if not self._is_promising(Score(0, 0, bound)):
                break
            if self.is_stopped:
                self.bound = min(self.bound, bound)
                break
            self._state[i] = choice
            self._branch(depth + 1)
            self._state[i] = None

    def _judge(self) -> None:
        score = self._score()
        if score.is_legal and (score < self._best or not self._best.is_legal):
            self._best = score
            self._found(score, [choice for choice in self._state if choice is not None], self._offload)

    def _score(self) -> Score:
        return self._problem.score(self._state, self._offload)

    def _is_promising(self, score: Score) -> bool:
        if score.excess_bytes:
            return False
        return not self._best.is_legal or score.seconds < self._best.seconds * (1 - _ROUNDING)

    def _choices(self, depth: int) -> list[Choice]:
        i = self._order[depth]
        placed = tuple(choice.ranks for j in self._order[:depth] if (choice := self._state[j]) is not None)
        if placed not in self._canonical:
            self._canonical[placed] = canonical_sets(self._sets, placed, self._problem.cluster)
        table = self._problem.tables[i]
        chosen = []
        for ranks in self._canonical[placed]:
            choices = [self._problem.choose(option, ranks) for option in table.get(ranks.size, ())]
            chosen += self._needed(i, choices)
        return chosen

    def _needed(self, i: int, choices: list[Choice]) -> list[Choice]:
        """Return the choices on one set of ranks but those that another one makes needless.

        Where no other call's costs depend on a call's layout, but through what it keeps busy and full, its seconds,
        its move's and its bytes are all that counts. That is so for a role's only call, and for its only copy.
        """
        problem = self._problem
        if not problem.is_alone(i) and not problem.is_only_copy(i):
            return choices
        by_option: dict[Option, Choice] = {choice.option: choice for choice in choices}
        home = self._state[problem.home[i]] if problem.home[i] != i else None

        def values(option: Option) -> tuple[float, ...]:
            self._state[i] = by_option[option]
            move = problem.move_seconds(i, self._state)
            self._state[i] = None
            kept = 0 if home is not None and home.layout == by_option[option].layout else option.resident_bytes
            return option.seconds, move, option.active_bytes, kept

        return [by_option[option] for option in undominated(by_option, values)]


def offload_sets(problem: Problem) -> list[frozenset[str]]:
    """Return what may be offloaded together, least first: roles that are never trained and have one call."""
    roles = [str(problem.calls[i].role) for i in problem.numbers if problem.is_alone(i) and not problem.trained[i]]
    sets = chain.from_iterable(combinations(roles, count) for count in range(len(roles) + 1))
    return [frozenset(chosen) for chosen in sets]
