"""Time work that several ranks do together, on the slowest rank, while the other ranks wait.

Work is repeated until its time settles: first runs load code and allocate memory, and take twice as long as later
ones, and other programs disturb some runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_realloc.layout import AXES, Layout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry

SETTLED_RATIO = 1.1
"""A run confirms the fastest one if it takes at most this many times its seconds. Raising it needs fewer runs."""
MIN_CONFIRMED_RUNS = 3
"""Confirming runs, including the fastest, after which a time is settled. Raising it needs more runs."""
MAX_RUNS = 6
"""Most runs of work whose time does not settle."""
LONG_RUN_S = 0.5
"""Seconds of a run above which work is run at most ``MAX_LONG_RUNS`` times."""
MAX_LONG_RUNS = 3
"""Most runs of work that takes longer than ``LONG_RUN_S``."""


@dataclass(slots=True, kw_only=True)
class GroupTimer:
    """Times work on this rank and on other ranks."""

    meshes: MeshRegistry
    device: torch.device
    rank: int
    world_size: int
    clock: Callable[[], float] = time.perf_counter
    elapsed_s: float = field(default=0.0, init=False)
    """Seconds from the start of this timer to the last `max_over_ranks`; the same on all ranks."""
    limit_s: float = field(default=math.inf, init=False)
    """Seconds after which no further work is run; its time is then 0."""
    _begin: float = field(default=0.0, init=False)
    _timed_s: float = field(default=0.0, init=False)
    """Seconds of work since the last `max_over_ranks`; the same on all ranks of the group that ran it."""

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def time_slowest(
        self, layout: Layout, works: Callable[[], Iterable[float | Callable[[], object]]], *, count: int = 1
    ) -> list[float]:
        """Return for each work the seconds of its fastest run on the layout's slowest rank. Collective over all ranks.

        Args:
            works: Returns the work of this rank: functions to time, or seconds that were measured already.
            count: Number of works.
        """
        times = [0.0] * count
        if self.rank in layout:
            group = self.meshes.group(layout, *AXES)
            times = [work if isinstance(work, float) else self._fastest(group, work) for work in works()]
        return self.max_over_ranks(times)

    def max_over_ranks(self, times: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over all ranks; waits for all of them."""
        table = torch.tensor([*times, self.clock() - self._begin], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        *seconds, self.elapsed_s = table.tolist()
        self._timed_s = 0.0
        return seconds

    @property
    def has_passed_limit(self) -> bool:
        """Whether `limit_s` has passed; the same on all ranks between two measurements."""
        return self.elapsed_s + self._timed_s >= self.limit_s

    def _fastest(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> float:
        """Return the seconds of the fastest run on the group's slowest rank; 0 without a run, after `limit_s`."""
        runs: list[float] = []
        while not self.has_passed_limit and not has_settled(runs):
            self.max_over_group(group)
            runs.append(self.max_over_group(group, self._timed(work)))
            self._timed_s += runs[-1]
        return min(runs, default=0.0)

    def _timed(self, work: Callable[[], object]) -> float:
        self._synchronize()
        begin = self.clock()
        work()
        self._synchronize()
        return self.clock() - begin

    def max_over_group(self, group: dist.ProcessGroup | None, value: float = 0.0) -> float:
        """Wait for the ranks of the group and return the largest of their values."""
        largest = torch.tensor([value], device=self.device)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return float(largest)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def has_settled(runs: Sequence[float]) -> bool:
    """Return whether enough runs are about as fast as the fastest, or the limit of runs is reached."""
    fastest = min(runs, default=math.inf)
    confirmed = sum(run <= SETTLED_RATIO * fastest for run in runs)
    return confirmed >= MIN_CONFIRMED_RUNS or len(runs) >= (MAX_RUNS if fastest <= LONG_RUN_S else MAX_LONG_RUNS)
