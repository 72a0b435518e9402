"""How long does an iteration take in the steady state, when calls run on some ranks in turn and on others at once?

Ranks walk the tasks (calls, and the moves of weights before them) in one order. A task starts when its ranks are free
and its inputs exist. Who waits for whom is thus fixed, and the time of an iteration is the largest mean of a cycle in
that graph: durations around the cycle over the iterations that it spans. Found exactly, by raising a mean until no
cycle beats it (Howard's policy improvement, in the form of Bellman and Ford's relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.timeline.contention import Task, run_tasks
from lightning_realloc.tuning.timeline.simulator import Overlap

_UNSETTLED, _SETTLED = 2, 2
"""Iterations that are walked through where ranks are crowded: before the mean begins, and in it."""
_TOLERANCE = 1e-9
"""Differences below this share of a task's end are rounding."""


class _Task(NamedTuple):
    number: int
    now: tuple[int, ...]
    """Earlier tasks of the same iteration that it waits for."""
    before: tuple[int, ...]
    """Tasks of the iteration before that it waits for."""
    repeats: bool
    """Whether it also waits for itself."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Who waits for whom, without what follows from other waits."""

    tasks: tuple[_Task, ...]
    """Those that wait or keep ranks busy, numbered in the order in which ranks walk them."""

    @classmethod
    def of(cls, masks: Sequence[int], needs: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> Waits:
        """Work it out from the ranks of every task, as bits.

        Args:
            masks: Ranks of every task; 0 for a task that keeps none busy.
            needs: For every task, the earlier ones whose products it needs.
            carried: For every task, those whose result of the iteration before it needs.
        """
        numbers = range(len(masks))
        tasks: list[_Task] = []
        behind: list[set[int]] = []  # of every task: what ends before it starts, in its iteration
        earlier: list[set[int]] = [set() for _ in numbers]  # the same, in the iteration before
        for i in numbers:
            now = [j for j in range(i) if masks[i] & masks[j] or j in needs[i]]
            now = [j for j in now if not any(j in behind[k] for k in now)]
            behind.append(set(now).union(*(behind[k] for k in now)))
            if masks[i] or now or carried[i]:
                tasks.append(_Task(i, tuple(now), (), masks[i] > 0))
        kept = []
        for task in tasks:
            i = task.number
            before = {j for j in numbers if (j >= i and masks[i] & masks[j]) or j in carried[i]}
            before = {j for j in before if not any(j in behind[k] for k in before)}
            known = set().union(*(earlier[k] for k in task.now))
            earlier[i] = known.union(before, *(behind[k] for k in before))
            kept.append(task._replace(before=tuple(sorted(before - known))))
        return cls(tuple(kept))


def seconds_per_iteration(durations: Sequence[float], waits: Waits, overlap: Overlap) -> float:
    """Return the time between the ends of two iterations after many of them."""
    if overlap == "none":
        return sum(durations)
    if overlap == "calls":
        return max(_ends(durations, waits), default=0.0)
    return _largest_cycle_mean(durations, waits)


def crowded_seconds_per_iteration(
    durations: Sequence[float], masks: Sequence[int], needs: Sequence[Sequence[int]],
    carried: Sequence[Sequence[int]], overlap: Overlap, cluster: ClusterSpec, slowdown: Callable[[int], float],
) -> float:  # fmt: skip
    """Return the same where ranks of a node are in each other's way, as a mean over iterations that have settled.

    Args:
        masks, needs, carried: As those of :meth:`Waits.of`.
    """
    if overlap == "none":
        return sum(durations)
    tasks: list[Task] = []
    ends: list[int] = []
    last: dict[int, int] = {}
    before: list[int] = []
    for _ in range(_UNSETTLED + _SETTLED if overlap == "iterations" else 1):
        numbers: list[int] = []
        for i, mask in enumerate(masks):
            ranks = tuple(_ranks(mask))
            after = {numbers[j] for j in needs[i]} | {last[rank] for rank in ranks if rank in last}
            after.update(before[j] for j in carried[i] if before)
            numbers.append(len(tasks))
            tasks.append(Task(ranks, durations[i] if mask else 0.0, tuple(after)))
            last.update(dict.fromkeys(ranks, len(tasks) - 1))
        before = numbers
        ends.append(len(tasks))
    times = run_tasks(tasks, cluster, slowdown)
    done = [max((end for _, end in times[:count]), default=0.0) for count in ends]
    return done[-1] if len(done) == 1 else (done[-1] - done[_UNSETTLED - 1]) / _SETTLED


def _ranks(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _ends(durations: Sequence[float], waits: Waits) -> list[float]:
    ends = list(durations)
    for number, now, _, _ in waits.tasks:
        ends[number] += max((ends[j] for j in now), default=0.0)
    return ends


def _largest_cycle_mean(durations: Sequence[float], waits: Waits) -> float:
    mean = max((durations[task.number] for task in waits.tasks if task.repeats), default=0.0)
    ends = [0.0] * len(durations)
    parents: list[tuple[int, int]] = [(-1, 0)] * len(durations)
    while True:
        changed = False
        for i, now, before, _ in waits.tasks:
            start, parent, iterations = -math.inf, -1, 0
            for j in now:
                if ends[j] > start:
                    start, parent = ends[j], j
            for j in before:
                if ends[j] - mean > start:
                    start, parent, iterations = ends[j] - mean, j, 1
            if start + durations[i] > ends[i] + _TOLERANCE * (1e-6 + abs(ends[i])):
                ends[i] = start + durations[i]
                parents[i] = (parent, iterations)
                changed = True
        if not changed:
            return mean
        mean = max(mean, _best_cycle(durations, parents))


def _best_cycle(durations: Sequence[float], parents: Sequence[tuple[int, int]]) -> float:
    """Return the largest mean of a cycle that following parents runs into, 0 for none."""
    best, seen = 0.0, [-1] * len(parents)
    for first in range(len(parents)):
        task = first
        while task >= 0 and seen[task] < 0:
            seen[task] = first
            task = parents[task][0]
        if task < 0 or seen[task] != first:
            continue
        total, iterations, at = 0.0, 0, task
        while True:
            total += durations[at]
            iterations += parents[at][1]
            at = parents[at][0]
            if at == task:
                break
        best = max(best, total / iterations)
    return best
