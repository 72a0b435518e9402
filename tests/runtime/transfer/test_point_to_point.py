"""Building blocks of messages and transports, in one process."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.transfer import point_to_point
from lightning_realloc.runtime.transfer.point_to_point import (
    Arena,
    CopyList,
    default_backend,
    region_view,
)


def test_an_arena_frees_and_restores_the_memory_of_its_tensors() -> None:
    arena = Arena(torch.device("cpu"))
    first, second = arena.allocate((3, 5), torch.float32), arena.allocate((7,), torch.bfloat16)
    arena.restore()
    assert second.data_ptr() - first.data_ptr() == 64  # 60 bytes, rounded up to a cache line
    assert arena.num_bytes == first.untyped_storage().nbytes() == 64 + 14
    view = first[1:, 2:]
    arena.release()
    assert first.untyped_storage().nbytes() == 0
    arena.restore()
    first.fill_(1.0)
    second.fill_(2.0)
    assert view.sum() == 6 and second.sum() == 14


def test_a_rewound_arena_is_as_large_as_its_largest_use() -> None:
    arena = Arena(torch.device("cpu"), alignment_bytes=2)
    arena.allocate((10,), torch.bfloat16)
    arena.rewind()
    arena.allocate((4,), torch.bfloat16)
    arena.allocate((3,), torch.bfloat16)
    assert arena.num_bytes == 20


def test_a_region_is_a_view_of_its_tensor() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    box = region_view(tensor, (1, 0, 2), (1, 3, 2))
    assert torch.equal(box, tensor[1:, :, 2:])
    box.zero_()
    assert tensor[1, :, 2:].sum() == 0
    assert region_view(torch.tensor(5), (), ()) == 5


def test_copies_cast_between_strided_views() -> None:
    target, source = torch.zeros(4, 6, dtype=torch.bfloat16), torch.randn(6, 4)
    copies = CopyList()
    copies.run()
    copies.add(target[:, ::2], source.t()[:, :3])
    copies.run()
    assert torch.equal(target[:, ::2], source.t()[:, :3].bfloat16())
    assert copies.num_bytes == 4 * 3 * 2


def test_a_device_without_a_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        point_to_point.dist, "is_initialized", lambda: False
    )  # a fit of another test may have left a group
    assert default_backend(torch.device("cpu")) == "none"
    monkeypatch.setattr(point_to_point.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(point_to_point.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(ReallocError, match="no backend for xpu tensors, only for cpu, cuda"):
        default_backend(torch.device("xpu"))
