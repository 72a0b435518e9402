"""Arms that run side by side in one process, a slice of each at a time.

A shared machine gets slower and faster within seconds, as other work comes and goes. Two runs of half a second that do
the same, one after the other, then differ by 4 % (standard deviation of 20 pairs); in 24 slices that take turns they
differ by 2.5 %. Seconds are those of the processor that an arm's own thread used: waiting for a slice costs nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from lightning_realloc.runtime.measure.host_memory import TRIM_THRESHOLD, keep_freed_memory, set_malloc

NUM_SLICES = 24
"""Of one run. With many more of them, what an arm's first step finds in the caches would be all that is measured: 24
cost 3 % in all arms."""
_FIRST_SLICE_S = math.inf
"""An arm's first run is one slice: how long it takes is not known, and engines would learn from steps with cold caches
what steps take."""
_MMAP_MAX, _ARENA_MAX = -4, -8
"""Numbers of ``mallopt``'s parameters, from glibc's malloc.h."""


class SlicedArms:
    """Runs arms in slices, each arm in a thread of its own; arms call `give_way` wherever a slice may end.

    Slices are shares of what an arm's last run took: slow and fast arms get over at the same time. Behind another arm's
    slice the caches are cold, so arms that are to be compared must give way at the same places.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Start a thread for each arm. They last: libraries keep what they prepared by thread."""
        num_threads = torch.get_num_threads()
        self._threads = {name: ThreadPoolExecutor(1, name, torch.set_num_threads, (num_threads,)) for name in names}
        self._slice_s = dict.fromkeys(names, _FIRST_SLICE_S)
        self._order: deque[str] = deque()
        """Arms that are not over; the slice is the first one's."""
        self._changed = threading.Condition()
        self._own = threading.local()

    def __enter__(self) -> SlicedArms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def give_way(self) -> None:
        """Let the other arms have their slices first, where the calling one's is over; for arms that `run` runs."""
        name = self._own.name
        if time.thread_time() >= self._own.slice_end_s and len(self._order) > 1:
            with self._changed:
                self._order.rotate(-1)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._order[0] == name)
            self._own.slice_end_s += self._slice_s[name]  # or what steps go beyond would add up, and arms end apart

    def run(self, arms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Run all arms, each once; return the CPU-seconds of each."""
        self._order.extend(arms)
        runs = {name: self._threads[name].submit(self._run, name, arm) for name, arm in arms.items()}
        return {name: run.result() for name, run in runs.items()}

    def _run(self, name: str, arm: Callable[[], object]) -> float:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == name)
        begin = time.thread_time()
        self._own.name, self._own.slice_end_s = name, begin + self._slice_s[name]
        try:
            arm()
            seconds = time.thread_time() - begin
            self._slice_s[name] = seconds / NUM_SLICES
        finally:
            with self._changed:
                self._order.remove(name)
                self._changed.notify_all()
        return seconds


def keep_memory(num_bytes: int) -> None:
    """Let all threads take memory from one heap of so many bytes at least, which keeps what they free.

    A rank of the strategy keeps what it frees. Threads have a heap each, which goes back at the end of a run or does
    not, as its blocks happen to lie: arms that do the same differed by up to 4 %, in page faults alone. The heap is
    touched now, and has to hold what all arms take at a time, or the last one makes room for all others. Where the C
    library is not glibc, nothing is done.
    """
    if keep_freed_memory():
        set_malloc(_ARENA_MAX, 1)
        set_malloc(_MMAP_MAX, 0)
        set_malloc(TRIM_THRESHOLD, -1)  # what all arms free may be more than a rank does
        torch.zeros(num_bytes, dtype=torch.uint8)
