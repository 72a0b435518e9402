"""Policy of memory allocators: what malloc and CUDA's keep between steps, and how often garbage is collected.

On the host, activations and gathered weights are freed and allocated again in every step. Each page from the operating
system costs a page fault and is zeroed. Blocks of up to 32 MiB are therefore kept. This fragments the heap: four ranks
that train and generate with 100M weights hold 9.1 GB. They hold 5.8 GB if blocks above 8 MiB are returned at once, but
then FSDP, whose buffers are larger, takes 1.5 times as long.

Iterations leave no circular garbage. But samples and text indices live for a while, so the collector sees a growing
heap. It then walks hundreds of thousands of objects for a quarter of a second, while every other rank waits. So it runs
before models are built, and rarely during training.

On CUDA, the phases of an iteration allocate blocks of other sizes. Segments of fixed size then have gaps that no other
phase can use, and a run ends for lack of memory that is there. Expandable segments have none.
"""

from __future__ import annotations

import ctypes
import gc
import os

_CUDA_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables by which users configure torch's allocator for CUDA."""
TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``'s parameters, from glibc's malloc.h."""
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which users set these parameters."""
_MAX_KEPT_BYTES = 1 << 30
"""Most free bytes kept at the end of the heap."""
_MAX_KEPT_BLOCK_BYTES = 32 << 20
"""Largest block that is kept, in bytes; the maximum that glibc accepts."""
MIN_NEW_OBJECTS = 10_000
"""New objects after which the collector runs. Python's default of 700 is less than one batch of samples has."""


def keep_freed_memory() -> bool:
    """Make this process keep up to 1 GiB of free memory at the end of the heap, and blocks of up to 32 MiB.

    Does nothing if the environment sets these parameters. Returns whether the C library accepted them, which only
    glibc does. No result depends on it.
    """
    if any(name in os.environ for name in _ENVIRONMENT):
        return False
    return set_malloc(TRIM_THRESHOLD, _MAX_KEPT_BYTES) and set_malloc(_MMAP_THRESHOLD, _MAX_KEPT_BLOCK_BYTES)


def expand_cuda_segments() -> bool:
    """Let CUDA's allocator extend its segments; segments from before stay. Other processes cannot map such memory.

    Does nothing if the environment configures the allocator. Returns whether torch has the setting.
    """
    import torch  # the rest of this module needs the standard library alone

    if any(name in os.environ for name in _CUDA_ENVIRONMENT):
        return False
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch.cuda.memory, "_set_allocator_settings", None
    )
    if change is None:
        return False
    change("expandable_segments:True")
    return True


def set_malloc(parameter: int, value: int) -> bool:
    """Set a parameter of malloc by its number; return whether the C library accepted it, which only glibc does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))


def give_back_freed_memory() -> bool:
    """Return every free page to the operating system; return whether there were any. Works with glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def collect_garbage() -> None:
    """Free circular garbage now and return its memory to the operating system.

    A Trainer, its strategy and its module refer to each other. Without other references, they and all models stay in
    memory until the collector's next full pass, which may be several fits later.
    """
    gc.collect()
    give_back_freed_memory()


class InfrequentCollection:
    """Makes the garbage collector run less often between `start` and `stop`."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Raise the collector's threshold, unless it is disabled or has a higher one already."""
        before = gc.get_threshold()
        if self._before is None and 0 < before[0] < MIN_NEW_OBJECTS:
            self._before = before
            gc.set_threshold(MIN_NEW_OBJECTS, *before[1:])

    def stop(self) -> None:
        """Restore the threshold, unless other code has changed it meanwhile."""
        if self._before is not None and gc.get_threshold() == (MIN_NEW_OBJECTS, *self._before[1:]):
            gc.set_threshold(*self._before)
        self._before = None
