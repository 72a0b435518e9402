"""What is expected of an unfinished response, from the best evidence to none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.remaining_lengths import RemainingLengths


def test_earlier_responses_to_the_prompt_count_before_siblings_and_those_before_all_others() -> None:
    lengths = RemainingLengths({7: [100, 300, 500]})
    lengths.finish(7, 40)
    lengths.finish(8, 60)
    lengths.finish(9, 90)
    assert lengths.expected(7, 0, max_new_tokens=1000) == 300  # (100 + 300 + 500) / 3
    assert lengths.expected(8, 10, max_new_tokens=1000) == 50
    assert lengths.expected(5, 50, max_new_tokens=1000) == 25  # (60 + 90) / 2 − 50: 40 is over already


def test_only_responses_longer_than_this_one_is_already_count() -> None:
    lengths = RemainingLengths({7: [100, 300, 500]})
    lengths.finish(7, 700)
    assert lengths.expected(7, 100, max_new_tokens=1000) == 300  # (300 + 500) / 2 − 100
    assert lengths.expected(7, 400, max_new_tokens=1000) == 100
    assert lengths.expected(7, 500, max_new_tokens=1000) == 200  # no earlier one was: the sibling of 700


def test_without_evidence_half_of_what_is_left_is_expected() -> None:
    lengths = RemainingLengths()
    assert lengths.expected(0, 0, max_new_tokens=1000) == 500
    lengths.finish(0, 200)
    assert lengths.expected(0, 600, max_new_tokens=1000) == 200
    assert lengths.expected(0, 100, max_new_tokens=150) == 50  # never more than there is room for


@given(
    finished=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=20),
    prompt=st.integers(0, 3),
    num_tokens=st.integers(0, 40),
    max_new_tokens=st.integers(0, 40),
)
def test_what_is_expected_lies_between_nothing_and_what_is_left(
    finished: list[tuple[int, int]], prompt: int, num_tokens: int, max_new_tokens: int
) -> None:
    lengths = RemainingLengths({1: [5, 10]})
    for entry in finished:
        lengths.finish(*entry)
    expected = lengths.expected(prompt, num_tokens, max_new_tokens=max_new_tokens)
    assert 0 <= expected <= max(max_new_tokens - num_tokens, 0)
