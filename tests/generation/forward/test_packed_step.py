"""Layouts of ragged tokens for attention: nothing is lost, and no other width is cheaper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.generation.cache.kv_cache import Places, SlotCache
from lightning_realloc.generation.forward import packed_step
from lightning_realloc.generation.forward.cached_attention import Scores, StoredLayer, decode
from lightning_realloc.generation.forward.packed_step import PackedStep, PaddedRows, best_width

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def cost_of(counts: list[int], width: int, call_in_tokens: float) -> float:
    padding = sum(width - min(count, width) for count in counts)
    return padding + call_in_tokens * sum(count > width for count in counts)


@given(counts=COUNTS, call_in_tokens=st.floats(0.0, 40.0))
def test_no_width_is_cheaper_than_the_best_one(counts: list[int], call_in_tokens: float) -> None:
    best = cost_of(counts, best_width(counts, call_in_tokens), call_in_tokens)
    if best > call_in_tokens:  # padding that costs less than one call is not optimized
        assert best <= min(cost_of(counts, width, call_in_tokens) for width in range(1, 10)) + 1e-9


def test_the_grid_is_as_wide_as_the_longest_row_if_padding_is_free() -> None:
    assert best_width([9, 1, 1, 1], None) == 9
    assert best_width([9, 1, 1, 1, 1, 1, 1, 1], 4.0) == 1


@settings(max_examples=30)
@given(counts=COUNTS, call_in_tokens=st.sampled_from([0.0, 3.0, 1e9]))
def test_tokens_come_back_in_their_order(counts: list[int], call_in_tokens: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(packed_step._CALL_IN_TOKENS, "cpu", call_in_tokens)
        grid = PaddedRows(counts, torch.device("cpu"))
    tokens = torch.arange(1.0, sum(counts) + 1)[:, None]
    laid_out = grid.lay_out(tokens)
    assert torch.equal(grid.tokens_of(laid_out), tokens)
    starts = [sum(counts[:slot]) for slot in range(len(counts))]
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        inside = min(count, grid.width)
        assert torch.equal(grid.as_grid(laid_out)[slot, :inside], tokens[start : start + inside])
        rest = [overhang for overhang in grid.overhangs if overhang.slot == slot]
        assert len(rest) == (count > inside)
        for overhang in rest:
            assert torch.equal(laid_out[overhang.start : overhang.stop], tokens[start + inside : start + count])


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "scores", [Scores(0.5), Scores(0.3, softcap=2.0), Scores(0.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
)
def test_attention_does_not_depend_on_the_number_of_overhangs(scores: Scores, window: int | None) -> None:
    torch.manual_seed(0)
    counts, before = [1, 9, 3, 2, 8], [12, 0, 31, 5, 20]
    lengths = [held + count for held, count in zip(before, counts, strict=True)]
    positions = torch.tensor([held + j for held, count in zip(before, counts, strict=True) for j in range(count)])
    cache = SlotCache()
    cache.make_room(len(counts), 64, longest=64)
    query, key, value = (torch.randn(len(positions), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for stored in cache.layer(0, key, value):
        stored.normal_()
    slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    cached = cache.places(Places((), 0, slots, positions, len(counts), lengths, max(lengths)))
    attended, num_overhangs = [], []
    for call_in_tokens in (1e9, 0.0, 6.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(packed_step._CALL_IN_TOKENS, "cpu", call_in_tokens)
            step = PackedStep(cached, positions, counts, lengths, max(lengths))
        layer = StoredLayer(cached, cached.store(0, key, value), scores, window)
        attended.append(decode(query, layer, step))
        num_overhangs.append(len(step.grid.overhangs))
    assert num_overhangs == [0, 4, 2]
    for others in attended[1:]:
        torch.testing.assert_close(others, attended[0], atol=1e-5, rtol=1e-5)  # softcaps are computed in float32
