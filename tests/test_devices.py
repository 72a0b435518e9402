"""Tests marked `gpu`, and the device that their ranks share."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import pytest_ignore_collect
from tests.devices import SharedGPU, accelerator_on

HERE = Path(__file__).parent
WITH_GPU = (
    "generation/forward/test_cuda_graphs.py",
    "generation/test_devices.py",
    "runtime/measure/test_offload.py",
    "runtime/parallel/test_packed_forward.py",
    "strategies/pool/test_memory_probe.py",
    "strategies/test_devices.py",
)


def is_ignored(path: str, expression: str) -> bool | None:
    config: Any = Namespace(option=Namespace(markexpr=expression))
    return pytest_ignore_collect(HERE / path, config)


@pytest.mark.parametrize("path", WITH_GPU)
def test_gpu_runs_collect_the_files_with_gpu_tests(path: str) -> None:
    assert is_ignored(path, "gpu") is None


@pytest.mark.parametrize("path", ["test_cli.py", "layout/test_dims.py", "strategies/ray/test_ray_ranks.py"])
def test_gpu_runs_leave_out_other_files_and_other_runs_none(path: str) -> None:
    assert is_ignored(path, "gpu") is True
    assert is_ignored(path, "") is None


def test_all_ranks_share_the_first_gpu() -> None:
    accelerator = accelerator_on("cuda")
    assert isinstance(accelerator, SharedGPU)
    assert accelerator.get_parallel_devices(accelerator.parse_devices(3)) == [torch.device("cuda", 0)] * 3
    assert accelerator_on("cpu") == "cpu"
