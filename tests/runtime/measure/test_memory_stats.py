"""The meter counts each allocation of torch once, until it is freed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from lightning_realloc.runtime.measure.memory_stats import StorageMeter


@pytest.fixture
def meter() -> Iterator[StorageMeter]:
    """Return a running meter."""
    meter = StorageMeter()
    meter.start()
    yield meter
    meter.stop()


def test_tensors_that_exist_at_the_start_count() -> None:
    kept = torch.zeros(1 << 20)
    meter = StorageMeter()
    meter.start()
    before = meter.current_bytes
    meter.stop()
    assert before >= kept.nbytes
    del kept
    assert meter.current_bytes <= before - (4 << 20)


def test_the_peak_of_a_backward_pass_has_activations_and_gradients(meter: StorageMeter) -> None:
    before = meter.current_bytes
    weight = torch.zeros(1000, requires_grad=True)
    loss = (torch.ones(1000) * weight).exp().sum()
    loss.backward()
    del loss
    # Weight and gradient stay, 4000 bytes each. At the peak there were weight, ones, the exponential and its gradient,
    # and the scalars of the loss and its gradient, 4 bytes each.
    assert meter.current_bytes - before == 2 * 4000
    assert meter.take_peak() - before == 4 * 4000 + 8
    assert meter.take_peak() - before == 2 * 4000


def test_views_and_results_in_place_count_once(meter: StorageMeter) -> None:
    before = meter.current_bytes
    tensor = torch.empty(1000)
    views = [tensor[10:], tensor.view(10, 100), tensor.add_(1)]
    assert meter.current_bytes - before == 4000
    del tensor, views
    assert meter.current_bytes == before


def test_resized_storage_counts_with_its_current_size(meter: StorageMeter) -> None:
    before = meter.current_bytes
    tensor = torch.empty(1000)
    tensor.untyped_storage().resize_(0)
    assert meter.current_bytes == before
    tensor.untyped_storage().resize_(8000)
    assert meter.current_bytes - before == 8000


def test_memory_that_torch_did_not_allocate_does_not_count(meter: StorageMeter) -> None:
    before = meter.current_bytes
    foreign = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    view = foreign[16:].view(torch.int32)
    assert meter.current_bytes - before == 0
    assert view.sum() == 0


def test_nothing_is_counted_after_stop() -> None:
    resize = torch.UntypedStorage.resize_
    meter = StorageMeter()
    meter.start()
    meter.stop()
    before = meter.current_bytes
    kept = torch.empty(1000)
    assert meter.current_bytes == before
    assert torch.UntypedStorage.resize_ is resize
    assert kept.nbytes == 4000
