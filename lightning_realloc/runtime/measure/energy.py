"""Energy that this rank's GPU has used, by the counter of NVIDIA's management library (NVML)."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch


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
