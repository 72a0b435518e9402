"""How long does an iteration take in the steady state, when calls run on some ranks in turn and on others at once?

Ranks walk the tasks (calls, and the moves of weights before them) in one order. A task starts when its ranks are free
and its inputs exist. Who waits for whom is thus fixed, and the time of an iteration is the largest mean of a cycle in
that graph: durations around the cycle over the iterations that it spans. Found exactly, by raising a mean until no
cycle beats it (Howard's policy improvement, in the form of Bellman and Ford's relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Overlap = Literal["iterations", "calls", "none"]
_TOLERANCE = 1e-9
"""Differences below this share of a task's end are rounding."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Who waits for whom; tasks are numbered in the order in which ranks walk them."""

    now: tuple[tuple[int, ...], ...]
    """For every task, the earlier ones of the same iteration that it waits for."""
    before: tuple[tuple[int, ...], ...]
    """For every task, those of the iteration before that it waits for."""

    @classmethod
    def of(cls, masks: Sequence[int], needs: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> Waits:
        """Work it out from the ranks of every task, as bits.

        Args:
            masks: Ranks of every task; 0 for a task that keeps none busy.
            needs: For every task, the earlier ones whose products it needs.
            carried: For every task, those whose result of the iteration before it needs.
        """
        tasks = range(len(masks))
        now = tuple(tuple(j for j in range(i) if masks[i] & masks[j] or j in needs[i]) for i in tasks)
        before = tuple(tuple(j for j in tasks if (j >= i and masks[i] & masks[j]) or j in carried[i]) for i in tasks)
        return cls(now, before)


def seconds_per_iteration(durations: Sequence[float], waits: Waits, overlap: Overlap) -> float:
    """Return the time between the ends of two iterations after many of them."""
    if overlap == "none":
        return sum(durations)
    if overlap == "calls":
        return max(_ends(durations, waits), default=0.0)
    return _largest_cycle_mean(durations, waits)


def _ends(durations: Sequence[float], waits: Waits) -> list[float]:
    ends: list[float] = []
    for duration, earlier in zip(durations, waits.now, strict=True):
        ends.append(duration + max((ends[j] for j in earlier), default=0.0))
    return ends


def _largest_cycle_mean(durations: Sequence[float], waits: Waits) -> float:
    mean = max((d for i, d in enumerate(durations) if i in waits.before[i]), default=0.0)
    ends = [0.0] * len(durations)
    parents: list[tuple[int, int]] = [(-1, 0)] * len(durations)
    while True:
        changed = False
        for i, duration in enumerate(durations):
            start, parent = -math.inf, (-1, 0)
            for j in waits.now[i]:
                if ends[j] > start:
                    start, parent = ends[j], (j, 0)
            for j in waits.before[i]:
                if ends[j] - mean > start:
                    start, parent = ends[j] - mean, (j, 1)
            if parent[0] >= 0 and start + duration > ends[i] + _TOLERANCE * (1e-6 + abs(ends[i])):
                ends[i] = start + duration
                parents[i] = parent
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
