"""Expected lengths of unfinished responses, from earlier responses to the same prompt down to no evidence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.schedule.length_predictor import LengthPredictor


def test_longer_earlier_responses_to_the_same_prompt_decide() -> None:
    lengths = LengthPredictor({7: [100, 300, 500]})
    for _ in range(50):
        lengths.finish(7, 20)
    assert lengths.expected(7, 0, max_new_tokens=1000) == 300  # (100 + 300 + 500) / 3
    assert lengths.expected(7, 100, max_new_tokens=1000) == 300  # (300 + 500) / 2 − 100
    assert lengths.expected(7, 400, max_new_tokens=1000) == 100
    assert lengths.expected(7, 0, max_new_tokens=150) == 150  # never more than there is room for


def test_without_evidence_half_of_the_remaining_tokens_is_expected() -> None:
    lengths = LengthPredictor({7: [100]})
    assert lengths.expected(0, 0, max_new_tokens=1000) == 500
    assert lengths.expected(7, 100, max_new_tokens=1000) == 450


@pytest.mark.parametrize("now", [10, 40, 200])
@pytest.mark.parametrize("mean", [60, 150])
def test_short_responses_that_finish_first_do_not_bias_the_expected_length(mean: int, now: int) -> None:
    rng = random.Random(1)
    truth = [1 + int(rng.expovariate(1 / mean)) for _ in range(4000)]
    lengths = LengthPredictor()
    over = [length for length in truth if length <= now]
    for length in over:
        lengths.finish(0, length)
    lengths.watch(now for length in truth if length > now)
    assert lengths.expected(1, now, max_new_tokens=10_000) == pytest.approx(mean, rel=0.15)
    assert lengths.expected(1, 0, max_new_tokens=10_000) == pytest.approx(mean, rel=0.15)
    assert sum(over) / len(over) < 0.9 * mean


def test_after_all_have_finished_the_mean_remaining_length_is_expected() -> None:
    rng = random.Random(2)
    truth = [1 + int(rng.expovariate(1 / 80)) for _ in range(3000)]
    lengths = LengthPredictor()
    for length in truth:
        lengths.finish(0, length)
    for now in (0, 30, 100, 250):
        longer = [length - now for length in truth if length > now]
        assert lengths.expected(1, now, max_new_tokens=10_000) == pytest.approx(sum(longer) / len(longer), rel=0.15)


def test_responses_cut_at_their_limit_predict_that_others_reach_it() -> None:
    lengths = LengthPredictor()
    for _ in range(16):
        lengths.finish(0, 96, is_cut=True)
    for now in (0, 40, 90):
        assert 0.9 * (96 - now) < lengths.expected(1, now, max_new_tokens=96) <= 96 - now


def test_the_next_generation_starts_with_the_decayed_lengths_of_earlier_ones() -> None:
    lengths, rng = LengthPredictor(), random.Random(3)
    for mean in (40, 40, 160):  # the last one counts as much as all before it
        lengths = lengths.decayed()
        for _ in range(1000):
            lengths.finish(0, 1 + int(rng.expovariate(1 / mean)))
    lengths = lengths.decayed()
    ends, tokens = lengths.evidence
    assert ends == 875  # 500 + 250 + 125
    assert lengths.expected(1, 0, max_new_tokens=10_000) == pytest.approx(tokens / ends, rel=0.1)
    assert 90 < tokens / ends < 125  # (4 × 160 + 3 × 40) / 7 = 109


@given(
    finished=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=20),
    growing=st.lists(st.integers(0, 60), max_size=20),
    prompt=st.integers(0, 3),
    num_tokens=st.integers(0, 40),
    max_new_tokens=st.integers(0, 40),
)
def test_the_expected_length_lies_between_zero_and_the_remaining_tokens(
    finished: list[tuple[int, int]], growing: list[int], prompt: int, num_tokens: int, max_new_tokens: int
) -> None:
    lengths = LengthPredictor({1: [5, 10]})
    for entry in finished:
        lengths.finish(*entry)
    lengths.watch(growing)
    expected = lengths.expected(prompt, num_tokens, max_new_tokens=max_new_tokens)
    assert 0 <= expected <= max(max_new_tokens - num_tokens, 0)
