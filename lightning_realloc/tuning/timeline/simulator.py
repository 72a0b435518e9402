"""When does every call of a plan run, iteration after iteration, and how long do ranks wait? A timeline of estimates.

Every rank walks the calls in the dataflow's order and passes by those that leave it out; a call begins when its ranks
are free, what it needs exists, and its weights have come. Weights of a copy set out from their home, whose ranks must
be free as well. ``compute`` calls take no time and no ranks. What the runtime does is in ``docs/plans.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, format_ranks
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.timeline.contention import Task, run_tasks
from lightning_realloc.tuning.timeline.fusion import fused_first, fused_groups, fused_sources, portion_shares

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
    generation_parts: int = 1,
) -> Timeline:
    """Return when everything runs; every iteration takes what the estimator says.

    Args:
        generation_parts: In how many portions samples go to inference on ranks of its own; portion k of that begins
            when portion k is generated, which `portion_shares` says.

    Raises:
        PlanError: for a call that the plan does not name, fewer than one iteration, an unknown ``overlap``.
    """
    if iterations < 1:
        raise PlanError(f"iterations={iterations} must be at least 1")
    if overlap not in get_args(Overlap):
        raise PlanError(f"overlap={overlap!r} is not one of {', '.join(get_args(Overlap))}")
    walk = _Walk(dataflow, plan, estimator, overlap, 1 if overlap == "none" else generation_parts)
    for number in range(iterations):
        walk.iteration(number)
    times = run_tasks([step.task for step in walk.steps], estimator.cluster, estimator.slowdown)
    entries = [
        TimelineEntry(step.phase, step.iteration, step.task.ranks, begin, end)
        for step, (begin, end) in zip(walk.steps, times, strict=True)
    ]
    ranks = sorted({rank for entry in entries for rank in entry.ranks})
    return Timeline(_joined(entries), iterations, tuple(ranks))


def _joined(entries: Sequence[TimelineEntry]) -> tuple[TimelineEntry, ...]:
    """Return the entries with portions of a call that follow each other without a pause as one."""
    joined: list[TimelineEntry] = []
    for entry in entries:
        last = joined[-1] if joined else None
        if last is not None and (last.phase, last.iteration, last.end) == (entry.phase, entry.iteration, entry.start):
            joined[-1] = replace(last, end=entry.end)
        else:
            joined.append(entry)
    return tuple(joined)


class _Step(NamedTuple):
    phase: str
    iteration: int
    task: Task


class _Walk:
    """Everything that ranks do, and what each step of it waits for."""

    def __init__(
        self, dataflow: Dataflow, plan: ExecutionPlan, estimator: Estimator, overlap: Overlap, num_parts: int
    ) -> None:
        self.dataflow, self.plan, self.estimator, self.overlap = dataflow, plan, estimator, overlap
        self.num_parts = num_parts
        calls = dataflow.iteration_calls
        ranks = {call.name: plan.layout(call.name).ranks for call in calls if call.role is not None}
        self._sources = fused_sources(calls, ranks) if num_parts > 1 else {}
        self._groups = fused_groups(fused_first(calls, self._sources), self._sources, alone=plan.offload)
        self._parts: dict[str, list[int]] = {}
        """Generating call -> the steps that make its portions, in this iteration."""
        self.steps: list[_Step] = []
        self._last: dict[int, int] = {}
        """Rank -> its latest step."""
        self._copies: set[tuple[str, Layout]] = set()
        """Copies that hold the newest weights."""
        self._bases: set[tuple[str, Layout]] = set()
        """Copies that hold what training leaves as it is."""
        self._begin = 0
        """The first step of this iteration."""

    def iteration(self, number: int) -> None:
        made: dict[str, tuple[int, ...]] = {}
        before = tuple(range(self._begin, len(self.steps))) if self.overlap == "calls" else ()
        self._begin = len(self.steps)
        for group in self._groups:
            if group[0].name in self._sources:
                self._run_together(group, number, before)
                made |= {name: (self._last_of(call),) for call in group for name in call.produces}
                continue
            (call,) = group
            known = tuple(dict.fromkeys(maker for name in call.needs for maker in made.get(name, ())))
            if call.role is not None:
                known = (self._run(call, number, before, known),)
            made.update(dict.fromkeys(call.produces, known))

    def _run(self, call: ModelFunctionCall, number: int, before: tuple[int, ...], known: tuple[int, ...]) -> int:
        """Add a call, in portions where others wait for them; return its last step."""
        self._move(call, number, before)
        num_parts = self.num_parts if call.name in self._sources.values() else 1
        parts = [self._work(call, number, (*before, *known), share) for share in portion_shares(num_parts)]
        self._parts[call.name] = parts
        if call.kind == "train":
            self._copies = {copy for copy in self._copies if copy[0] != call.role}
        return parts[-1]

    def _run_together(self, group: Sequence[ModelFunctionCall], number: int, before: tuple[int, ...]) -> None:
        """Add fused calls: each portion goes through all of them as soon as it is there."""
        for call in group:
            self._move(call, number, before)
            self._parts[call.name] = []
        for known in self._parts[self._sources[group[0].name]]:
            for call in group:
                self._parts[call.name].append(self._work(call, number, (*before, known), 1 / self.num_parts))

    def _last_of(self, call: ModelFunctionCall) -> int:
        return self._parts[call.name][-1]

    def _work(self, call: ModelFunctionCall, number: int, after: tuple[int, ...], share: float) -> int:
        chosen = self.plan.call(call.name)
        seconds = self.estimator.call_seconds(call.name, chosen).total * share
        return self._add(call.name, number, chosen.layout.ranks, seconds, after)

    def _move(self, call: ModelFunctionCall, number: int, before: tuple[int, ...]) -> None:
        """Add the way of a call's weights, where its copy does not hold the newest ones that it needs."""
        role = str(call.role)
        owner = self.estimator.owner(role)
        layout, home = self.plan.layout(call.name), self.plan.layout(self.dataflow.home_call(owner).name)
        if layout == home or (owner, layout) in (self._copies if role == owner else self._bases):
            return
        ranks = tuple(dict.fromkeys((*home.ranks, *layout.ranks)))
        seconds = self.estimator.move_seconds(role, home, layout)
        self._add(MOVE_PREFIX + call.name, number, ranks, seconds, before)
        if owner not in self.plan.offload:  # copies of offloaded roles are freed after each call
            self._bases.add((owner, layout))
            if role == owner:
                self._copies.add((owner, layout))

    def _add(self, phase: str, number: int, ranks: tuple[int, ...], seconds: float, after: tuple[int, ...]) -> int:
        latest = len(self.steps)
        if self.overlap == "none" and latest:
            after = (latest - 1,)
        waits = dict.fromkeys((*after, *(self._last[rank] for rank in ranks if rank in self._last)))
        self.steps.append(_Step(phase, number, Task(ranks, seconds, tuple(waits))))
        self._last.update(dict.fromkeys(ranks, latest))
        return latest
