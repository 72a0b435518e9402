"""Tasks on a shared host, compared with a simulation in small time steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.timeline.contention import Task, run_tasks

HOST = ClusterSpec.local(4)
STEP = 1 / 64


def two_cores(busy: int) -> float:
    """Return the slowdown of busy ranks on two cores."""
    return max(1.0, busy / 2)


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    """Draw tasks in the order of their ranks' programs; some need earlier ones."""
    tasks: list[Task] = []
    last: dict[int, int] = {}
    for number in range(draw(st.integers(1, 6))):
        ranks = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
        needs = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        after = needs | {last[rank] for rank in ranks if rank in last}
        tasks.append(Task(ranks, draw(st.integers(0, 16)) / 8, tuple(after)))
        last.update(dict.fromkeys(ranks, number))
    return tasks


def naive(tasks: list[Task]) -> list[float]:
    """Return the end of each task from a simulation in small time steps."""
    left = [task.seconds for task in tasks]
    ends: list[float | None] = [None] * len(tasks)
    now = 0.0
    while None in ends:
        for number, task in enumerate(tasks):  # tasks without seconds end at once, in order
            if ends[number] is None and left[number] <= 1e-9 and all(ends[j] is not None for j in task.after):
                ends[number] = now
        running = [
            number
            for number, task in enumerate(tasks)
            if ends[number] is None and all(ends[j] is not None for j in task.after)
        ]
        busy = sum(len(tasks[number].ranks) for number in running)
        for number in running:
            left[number] -= STEP * two_cores(len(tasks[number].ranks)) / two_cores(busy)
        now += STEP
    return [end for end in ends if end is not None]


@settings(deadline=None, max_examples=60)
@given(programs())
def test_tasks_under_contention_end_as_in_a_simulation_of_small_steps(tasks: list[Task]) -> None:
    ends = [end for _, end in run_tasks(tasks, HOST, two_cores)]
    assert ends == pytest.approx(naive(tasks), abs=(len(tasks) + 1) * 2 * STEP)


@given(programs())
def test_without_contention_a_task_takes_its_own_seconds(tasks: list[Task]) -> None:
    for task, (begin, end) in zip(tasks, run_tasks(tasks, HOST, lambda busy: 1.0), strict=True):
        assert end - begin == pytest.approx(task.seconds)


@settings(deadline=None)
@given(programs())
def test_contention_is_never_faster_and_work_is_limited_by_the_cores(tasks: list[Task]) -> None:
    free = run_tasks(tasks, HOST, lambda busy: 1.0)
    crowded = run_tasks(tasks, HOST, two_cores)
    span = max(end for _, end in crowded)
    assert span >= max(end for _, end in free) - 1e-9
    # A task of three or four ranks does two cores' work per second.
    assert 2 * span >= sum(task.seconds * min(2, len(task.ranks)) for task in tasks) - 1e-9


def test_two_concurrent_pairs_on_two_cores_take_as_long_as_in_sequence() -> None:
    side_by_side = [Task((0, 1), 1.0, ()), Task((2, 3), 1.0, ())]
    assert [end for _, end in run_tasks(side_by_side, HOST, two_cores)] == [2.0, 2.0]


def test_ranks_of_other_nodes_cause_no_contention() -> None:
    nodes = ClusterSpec.parse("cpu:2x2")
    tasks = [Task((0, 1), 1.0, ()), Task((2, 3), 1.0, ())]
    assert [end for _, end in run_tasks(tasks, nodes, lambda busy: float(busy))] == [1.0, 1.0]
