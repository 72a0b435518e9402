"""Fluid simulation of tasks that slow each other down, as ranks do on a host with fewer cores than ranks.

Each task progresses at a rate that depends on how many ranks of its nodes are busy. Rates change when a task starts or
ends. Without contention a task takes exactly its own seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_realloc.layout.cluster import ClusterSpec

_ROUNDING_S = 1e-12
"""A task with at most this many seconds of work left has ended."""


class Task(NamedTuple):
    """Work that some ranks do together."""

    ranks: tuple[int, ...]
    seconds: float
    """Duration while all other ranks are idle."""
    after: tuple[int, ...]
    """Numbers of the earlier tasks that must end first."""


def run_tasks(
    tasks: Sequence[Task], cluster: ClusterSpec, slowdown: Callable[[int], float]
) -> list[tuple[float, float]]:
    """Return start and end of every task, in seconds; a task starts when all tasks that it waits for have ended.

    Args:
        tasks: Tasks may wait for earlier ones only; of two tasks that share a rank, the later one waits.
        slowdown: Number of busy ranks on a node -> factor by which the work of each takes longer.
    """
    if all(slowdown(count) == 1.0 for count in range(1, cluster.devices_per_node + 1)):
        return _run_without_contention(tasks)
    return _FluidSchedule(tasks, cluster, slowdown).run()


def _run_without_contention(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    for task in tasks:
        start = max((times[number][1] for number in task.after), default=0.0)
        times.append((start, start + task.seconds))
    return times


class _FluidSchedule:
    def __init__(self, tasks: Sequence[Task], cluster: ClusterSpec, slowdown: Callable[[int], float]) -> None:
        self._tasks, self._slowdown = tasks, slowdown
        self._counts = [Counter(map(cluster.node_of, task.ranks)) for task in tasks]
        """For each task: node -> number of its ranks there."""
        self._waits = [len(set(task.after)) for task in tasks]
        self._waiting: list[list[int]] = [[] for _ in tasks]
        """For each task, the tasks that wait for it."""
        for number, task in enumerate(tasks):
            for earlier in set(task.after):
                self._waiting[earlier].append(number)
        self._left: dict[int, float] = {}
        """Running task -> seconds of work left."""
        self._busy: Counter[int] = Counter()
        """Node -> number of busy ranks."""
        self._start_s = [math.inf] * len(tasks)
        self._end_s = [math.inf] * len(tasks)

    def run(self) -> list[tuple[float, float]]:
        now = 0.0
        for number, count in enumerate(self._waits):
            if count == 0:
                self._start(number, now)
        while self._left:
            rates = {number: self._rate(number) for number in self._left}
            step = min(left / rates[number] for number, left in self._left.items())
            now += step
            ended = []
            for number, rate in rates.items():
                self._left[number] -= step * rate
                if self._left[number] <= _ROUNDING_S:
                    ended.append(number)
            for number in ended:
                self._finish(number, now)
        return list(zip(self._start_s, self._end_s, strict=True))

    def _rate(self, number: int) -> float:
        """Return the seconds of work that a task does in a second, limited by its busiest node."""
        counts = self._counts[number]
        return min(
            (self._slowdown(own) / self._slowdown(self._busy[node]) for node, own in counts.items()), default=1.0
        )

    def _start(self, number: int, now: float) -> None:
        self._start_s[number] = now
        self._left[number] = self._tasks[number].seconds
        self._busy.update(self._counts[number])

    def _finish(self, number: int, now: float) -> None:
        self._end_s[number] = now
        del self._left[number]
        self._busy.subtract(self._counts[number])
        for later in self._waiting[number]:
            self._waits[later] -= 1
            if self._waits[later] == 0:
                self._start(later, now)
