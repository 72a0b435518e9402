"""Memory and energy that this rank has used since a moment, measured at almost no cost.

CUDA's allocator and the Linux kernel keep one peak each, which can be reset. `PeakMemory` adds every reading to the
peaks of all readers, so that a reset for one of them is no loss to the others.
"""

from __future__ import annotations

import resource
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_RUN = "run"
"""Reader that never takes its peak."""
_RESET_RESIDENT_PEAK = Path("/proc/self/clear_refs"), "5"
"""File and content that reset the peak of resident memory. Source: proc_pid_clear_refs(5)."""


class PeakMemory:
    """Peak bytes of this rank: allocated on its CUDA device, else resident in host memory.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peaks = {_RUN: 0}
        """Reader -> largest reading since it took its peak."""

    def of_run(self) -> int:
        """Return the peak so far."""
        return max(self._peaks[_RUN], self._current())

    def take(self, reader: str) -> int | None:
        """Return the peak since a reader's last call, or so far; None where it cannot be reset (CPU, not on Linux)."""
        peak = self._current()
        if not self._reset():
            return None
        self._peaks = {name: max(before, peak) for name, before in ({reader: 0} | self._peaks).items()}
        taken, self._peaks[reader] = self._peaks[reader], 0
        return taken

    def _current(self) -> int:
        """Return the peak since the last reset."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _reset(self) -> bool:
        """Reset the peak to the memory in use; return whether that is possible."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        file, content = _RESET_RESIDENT_PEAK
        try:
            file.write_text(content)
        except OSError:
            return False
        return True


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None outside of Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


class EnergyMeter:
    """Joules that a GPU has used; it counts all programs on the GPU, and its memory.

    Volta and later GPUs have the counter. Source: NVML API Reference, ``nvmlDeviceGetTotalEnergyConsumption``.

    Args:
        nvml: The module ``pynvml``, which the package ``nvidia-ml-py`` installs.
        handle: NVML's handle of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._before_mj = int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    @classmethod
    def for_device(cls, device: torch.device) -> EnergyMeter | None:
        """Return the meter of a device; None on CPU, without ``nvidia-ml-py``, and for a GPU without the counter."""
        nvml = _load_nvml() if device.type == "cuda" else None
        if nvml is None:
            return None
        try:
            nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError:
            return None

    def take(self) -> float:
        """Return the joules since the last call, or since this meter was made."""
        now_mj = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        used_mj, self._before_mj = now_mj - self._before_mj, now_mj
        return used_mj / 1e3


def _load_nvml() -> ModuleType | None:
    try:
        return import_module("pynvml")
    except ImportError:
        return None
