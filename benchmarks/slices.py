"""Run the arms of a benchmark in one process, in turns of a few milliseconds each.

The speed of a shared machine changes within seconds. Two equal runs of half a second, one after the other, differ by 4
% (standard deviation of 20 pairs). In 24 slices that take turns, they differ by 2.5 %. Seconds are CPU time of an arm's
own thread, so waiting for a slice costs nothing.
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

from lightning_realloc.runtime.measure.allocators import TRIM_THRESHOLD, keep_freed_memory, set_malloc

NUM_SLICES = 24
"""Slices of one run. The first step of a slice finds cold caches: with 24 slices this costs 3 % in all arms, with more
slices it would dominate."""
_FIRST_SLICE_S = math.inf
"""Length of an arm's first run, which is one slice. Its duration is not known yet, and engines would learn wrong step
times from steps with cold caches."""
_MMAP_MAX, _ARENA_MAX = -4, -8
"""Numbers of ``mallopt``'s parameters, from glibc's malloc.h."""


class SlicedArms:
    """Runs each arm in its own thread, one slice at a time; arms call `give_way` where a slice may end.

    A slice is a share of an arm's last run, so slow and fast arms finish at the same time. Caches are cold after
    another arm's slice, so arms that are compared must give way at the same places.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Start a thread for each arm. Threads stay alive, since libraries keep prepared state per thread."""
        num_threads = torch.get_num_threads()
        self._threads = {name: ThreadPoolExecutor(1, name, torch.set_num_threads, (num_threads,)) for name in names}
        self._slice_s = dict.fromkeys(names, _FIRST_SLICE_S)
        self._order: deque[str] = deque()
        """Arms that have not finished; the first one runs."""
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
        """Let the other arms run if the slice of the calling arm has ended. Only for arms that `run` started."""
        name = self._own.name
        if time.thread_time() >= self._own.slice_end_s and len(self._order) > 1:
            with self._changed:
                self._order.rotate(-1)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._order[0] == name)
            self._own.slice_end_s += self._slice_s[name]  # overruns must not add up

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
    """Let all threads allocate from one heap of at least ``num_bytes``, which keeps freed memory.

    A rank of the strategy keeps the memory it frees. By default each thread has a heap, and whether it is returned
    after a run depends on its blocks. Equal arms differed by up to 4 % through page faults alone. The heap is touched
    now and must hold the memory of all arms at once. Does nothing without glibc.
    """
    if keep_freed_memory():
        set_malloc(_ARENA_MAX, 1)
        set_malloc(_MMAP_MAX, 0)
        set_malloc(TRIM_THRESHOLD, -1)  # all arms together may free more than one rank does
        torch.zeros(num_bytes, dtype=torch.uint8)
