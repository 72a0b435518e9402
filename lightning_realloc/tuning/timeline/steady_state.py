"""Seconds of an iteration in the steady state, as the largest mean of a cycle in the graph of waits.

Ranks run the steps of a schedule in a fixed order, so which step waits for which is fixed too. The time of an iteration
is then the largest mean of a cycle in that graph: seconds around the cycle over the number of iterations that it spans.
Howard's policy iteration finds it exactly, in the form of Bellman-Ford relaxations: raise a mean until no cycle exceeds
it. Where ranks of a node slow each other down, waits are not enough, and a few iterations are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.timeline.contention import run_tasks
from lightning_realloc.tuning.timeline.iteration_schedule import IterationSchedule, Overlap, unroll

SETTLING_ITERATIONS = 2
"""Iterations simulated under contention before the mean begins; more of them reduce the effect of the start."""
MEASURED_ITERATIONS = 2
"""Iterations over which the mean under contention is taken."""
_ROUNDING = 1e-9
"""A difference below this fraction of a step's end is rounding."""


class _Node(NamedTuple):
    step: int
    now: tuple[int, ...]
    """Earlier steps of the same iteration that it waits for."""
    before: tuple[int, ...]
    """Steps of the previous iteration that it waits for."""
    has_ranks: bool
    """Whether it keeps ranks busy, and so waits for itself in the previous iteration."""


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Waits between the steps of consecutive iterations, without those that other waits imply."""

    nodes: tuple[_Node, ...]
    """Steps that wait or keep ranks busy, in the order in which ranks run them."""

    @classmethod
    def from_masks(
        cls, masks: Sequence[int], needs: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]
    ) -> WaitGraph:
        """Return the graph of steps on some ranks.

        Args:
            masks: The ranks of each step as bits; 0 for a step that keeps no rank busy.
            needs: See `IterationSchedule`.
            carried: See `IterationSchedule`.
        """
        steps = range(len(masks))
        nodes: list[_Node] = []
        done_now: list[set[int]] = []  # for each step: steps of its iteration that end before it starts
        done_before: list[set[int]] = [set() for _ in steps]  # the same, of the previous iteration
        for i in steps:
            now = [j for j in range(i) if masks[i] & masks[j] or j in needs[i]]
            now = [j for j in now if not any(j in done_now[k] for k in now)]
            done_now.append(set(now).union(*(done_now[k] for k in now)))
            if masks[i] or now or carried[i]:
                nodes.append(_Node(i, tuple(now), (), masks[i] > 0))
        reduced = []
        for node in nodes:
            i = node.step
            before = {j for j in steps if (j >= i and masks[i] & masks[j]) or j in carried[i]}
            before = {j for j in before if not any(j in done_now[k] for k in before)}
            implied = set().union(*(done_before[k] for k in node.now))
            done_before[i] = implied.union(before, *(done_now[k] for k in before))
            reduced.append(node._replace(before=tuple(sorted(before - implied))))
        return cls(tuple(reduced))


def seconds_per_iteration(seconds: Sequence[float], waits: WaitGraph, overlap: Overlap) -> float:
    """Return the seconds between the ends of two iterations after many of them.

    Args:
        seconds: Seconds of every step.
    """
    if overlap == "none":
        return sum(seconds)
    if overlap == "calls":
        return max(_ends(seconds, waits), default=0.0)
    return _largest_cycle_mean(seconds, waits)


def contended_seconds_per_iteration(
    schedule: IterationSchedule,
    task_masks: Sequence[int],
    task_seconds: Sequence[float],
    overlap: Overlap,
    cluster: ClusterSpec,
    slowdown: Callable[[int], float],
) -> float:
    """Return the seconds of an iteration where ranks of a node slow each other down, from a few simulated iterations.

    Args:
        slowdown: See `run_tasks`.
    """
    if overlap == "none":
        return sum(task_seconds)
    num_iterations = SETTLING_ITERATIONS + MEASURED_ITERATIONS if overlap == "iterations" else 1
    times = run_tasks(unroll(schedule, [task_masks] * num_iterations, task_seconds, overlap), cluster, slowdown)
    if overlap == "calls":  # the next iteration starts when this one has ended
        return max((end for _, end in times), default=0.0)
    settled = times[: SETTLING_ITERATIONS * len(schedule.tasks)]
    begin, end = (max((end for _, end in part), default=0.0) for part in (settled, times))
    return (end - begin) / MEASURED_ITERATIONS


def _ends(seconds: Sequence[float], waits: WaitGraph) -> list[float]:
    ends = list(seconds)
    for step, now, _, _ in waits.nodes:
        ends[step] += max((ends[j] for j in now), default=0.0)
    return ends


def _largest_cycle_mean(seconds: Sequence[float], waits: WaitGraph) -> float:
    mean = max((seconds[node.step] for node in waits.nodes if node.has_ranks), default=0.0)
    ends = [0.0] * len(seconds)
    parents: list[tuple[int, int]] = [(-1, 0)] * len(seconds)
    while True:
        changed = False
        for i, now, before, _ in waits.nodes:
            start, parent, iterations = -math.inf, -1, 0
            for j in now:
                if ends[j] > start:
                    start, parent = ends[j], j
            for j in before:
                if ends[j] - mean > start:
                    start, parent, iterations = ends[j] - mean, j, 1
            if start + seconds[i] > ends[i] + _ROUNDING * (1e-6 + abs(ends[i])):
                ends[i] = start + seconds[i]
                parents[i] = (parent, iterations)
                changed = True
        if not changed:
            return mean
        mean = max(mean, _best_cycle(seconds, parents))


def _best_cycle(seconds: Sequence[float], parents: Sequence[tuple[int, int]]) -> float:
    """Return the largest mean of the cycles that the parents form; 0 without a cycle."""
    best, seen = 0.0, [-1] * len(parents)
    for first in range(len(parents)):
        step = first
        while step >= 0 and seen[step] < 0:
            seen[step] = first
            step = parents[step][0]
        if step < 0 or seen[step] != first:
            continue
        total, iterations, current = 0.0, 0, step
        while True:
            total += seconds[current]
            iterations += parents[current][1]
            current = parents[current][0]
            if current == step:
                break
        best = max(best, total / iterations)
    return best
