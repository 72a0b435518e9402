"""A device without enough free memory is refused before weights move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_realloc.errors import PlanError
from lightning_realloc.strategies.pool.memory_check import allocate_once, require_free_memory

GPU = torch.device("cuda")


def full(num_bytes: int, device: torch.device) -> Any:
    """Fail like a full device."""
    raise torch.cuda.OutOfMemoryError("no room")


def test_a_full_device_is_refused_with_the_missing_bytes() -> None:
    with pytest.raises(
        PlanError, match="moving needs 3 MiB more on rank 0, and its device has no room; use a plan that"
    ):
        require_free_memory(3 * 2**20, GPU, what="moving", take=full)


def test_enough_memory_is_accepted_and_cpu_memory_is_not_probed() -> None:
    asked: list[int] = []
    require_free_memory(7, GPU, what="moving", take=lambda size, _: asked.append(size))
    require_free_memory(8, torch.device("cpu"), what="moving", take=full)
    assert asked == [7]


@pytest.mark.gpu
def test_a_cuda_device_is_probed() -> None:
    require_free_memory(1 << 20, GPU, what="moving")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocate_once(1 << 50, GPU)
