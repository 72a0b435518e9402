"""Live bytes and shared memory of a process."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import available_bytes, live_bytes, shared_ranges


def test_shared_memory_differs_from_private_memory() -> None:
    maps = [
        "00001000-00003000 rw-s 00000000 00:01 7 /memfd:realloc (deleted)",
        "00004000-00005000 rw-p 00000000 00:00 0 [heap]",
        "00006000-00007000 r--s 00000000 00:01 9 /usr/lib/cache",
    ]
    assert shared_ranges(maps) == [(0x1000, 0x3000), (0x6000, 0x7000)]


def test_available_memory_is_that_of_the_kernel() -> None:
    assert (
        available_bytes(["MemTotal:       24000 kB", "MemFree:          10 kB", "MemAvailable:   2048 kB"]) == 2 << 20
    )


def test_live_bytes_count_a_shared_storage_once_and_gradients() -> None:
    before = live_bytes(num_sharing=4)
    weight = torch.zeros(1 << 20, requires_grad=True)
    view = weight.detach()[10:]
    assert live_bytes(num_sharing=4) - before == pytest.approx(4 << 20, abs=1 << 16)
    weight.sum().backward()
    assert live_bytes(num_sharing=4) - before == pytest.approx(8 << 20, abs=1 << 16)
    del weight, view
    assert live_bytes(num_sharing=4) - before == pytest.approx(0, abs=1 << 16)


def test_live_bytes_leave_out_fake_tensors() -> None:
    before = live_bytes(num_sharing=1)
    with FakeTensorMode():
        fake = torch.zeros(1 << 20)
    assert fake.device.type == "cpu"
    assert live_bytes(num_sharing=1) - before == pytest.approx(0, abs=1 << 16)
