"""When does everything run where ranks of a node are in each other's way, as on a host with fewer cores than ranks?

Work is a fluid: a task gets on at the pace that the busy ranks of its nodes leave it, until one of them ends or another
begins. Where nobody is in anybody's way it takes its time and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_realloc.layout.cluster import ClusterSpec

_ENDED = 1e-12
"""Seconds of work that are rounding."""


class Task(NamedTuple):
    """Something that ranks do together."""

    ranks: tuple[int, ...]
    seconds: float
    """What it takes while all other ranks are idle."""
    after: tuple[int, ...]
    """Numbers of earlier tasks that must have ended."""


def run_tasks(
    tasks: Sequence[Task], cluster: ClusterSpec, slowdown: Callable[[int], float]
) -> list[tuple[float, float]]:
    """Return when every task begins and ends, in seconds; each begins when what it waits for has ended.

    Args:
        tasks: None waits for a later one; tasks that share ranks wait for each other.
        slowdown: How many times longer a rank's work takes when so many ranks of its node are busy.
    """
    if all(slowdown(count) == 1.0 for count in range(1, cluster.devices_per_node + 1)):
        return _unhindered(tasks)
    return _FluidSchedule(tasks, cluster, slowdown).run()


def _unhindered(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    for task in tasks:
        begin = max((times[number][1] for number in task.after), default=0.0)
        times.append((begin, begin + task.seconds))
    return times


class _FluidSchedule:
    def __init__(self, tasks: Sequence[Task], cluster: ClusterSpec, slowdown: Callable[[int], float]) -> None:
        self._tasks, self._slowdown = tasks, slowdown
        self._counts: list[dict[int, int]] = []
        """Of every task: node -> its ranks there."""
        for task in tasks:
            counts: dict[int, int] = {}
            for rank in task.ranks:
                counts[cluster.node_of(rank)] = counts.get(cluster.node_of(rank), 0) + 1
            self._counts.append(counts)
        self._waits = [len(set(task.after)) for task in tasks]
        self._waiting: list[list[int]] = [[] for _ in tasks]
        """Of every task: who waits for it."""
        for number, task in enumerate(tasks):
            for earlier in set(task.after):
                self._waiting[earlier].append(number)
        self._left: dict[int, float] = {}
        """Running task -> seconds of its work that are left."""
        self._busy: dict[int, int] = {}
        """Node -> busy ranks."""
        self._begin = [math.inf] * len(tasks)
        self._end = [math.inf] * len(tasks)

    def run(self) -> list[tuple[float, float]]:
        now = 0.0
        for number, count in enumerate(self._waits):
            if count == 0:
                self._start(number, now)
        while self._left:
            paces = {number: self._pace(number) for number in self._left}
            step = min(left / paces[number] for number, left in self._left.items())
            now += step
            ended = []
            for number, pace in paces.items():
                self._left[number] -= step * pace
                if self._left[number] <= _ENDED:
                    ended.append(number)
            for number in ended:
                self._finish(number, now)
        return list(zip(self._begin, self._end, strict=True))

    def _pace(self, number: int) -> float:
        """Return how much of its work a task does in a second: on its most crowded node."""
        counts = self._counts[number]
        return min(
            (self._slowdown(own) / self._slowdown(self._busy[node]) for node, own in counts.items()), default=1.0
        )

    def _start(self, number: int, now: float) -> None:
        self._begin[number] = now
        self._left[number] = self._tasks[number].seconds
        for node, own in self._counts[number].items():
            self._busy[node] = self._busy.get(node, 0) + own

    def _finish(self, number: int, now: float) -> None:
        self._end[number] = now
        del self._left[number]
        for node, own in self._counts[number].items():
            self._busy[node] -= own
        for later in self._waiting[number]:
            self._waits[later] -= 1
            if self._waits[later] == 0:
                self._start(later, now)
