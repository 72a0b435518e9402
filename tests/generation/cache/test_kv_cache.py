"""Cache contents read from one slot and written to another are equal, for any slots and shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.cache.kv_cache import LayerShape, Segment, SlotCache
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value


def _cache(num_slots: int, capacity: int, *, layers: int = 3) -> SlotCache:
    cache = SlotCache()
    cache.reserve(num_slots, capacity)
    for index in reversed(range(layers)):  # layers may run in any order
        key, value = torch.empty(2, 8, dtype=torch.bfloat16), torch.empty(2, 4)
        for tensor in cache.layer(index, key, value):
            tensor.copy_(torch.randn(tensor.shape))
    return cache


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (3, 11), (4, 4)])
def test_positions_are_copied_from_one_cache_to_another(begin: int, end: int) -> None:
    torch.manual_seed(0)
    ours, theirs = _cache(3, 11), _cache(5, 20)
    before = theirs.read(4, 0, 20)
    content = ours.read(1, begin, end)
    assert content.numel() == (end - begin) * sum(shape.num_bytes for shape in ours.describe())
    theirs.write(4, begin, end, content)
    assert torch.equal(theirs.read(4, begin, end), content)
    assert torch.equal(ours.read(1, begin, end), content)
    theirs.write(4, 0, 20, before)
    assert torch.equal(theirs.read(4, 0, 20), before)


def test_an_empty_cache_takes_the_shapes_of_another() -> None:
    ours, empty = _cache(2, 6), SlotCache()
    empty.reserve(1, 8)
    shapes: list[LayerShape] = decode_value(encode_value(ours.describe()))
    empty.prepare(shapes, torch.device("cpu"))
    empty.write(0, 0, 6, ours.read(1, 0, 6))
    assert empty.describe() == ours.describe()
    assert torch.equal(empty.read(0, 0, 6), ours.read(1, 0, 6))
    assert shapes[0].num_bytes == 2 * 8 * 2 + 2 * 4 * 4


@given(st.sets(st.integers(0, 12), min_size=1))
def test_runs_of_slots_cover_every_slot_once_and_are_as_few_as_possible(slots: set[int]) -> None:
    runs = Segment(0, 1, tuple(slots)).slot_runs()
    assert [slot for run in runs for slot in range(run.start, run.stop)] == sorted(slots)
    assert len(runs) == sum(slot - 1 not in slots for slot in slots)
