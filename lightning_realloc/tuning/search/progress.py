"""How long a search has gone on, and the best plan it has met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_realloc.tuning.search.problem import Choice, Problem, Score


class Improvement(NamedTuple):
    """When a search met a better plan."""

    after_s: float
    evaluations: int
    seconds: float
    """Of an iteration."""


@dataclass(slots=True)
class Progress:
    """Effort spent, effort allowed, and the best so far."""

    clock: Callable[[], float]
    seconds: float
    """Allowed in all."""
    max_evaluations: int | None = None
    begin: float = field(init=False)
    evaluations: int = 0
    best: Score | None = None
    state: tuple[Choice, ...] = ()
    offload: frozenset[str] = frozenset()
    history: list[Improvement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.begin

    @property
    def share(self) -> float:
        """How much of the effort is spent; 1 and more when the search must end."""
        of_time = self.elapsed_s / self.seconds
        return of_time if self.max_evaluations is None else max(of_time, self.evaluations / self.max_evaluations)

    def score(self, problem: Problem, state: Sequence[Choice], offload: frozenset[str]) -> Score:
        """Evaluate a whole state, and keep it where it is the best."""
        self.evaluations += 1
        found = problem.score(state, offload)
        if self.best is None or found < self.best:
            self.keep(found, state, offload)
        return found

    def keep(self, score: Score, state: Sequence[Choice], offload: frozenset[str]) -> None:
        """Take a state as the best."""
        self.best, self.state, self.offload = score, tuple(state), offload
        if score.is_legal:
            self.history.append(Improvement(self.elapsed_s, self.evaluations, score.seconds))
