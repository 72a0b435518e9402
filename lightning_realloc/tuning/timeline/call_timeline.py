"""Timeline of calls and moves of weights on ranks: one format for simulated and for measured iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import format_ranks
from lightning_realloc.tuning.timeline.picture import Bar, Lane, draw

MOVE_PREFIX = "-> "
"""Prefix of a call's name for the phase that moves its weights; ``memory.PhaseMemory`` uses the same names."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One call, or one move of weights, on some ranks."""

    phase: str
    """The name of a call, or ``-> call`` for the move of its weights."""
    iteration: int
    """Number of the iteration, from 0."""
    ranks: tuple[int, ...]
    start: float
    """Start, in seconds since the start of the first iteration."""
    end: float
    """End, in seconds since the start of the first iteration."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start

    @property
    def kind(self) -> Literal["call", "move"]:
        """Whether it is a call, or the move of a call's weights."""
        return "move" if self.phase.startswith(MOVE_PREFIX) else "call"


@dataclass(frozen=True, slots=True)
class CallTimeline:
    """Calls and moves of several iterations."""

    entries: tuple[TimelineEntry, ...] = field(repr=False)
    """Entries in the order in which ranks run them."""
    num_iterations: int
    ranks: tuple[int, ...]
    """All ranks with an entry, ascending."""

    @property
    def makespan(self) -> float:
        """Seconds until the last entry ends."""
        return max((entry.end for entry in self.entries), default=0.0)

    @property
    def seconds_per_iteration(self) -> float:
        """Mean seconds from the end of one iteration to the end of the next, over the later half of the iterations."""
        first, last = self._settled
        return (last - first) / (self.num_iterations - self.num_iterations // 2)

    def idle_share(self, rank: int) -> float:
        """Return the fraction of time that a rank is idle, over the later half of the iterations.

        Raises:
            PlanError: for a rank without an entry.
        """
        if rank not in self.ranks:
            raise PlanError(f"rank {rank} takes part in no call; the timeline has ranks {format_ranks(self.ranks)}")
        first, last = self._settled
        busy = sum(
            max(0.0, min(entry.end, last) - max(entry.start, first)) for entry in self.entries if rank in entry.ranks
        )
        return 0.0 if last == first else 1 - busy / (last - first)

    @property
    def mean_idle_share(self) -> float:
        """Mean of `idle_share` over the ranks."""
        return sum(map(self.idle_share, self.ranks)) / len(self.ranks) if self.ranks else 0.0

    @property
    def _settled(self) -> tuple[float, float]:
        """Seconds at the end of the first half of the iterations, and at the end of all: start-up effects are over."""
        half = self.num_iterations // 2
        before = max((entry.end for entry in self.entries if entry.iteration < half), default=0.0)
        return before, self.makespan

    def _repr_html_(self) -> str:
        """Return a picture of the last iteration, which notebooks show."""
        shown = [one for one in self.entries if one.iteration == self.num_iterations - 1]
        begin = min((one.start for one in shown), default=0.0)
        lanes = [
            Lane(f"rank {rank}", tuple(_bar(one, begin) for one in shown if rank in one.ranks)) for rank in self.ranks
        ]
        title = f"{self.seconds_per_iteration:.2f} s an iteration, ranks idle {self.mean_idle_share:.0%} of it"
        return draw(lanes, title=title)


def _bar(entry: TimelineEntry, begin: float) -> Bar:
    return Bar(entry.phase, entry.kind, entry.start - begin, entry.end - begin)
