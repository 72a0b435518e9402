"""Decoding steps of a generation with continuous batching: every token once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.tuning.shapes.decoding import DecodeSegment, count_step_shapes, plan_decoding, sample_lengths


def test_equal_lengths_decode_together_with_half_a_response_as_mean_context() -> None:
    stretches = plan_decoding((9,), 10, 4, 8)  # the prompt's own pass yields the first token
    assert sum(s.steps for s in stretches) == 8
    assert all(s.sequences == 4 for s in stretches)
    assert sum(s.steps * s.context for s in stretches) / 8 == pytest.approx(10 + 8 / 2)


def test_more_sequences_than_slots_take_turns() -> None:
    assert sum(s.steps for s in plan_decoding((9,), 10, 8, 4)) == 2 * 8


def test_a_freed_slot_is_filled_at_once() -> None:
    # One slot decodes the long response in 100 steps; meanwhile the other decodes all short ones in 10 steps each.
    lengths = (11,) * 9 + (101,)
    assert sample_lengths(lengths, 10).count(101) == 1
    stretches = plan_decoding(lengths, 1, 10, 2)
    total = sum(s.steps for s in stretches)
    assert 100 <= total <= 100 + 9 * 10 / 2
    assert stretches[0].sequences == 2


def test_the_longest_response_is_always_among_the_samples() -> None:
    assert sample_lengths((1, 2, 3, 50), 1) == (50,)
    assert sorted(sample_lengths((1, 2, 3, 50), 2)) == [2, 50]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple),
    count=st.integers(1, 40),
    slots=st.integers(1, 16),
)
def test_every_token_is_decoded_once(lengths: tuple[int, ...], count: int, slots: int) -> None:
    stretches = plan_decoding(lengths, 5, count, slots)
    tokens = sum(length - 1 for length in sample_lengths(lengths, count))
    assert sum(s.steps * s.sequences for s in stretches) == pytest.approx(tokens)
    assert all(s.sequences <= slots + 1e-9 for s in stretches)
    assert all(5 <= s.context <= s.longest + 1e-9 <= 5 + max(lengths) + 1e-9 for s in stretches)


def test_step_shapes_grow_with_octaves_of_rows_and_of_lengths() -> None:
    def shapes(*sizes: tuple[float, float]) -> int:
        return count_step_shapes(DecodeSegment(1, rows, length, length) for rows, length in sizes)

    assert shapes() == 0
    assert shapes((64, 200), (63, 210)) == 1
    assert shapes((64, 200), (64, 400), (64, 800)) == 3
    assert shapes((64, 200), (32, 200), (0.5, 200)) == 3
