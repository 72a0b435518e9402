"""Offloaded tensors come back unchanged, and so do their views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.measure.offload import Offload, make_copier

CPU = torch.device("cpu")


class LateCopier:
    """Copies back only when it is waited for, as a slow disk may."""

    def __init__(self) -> None:
        self._started: list[tuple[Tensor, Tensor]] = []

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for fast, slow in pairs:
            slow.copy_(fast)

    def start_copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._started += pairs
        for fast, _ in pairs:
            fast.zero_()

    def wait(self) -> None:
        for fast, slow in self._started:
            fast.copy_(slow)
        self._started.clear()


def test_tensors_and_their_views_come_back_as_they_were() -> None:
    offload = Offload(make_copier(CPU))
    tensors = [torch.randn(30, 7), torch.randn(5).to(torch.bfloat16), torch.randn(4, 4).t()]
    view, expected = tensors[0][3:9], [tensor.clone() for tensor in tensors]
    offload.move_out([*tensors, tensors[0].view(-1)], version=1)
    assert offload.is_offloaded
    assert offload.num_bytes == 30 * 7 * 4 + 5 * 2 + 16 * 4
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    offload.start_return()
    offload.finish_return()
    for tensor, before in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, before, rtol=0, atol=0)
    torch.testing.assert_close(view, expected[0][3:9], rtol=0, atol=0)


def test_content_is_copied_again_only_under_a_new_version() -> None:
    offload, tensor = Offload(make_copier(CPU)), torch.zeros(1000)
    offload.move_out([tensor], version=1)
    offload.finish_return()
    tensor.fill_(2.0)
    offload.move_out([tensor], version=1)
    offload.finish_return()
    assert float(tensor.sum()) == 0.0  # the old copy: the version is the same
    tensor.fill_(3.0)
    offload.move_out([tensor], version=2)
    offload.finish_return()
    assert float(tensor.sum()) == 3000.0


def test_other_tensors_can_be_offloaded_after_the_first_return() -> None:
    offload, first, second = Offload(make_copier(CPU)), torch.ones(10), torch.full((20,), 2.0)
    offload.move_out([first], version=1)
    offload.finish_return()
    offload.move_out([second], version=1)
    offload.finish_return()
    assert (float(first.sum()), float(second.sum())) == (10.0, 40.0)


def test_leaving_and_returning_twice_changes_nothing() -> None:
    offload, tensor = Offload(make_copier(CPU)), torch.arange(6.0)
    offload.finish_return()
    offload.move_out([tensor], version=1)
    offload.move_out([tensor], version=2)
    offload.finish_return()
    offload.finish_return()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_return_under_way_ends_before_the_tensors_leave_again() -> None:
    offload, tensor = Offload(LateCopier()), torch.arange(6.0)
    offload.move_out([tensor], version=1)
    offload.start_return()
    offload.move_out([tensor], version=2)
    offload.finish_return()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_memory_that_torch_cannot_free_is_refused(tmp_path: Path) -> None:
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=16, dtype=torch.float32)
    with pytest.raises(ReallocError, match="1 of 2 tensors lie in memory that torch cannot free"):
        Offload(make_copier(CPU)).move_out([torch.ones(3), mapped], version=1)


def test_the_error_of_a_full_disk_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    tensor = torch.ones(1000)
    with pytest.raises(
        ReallocError, match=r"no space to offload 0 MB to .*No space left on device; free some, set TMPDIR"
    ):
        Offload(make_copier(CPU)).move_out([tensor], version=1)
    assert float(tensor.sum()) == 1000.0


@pytest.mark.gpu
def test_cuda_tensors_return_during_other_work() -> None:
    device = torch.device("cuda")
    offload, tensor = Offload(make_copier(device)), torch.randn(1 << 24, device=device)
    expected = tensor.cpu()
    for version in (1, 1, 2):
        before = torch.cuda.memory_allocated()  # the first matrix product allocates a workspace
        offload.move_out([tensor], version=version)
        assert torch.cuda.memory_allocated() <= before - (1 << 26)
        busy = torch.randn(2048, 2048, device=device)
        offload.start_return()
        for _ in range(10):
            busy = busy @ busy / 2048
        offload.finish_return()
        torch.testing.assert_close((tensor * 1).cpu(), expected, rtol=0, atol=0)
        del busy
