"""How long does something take that several ranks do together? On the slowest of them, the others asleep meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_realloc.layout import AXES, Layout
from lightning_realloc.runtime.mesh import MeshRegistry

REPEATS = 2
"""Timed runs of each piece of work, after one that is not counted; the fastest counts: others were in its way the
least."""
LONG_S = 0.1
"""A run that takes longer says enough alone."""


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """Times work on this rank and on others."""

    meshes: MeshRegistry
    device: torch.device
    rank: int
    world_size: int
    clock: Callable[[], float] = time.perf_counter
    elapsed_s: float = field(default=0.0, init=False)
    """Since this was made, when all ranks met last; the same on all."""
    _begin: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def slowest(
        self, layout: Layout, works: Callable[[], Iterable[list[float] | Callable[[], object]]], *, count: int = 1
    ) -> list[float]:
        """Return each work's seconds on the slowest rank of the layout, the fastest of its repeats, on all ranks."""
        times = [[0.0] * REPEATS for _ in range(count)]
        if self.rank in layout:
            group = self.meshes.group(layout, *AXES)
            times = [work if isinstance(work, list) else self._repeated(group, work) for work in works()]
        return self.agreed(times)

    def agreed(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Return the minimum over repeats of the maximum over ranks; sleeps until all ranks are here."""
        elapsed = self.clock() - self._begin
        table = torch.tensor([*times, [elapsed] * len(times[0])], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        *seconds, self.elapsed_s = (min(row) for row in table.tolist())
        return seconds

    def _repeated(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> list[float]:
        """Return the seconds of some runs after one that warms up; of one alone where that was long enough."""
        first = self._timed(group, work)
        repeats = REPEATS if self.meet(group, first) < LONG_S else 1
        times = [self._timed(group, work) for _ in range(repeats)]
        return times + [times[-1]] * (REPEATS - repeats)

    def _timed(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> float:
        self.meet(group)
        self._synchronize()
        begin = self.clock()
        work()
        self._synchronize()
        return self.clock() - begin

    def meet(self, group: dist.ProcessGroup | None, value: float = 0.0) -> float:
        """Wait for the group's ranks; return the largest of their values."""
        largest = torch.tensor([value], device=self.device)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return float(largest)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
