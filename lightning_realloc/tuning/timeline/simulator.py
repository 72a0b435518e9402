"""Simulate the timeline of a plan over several iterations: the start and the end of each call, and idle ranks.

Each rank runs its calls in the dataflow's order. A call starts when its ranks are free, its inputs exist and its
weights have arrived. Moving weights to another layout also occupies the ranks of the home layout. ``compute`` calls
take no time and no ranks. ``docs/overlap.md`` describes the runtime that this models.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError, require_choice
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.timeline.call_timeline import MOVE_PREFIX, CallTimeline, TimelineEntry
from lightning_realloc.tuning.timeline.contention import run_tasks
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap, ScheduleBuilder, unroll


def simulate(
    plan: ExecutionPlan,
    estimator: Estimator,
    *,
    iterations: int = 8,
    overlap: Overlap = "iterations",
    generation_chunks: int = 1,
) -> CallTimeline:
    """Return the timeline of a plan for the estimator's dataflow, with its seconds in every iteration.

    A call of an offloaded role also takes the seconds in which its weights return from the host. In a run they may
    overlap with the call before. The return of an offloaded optimizer state does not count.

    Args:
        iterations: Number of iterations to simulate.
        overlap: Work that may run at the same time on disjoint ranks, as in `ReallocStrategy`.
        generation_chunks: Number of chunks in which samples go to inference on other ranks. Inference on a chunk starts
            when that chunk is generated; see `chunk_shares`.

    Raises:
        PlanError: for a call that the plan does not name, fewer than one iteration, an unknown ``overlap``.
    """
    if iterations < 1:
        raise PlanError(f"iterations={iterations} must be at least 1")
    require_choice("overlap", overlap, get_args(Overlap), PlanError)
    dataflow = estimator.dataflow
    calls = tuple(call for call in dataflow.iteration_calls if call.role is not None)
    tasks = _Tasks(plan, estimator, calls)
    builder = ScheduleBuilder(dataflow, calls, 1 if overlap == "none" else generation_chunks)
    first, later = map(tasks.masks, itertools.islice(_moving_calls(plan, estimator, calls), 2))
    schedule = builder.schedule(first, plan.offload)
    masks = [first, *[later] * (iterations - 1)]
    times = run_tasks(unroll(schedule, masks, tasks.seconds, overlap), estimator.cluster, estimator.slowdown)
    steps = [(number, task) for number in range(iterations) for task in schedule.tasks]
    entries = [
        TimelineEntry(tasks.phases[task], number, tasks.ranks[task], begin, end)
        for (number, task), (begin, end) in zip(steps, times, strict=True)
        if masks[number][task]
    ]
    ranks = sorted({rank for entry in entries for rank in entry.ranks})
    return CallTimeline(_joined(entries), iterations, tuple(ranks))


def _joined(entries: Sequence[TimelineEntry]) -> tuple[TimelineEntry, ...]:
    """Merge chunks of a call that follow each other without a pause into one entry."""
    joined: list[TimelineEntry] = []
    for entry in entries:
        last = joined[-1] if joined else None
        if last is not None and (last.phase, last.iteration, last.end) == (entry.phase, entry.iteration, entry.start):
            joined[-1] = replace(last, end=entry.end)
        else:
            joined.append(entry)
    return tuple(joined)


class _Tasks:
    """Phase, ranks and seconds of every task: task 2i moves weights to call i, and task 2i + 1 is call i."""

    def __init__(self, plan: ExecutionPlan, estimator: Estimator, calls: Sequence[ModelFunctionCall]) -> None:
        self.phases: list[str] = []
        self.ranks: list[tuple[int, ...]] = []
        self.seconds: list[float] = []
        for call in calls:
            role, chosen = str(call.role), plan.call(call.name)
            owner = estimator.owner(role)
            home = plan.layout(estimator.dataflow.home_call(owner).name)
            self.phases += [MOVE_PREFIX + call.name, call.name]
            self.ranks += [tuple(dict.fromkeys((*home.ranks, *chosen.layout.ranks))), chosen.layout.ranks]
            moved_s = 0.0 if chosen.layout == home else estimator.move_seconds(role, home, chosen.layout)
            seconds = estimator.call_seconds(call.name, chosen).total
            if owner in plan.offload:
                seconds += estimator.offload_seconds(estimator.resident_bytes(owner, home, is_home=True))
            self.seconds += [moved_s, seconds]

    def masks(self, moving: Collection[int]) -> list[int]:
        """Return the ranks of every task as bits, 0 for the moves of calls that are not in ``moving``."""
        return [
            0 if task % 2 == 0 and task // 2 not in moving else sum(1 << rank for rank in ranks)
            for task, ranks in enumerate(self.ranks)
        ]


def _moving_calls(plan: ExecutionPlan, estimator: Estimator, calls: Sequence[ModelFunctionCall]) -> Iterator[set[int]]:
    """Yield, for each iteration, the calls whose weights are moved; it is the same set from the second iteration on."""
    newest: set[tuple[str, Layout]] = set()  # replicas that hold the newest weights
    untrained: set[tuple[str, Layout]] = set()  # replicas that hold the weights that training does not change
    while True:
        moving = set()
        for i, call in enumerate(calls):
            role, layout = str(call.role), plan.layout(call.name)
            owner = estimator.owner(role)
            is_held = (owner, layout) in (newest if role == owner else untrained)
            if layout != plan.layout(estimator.dataflow.home_call(owner).name) and not is_held:
                moving.add(i)
                if owner not in plan.offload:  # replicas of offloaded roles are freed after each call
                    untrained.add((owner, layout))
                    newest.update({(owner, layout)} if role == owner else ())
            if call.kind == "train":
                newest = {replica for replica in newest if replica[0] != role}
        yield moving
