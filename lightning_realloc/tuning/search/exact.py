"""Branch and bound over joint placements of all calls, which finds the best plan of a small space.

Calls are placed in turn, homes of weights first. Pruned are dominated options, branches whose bound is not below the
best known plan, and placements that renaming machines maps onto each other. The last rule needs an estimator that
treats equal machines equally. If its moves depend on the nodes of pipeline stages, the plan is the best up to the order
of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, combinations

from lightning_realloc.tuning.search.options import Option, PlacedOption, undominated
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import RankSet, canonical_sets, rank_sets

_ROUNDING = 1e-9
"""Fraction of the best plan's seconds by which the bound of a branch must be lower."""


class BranchAndBound:
    """Exhaustive search with pruning.

    Args:
        best: Score of the best plan known so far.
        report: Called with the score, the choices and the offloaded roles of every better plan.
        is_over: Called before every evaluation; True stops the search.
    """

    def __init__(
        self,
        problem: Problem,
        best: Score,
        report: Callable[[Score, Sequence[PlacedOption], frozenset[str]], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._problem, self._best, self._report, self._is_over = problem, best, report, is_over
        self._sets = tuple(rank_sets(problem.cluster))
        self._canonical: dict[tuple[RankSet, ...], list[RankSet]] = {}
        homes = sorted((call.number for call in problem.calls if call.is_home), key=lambda i: -problem.work.least[i])
        order = [*homes, *(i for i in problem.numbers if i not in homes)]
        self._order = _early_calls_last(problem, order)
        self._state: list[PlacedOption | None] = [None] * len(problem.calls)
        self._offload: frozenset[str] = frozenset()
        self.bound = math.inf
        """Lower bound on the seconds of the plans that a stopped search did not reach."""
        self.is_stopped = False
        """Whether ``is_over`` ended the search."""

    def run(self) -> None:
        """Search the whole space, or until stopped."""
        for offload in offload_sets(self._problem):
            self._offload = offload
            self._branch(0)

    def _branch(self, depth: int) -> None:
        if depth == len(self._order):
            self._record_if_better()
            return
        i = self._order[depth]
        children = []
        for choice in self._choices(depth):
            if self.is_stopped or self._is_over():
                self.is_stopped = True
                self.bound = min(self.bound, self._score().seconds)  # a bound for all children left
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

    def _record_if_better(self) -> None:
        score = self._score()
        if score.is_legal and (score < self._best or not self._best.is_legal):
            self._best = score
            self._report(score, [choice for choice in self._state if choice is not None], self._offload)

    def _score(self) -> Score:
        return self._problem.score(self._state, self._offload)

    def _is_promising(self, score: Score) -> bool:
        if score.excess_bytes:
            return False
        return not self._best.is_legal or score.seconds < self._best.seconds * (1 - _ROUNDING)

    def _choices(self, depth: int) -> list[PlacedOption]:
        i = self._order[depth]
        placed = tuple(choice.ranks for j in self._order[:depth] if (choice := self._state[j]) is not None)
        if placed not in self._canonical:
            self._canonical[placed] = canonical_sets(self._sets, placed, self._problem.cluster)
        table = self._problem.tables[i]
        chosen = []
        for ranks in self._canonical[placed]:
            choices = [self._problem.place(option, ranks) for option in table.get(ranks.size, ())]
            chosen += self._undominated(i, choices)
        return chosen

    def _undominated(self, i: int, choices: list[PlacedOption]) -> list[PlacedOption]:
        """Return the undominated choices on one set of ranks.

        For a role's only call, and for its only replica, no other call's cost depends on the layout. Its own seconds,
        the seconds of its move and its bytes are then all that matters.
        """
        problem, call = self._problem, self._problem.calls[i]
        if not call.is_alone and not call.is_only_copy:
            return choices
        by_option: dict[Option, PlacedOption] = {choice.option: choice for choice in choices}
        home = None if call.is_home else self._state[call.home]

        def values(option: Option) -> tuple[float, ...]:
            self._state[i] = by_option[option]
            move = problem.move_seconds(i, self._state)
            self._state[i] = None
            is_home = home is not None and home.layout == by_option[option].layout and not option.is_copied
            kept = 0 if is_home else option.resident_bytes
            seconds = problem.call_seconds(i, by_option[option])
            return seconds, move, option.active_bytes, kept + option.further_bytes

        return [by_option[option] for option in undominated(by_option, values)]


def offload_sets(problem: Problem) -> list[frozenset[str]]:
    """Return the sets of roles that can be offloaded, smallest first: untrained roles of a single call, no partners."""
    asked = {role for call in problem.calls for role in call.further_roles}
    roles = [call.role for call in problem.calls if call.is_alone and not call.is_trained and call.role not in asked]
    sets = chain.from_iterable(combinations(roles, count) for count in range(len(roles) + 1))
    return [frozenset(chosen) for chosen in sets]


def _early_calls_last(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return calls in an order in which bounds hold: all calls on a call's ranks are decided before its chunks.

    Calls that can start before their generation ends come after the others, in the order in which ranks run them. Calls
    whose home is one of these come last.
    """
    early = problem.schedule_builder.early
    first = [i for i in order if i not in early and problem.calls[i].home not in early]
    return [*first, *sorted(early), *(i for i in order if i not in first and i not in early)]
