"""When does every call of a plan run, iteration after iteration, and how long do ranks wait? A timeline of estimates.

Every rank walks the calls in the dataflow's order and passes by those that leave it out; a call begins when its ranks
are free, what it needs exists, and its weights have come. Weights of a copy set out from their home, whose ranks must
be free as well. ``compute`` calls take no time and no ranks. What the runtime does is in ``docs/plans.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, format_ranks
from lightning_realloc.tuning.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.tuning.estimate import Estimator
from lightning_realloc.tuning.execution_plan import ExecutionPlan

Overlap = Literal["iterations", "calls", "none"]
"""What may run at the same time on disjoint ranks: calls even of two iterations, calls of one iteration, nothing."""
MOVE_PREFIX = "-> "
"""Before a call's name: its weights are on their way. ``memory.PhaseMemory`` has the same names."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Ranks that do one thing together."""

    phase: str
    """A call, or ``-> call`` for the weights on their way to it."""
    iteration: int
    ranks: tuple[int, ...]
    start: float
    """Seconds since the first iteration began."""
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Several iterations of a plan."""

    entries: tuple[TimelineEntry, ...] = field(repr=False)
    """In the order in which ranks walk through them."""
    num_iterations: int
    ranks: tuple[int, ...]
    """All that take part, ascending."""

    @property
    def makespan(self) -> float:
        """Seconds until the last entry ends."""
        return max((entry.end for entry in self.entries), default=0.0)

    @property
    def seconds_per_iteration(self) -> float:
        """Mean time from the end of one iteration to the end of the next, over the later half of them."""
        first, last = self._settled
        return (last - first) / (self.num_iterations - self.num_iterations // 2)

    def idle_share(self, rank: int) -> float:
        """Return the share of the later half of the iterations in which a rank has nothing to do.

        Raises:
            PlanError: for a rank that takes part in nothing.
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
        """Mean over ranks."""
        return sum(map(self.idle_share, self.ranks)) / len(self.ranks) if self.ranks else 0.0

    @property
    def _settled(self) -> tuple[float, float]:
        """When the first half of the iterations has ended, and when all have: by then the beginning is forgotten."""
        half = self.num_iterations // 2
        before = max((entry.end for entry in self.entries if entry.iteration < half), default=0.0)
        return before, self.makespan

    def table(self) -> str:
        """Return the last iteration as text, one phase a line, times from the moment its first phase begins."""
        last = [entry for entry in self.entries if entry.iteration == self.num_iterations - 1]
        begin = min((entry.start for entry in last), default=0.0)
        width = max((len(entry.phase) for entry in last), default=0)
        lines = [f"{'':<{width}}  {'start':>9}  {'seconds':>9}  ranks"]
        for entry in sorted(last, key=lambda entry: (entry.start, entry.end)):
            times = f"{entry.start - begin:>9.2f}  {entry.seconds:>9.2f}"
            lines.append(f"{entry.phase:<{width}}  {times}  {format_ranks(sorted(entry.ranks))}")
        lines.append(f"{self.seconds_per_iteration:.2f} s an iteration, ranks idle {self.mean_idle_share:.0%} of it")
        return "\n".join(lines)


def simulate(
    dataflow: Dataflow,
    plan: ExecutionPlan,
    estimator: Estimator,
    *,
    iterations: int = 8,
    overlap: Overlap = "iterations",
) -> Timeline:
    """Return when everything runs; every iteration takes what the estimator says.

    Raises:
        PlanError: for a call that the plan does not name, fewer than one iteration, an unknown ``overlap``.
    """
    if iterations < 1:
        raise PlanError(f"iterations={iterations} must be at least 1")
    if overlap not in get_args(Overlap):
        raise PlanError(f"overlap={overlap!r} is not one of {', '.join(get_args(Overlap))}")
    walk = _Walk(dataflow, plan, estimator, overlap)
    entries = tuple(entry for number in range(iterations) for entry in walk.iteration(number))
    ranks = sorted({rank for entry in entries for rank in entry.ranks})
    return Timeline(entries, iterations, tuple(ranks))


class _Walk:
    """The state between two calls: when ranks are free, and which copies hold the newest weights."""

    def __init__(self, dataflow: Dataflow, plan: ExecutionPlan, estimator: Estimator, overlap: Overlap) -> None:
        self.dataflow, self.plan, self.estimator, self.overlap = dataflow, plan, estimator, overlap
        self.free: dict[int, float] = {}
        self.copies: set[tuple[str, Layout]] = set()
        self.latest = 0.0
        """When the last thing that was walked through ends."""

    def iteration(self, number: int) -> Iterator[TimelineEntry]:
        made: dict[str, float] = {}
        begin = self.latest if self.overlap == "calls" else 0.0
        for call in self.dataflow.iteration_calls:
            earliest = self.latest if self.overlap == "none" else begin
            known = max((made.get(name, 0.0) for name in call.needs), default=0.0)
            end = max(earliest, known)
            if call.role is not None:
                for entry in self._entries(call, call.role, number, earliest, known):
                    end = entry.end
                    yield entry
            made.update(dict.fromkeys(call.produces, end))

    def _entries(
        self, call: ModelFunctionCall, role: str, number: int, earliest: float, known: float
    ) -> Iterator[TimelineEntry]:
        chosen = self.plan.call(call.name)
        home = self.plan.layout(self.dataflow.home_call(role).name)
        if chosen.layout != home and (role, chosen.layout) not in self.copies:
            ranks = tuple(dict.fromkeys((*home.ranks, *chosen.layout.ranks)))
            seconds = self.estimator.move_seconds(role, home, chosen.layout)
            yield self._occupy(MOVE_PREFIX + call.name, number, ranks, earliest, seconds)
            if role not in self.plan.offload:  # copies of offloaded roles are freed after each call
                self.copies.add((role, chosen.layout))
        seconds = self.estimator.call_seconds(call.name, chosen).total
        yield self._occupy(call.name, number, chosen.layout.ranks, max(earliest, known), seconds)
        if call.kind == "train":
            self.copies = {copy for copy in self.copies if copy[0] != role}

    def _occupy(
        self, phase: str, number: int, ranks: tuple[int, ...], earliest: float, seconds: float
    ) -> TimelineEntry:
        start = max(earliest, max(_free_at(self.free, ranks)))
        end = start + seconds
        self.free.update(dict.fromkeys(ranks, end))
        self.latest = max(self.latest, end)
        return TimelineEntry(phase, number, ranks, start, end)


def _free_at(free: Mapping[int, float], ranks: tuple[int, ...]) -> Iterator[float]:
    return (free.get(rank, 0.0) for rank in ranks)
