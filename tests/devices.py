"""Devices on which tests run: the CPU everywhere, and the first CUDA device where there is one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from tests.emulated_cuda import EMULATED

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""Values of a test's parameter ``device``."""

DEFAULT_DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Device of runs that name none."""

CPU_ALONE = pytest.mark.skipif(DEFAULT_DEVICE != "cpu", reason="is about memory, threads or processes of CPU ranks")
"""Mark of tests that do not run with ``TEST_DEVICE=cuda``."""


class SharedGPU(CUDAAccelerator):
    """Lets all ranks work on the first CUDA device, for which Lightning wants one device per rank.

    NCCL refuses that; use ``process_group_backend="gloo"``.
    """

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Return a number for each rank."""
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the first device once for each rank."""
        return [torch.device("cuda", 0)] * len(devices)


def accelerator_on(device: str) -> CUDAAccelerator | str:
    """Return the Trainer's ``accelerator`` for ranks that share a device."""
    return SharedGPU() if device == "cuda" else device


def accelerator_of_nccl(world_size: int) -> CUDAAccelerator | str:
    """Return the ``accelerator`` for ranks that NCCL connects; skip the test if there are too few devices for them.

    Ranks may share an emulated device (``tests.emulated_cuda``).
    """
    if torch.cuda.get_device_name() == EMULATED:
        return SharedGPU()
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    return "cuda"
