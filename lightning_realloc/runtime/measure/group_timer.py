"""How long does something take that several ranks do together? On the slowest of them, the others asleep meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_realloc.layout import AXES, Layout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry

SETTLED = 1.1
"""Times the fastest run's seconds: work is run until some runs take no longer. First runs fetch code and memory, twice
as long as later ones, and other programs come and go."""
CONFIRMED = 3
"""Of such runs."""
MOST_RUNS = 6
"""Of one piece of work that does not settle."""
LONG_S, MOST_LONG_RUNS = 0.5, 3
"""Seconds beyond which work is run so often at most."""


@dataclass(slots=True, kw_only=True)
class GroupTimer:
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
        self, layout: Layout, works: Callable[[], Iterable[float | Callable[[], object]]], *, count: int = 1
    ) -> list[float]:
        """Return each work's seconds on the slowest rank of the layout, in its fastest run, on all ranks.

        Works that are numbers took their times themselves.
        """
        times = [0.0] * count
        if self.rank in layout:
            group = self.meshes.group(layout, *AXES)
            times = [work if isinstance(work, float) else self._fastest(group, work) for work in works()]
        return self.agreed(times)

    def agreed(self, times: Sequence[float]) -> list[float]:
        """Return the maximum over ranks; sleeps until all ranks are here."""
        table = torch.tensor([*times, self.clock() - self._begin], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        *seconds, self.elapsed_s = table.tolist()
        return seconds

    def _fastest(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> float:
        """Return the seconds of the fastest of some runs, on the group's slowest rank."""
        runs: list[float] = []
        while not has_settled(runs):
            self.meet(group)
            runs.append(self.meet(group, self._timed(work)))
        return min(runs)

    def _timed(self, work: Callable[[], object]) -> float:
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


def has_settled(runs: Sequence[float]) -> bool:
    """Whether the fastest of some runs can be believed: some were about as fast, or there were enough."""
    fastest = min(runs, default=math.inf)
    confirmed = sum(run <= SETTLED * fastest for run in runs)
    return confirmed >= CONFIRMED or len(runs) >= (MOST_RUNS if fastest <= LONG_S else MOST_LONG_RUNS)
