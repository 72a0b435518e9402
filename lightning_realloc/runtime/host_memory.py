"""What becomes of host memory that a step frees? It is kept for the next step.

Activations are freed and allocated again in every step. By default glibc hands much of that back to the operating
system, and every page comes back zeroed through a page fault: thousands in one backward pass of a small model.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``'s parameters, from glibc's malloc.h."""
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Where users set them by themselves."""
_KEPT_BYTES = 1 << 30
_LARGEST_KEPT_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB that is free at the heap's end, and blocks of up to 32 MiB, glibc's limit.

    Settings of the environment stay. Returns whether the C library took ours: only glibc knows them, and nothing needs
    them to be correct.
    """
    if any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
