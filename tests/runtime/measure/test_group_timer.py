"""Timing of the fastest run despite slow first runs, disturbed runs, and one clock per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.layout import Layout
from lightning_realloc.runtime.measure.group_timer import MAX_LONG_RUNS, MAX_RUNS, GroupTimer, has_settled
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from tests.workers import WorkerPool


def runs_until_settled(seconds: Iterator[float]) -> list[float]:
    runs: list[float] = []
    while not has_settled(runs):
        runs.append(next(seconds))
    return runs


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.2, 0.2, 0.2, 9.0], 3),  # steady from the first
        ([0.4, 0.3, 0.2, 0.21, 0.2, 9.0], 5),  # slow at first
        ([0.2, 0.4, 0.2, 0.5, 0.2, 9.0], 5),  # disturbed now and then
        ([0.3, 0.3, 0.1, 0.2, 0.2, 0.2, 9.0], MAX_RUNS),  # a fastest run that no other run confirms
        ([3.0, 2.0, 1.0, 9.0], MAX_LONG_RUNS),  # long
    ],
)
def test_work_runs_until_several_runs_are_as_fast_as_the_fastest(seconds: list[float], expected: int) -> None:
    assert len(runs_until_settled(iter(seconds))) == expected


class _Clock:
    """A clock that advances by the seconds that each work takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: list[float]) -> Callable[[], None]:
        left = iter(seconds)

        def run() -> None:
            self.now += next(left)

        return run


def _measure() -> list[float]:
    rank, clock = dist.get_rank(), _Clock()
    meshes, layout = MeshRegistry("cpu"), Layout.parse("dp2@0,1")
    meshes.create([layout])
    watch = GroupTimer(
        meshes=meshes, device=torch.device("cpu"), rank=rank, world_size=dist.get_world_size(), clock=clock
    )
    # Rank 1 is slower, except in its first run; seconds that were measured already pass through.
    seconds = [[5.0, 1.0, 1.0, 1.0], [4.0, 2.0, 2.0, 2.0]][rank] if rank in layout else []
    return watch.time_slowest(layout, lambda: [clock.work(seconds), 7.0 + rank], count=2)


def test_all_ranks_receive_the_fastest_run_of_the_slowest_rank(workers: WorkerPool) -> None:
    assert workers.run(_measure)[0] == [2.0, 8.0]
    assert workers.run(_measure)[3] == [2.0, 8.0]
