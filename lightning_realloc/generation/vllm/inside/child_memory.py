"""Shared memory of vLLM's workers. Loaded by `child` in each worker, so it imports nothing of this package."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def unlink_shared_memory(worker: Any) -> None:
    """Remove the names of shared memory in which tensor-parallel workers exchange activations on CPU.

    All workers have opened it once vLLM is ready. vLLM's processes are killed at their end, and would leave it.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    for name in {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/vllm_dist_" in line}:
        with suppress(FileNotFoundError):  # another worker was first
            os.unlink(name)
