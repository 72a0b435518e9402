"""N-gram lookup: tokens that followed the same context, compared with a search through all texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.lookup import (
    NO_TOKEN,
    ORDERS,
    Branch,
    HistoryDrafter,
    NgramDrafter,
    NgramIndex,
    SharedNgramIndex,
)
from tests.generation.markov import target

LONGEST = ORDERS[0]
TOKENS = st.lists(st.integers(0, 3), max_size=10)
TEXTS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3)
"""Texts with the tokens before them. No token occurs more often than a lookup considers."""


def recurrences_in(texts: list[tuple[list[int], list[int]]]) -> NgramIndex:
    recurrences = NgramIndex()
    for before, text in texts:
        recurrences.begin(before[-LONGEST:])
        recurrences.extend(text)
    return recurrences


def followers_of(branch: Branch | None) -> list[int]:
    return [] if branch is None else list(branch.followers)


def found_by_reading(texts: list[tuple[list[int], list[int]]], context: list[int]) -> tuple[int, list[int]]:
    """Return the largest of `ORDERS` with which the end of a context occurs, and the tokens that followed it."""
    for order in ORDERS:
        followers = []
        for before, text in texts:
            whole, first = [*before[-LONGEST:], *text], len(before[-LONGEST:])
            followers += [
                whole[place]
                for place in range(max(first, order), len(whole))
                if whole[place - order : place] == context[-order:]
            ]
        if followers:
            return order, sorted(followers)
    return 0, []


@given(TEXTS, st.lists(st.integers(0, 3), min_size=LONGEST, max_size=LONGEST))
def test_the_longest_known_end_of_a_context_is_found_with_all_its_followers(
    texts: list[tuple[list[int], list[int]]], context: list[int]
) -> None:
    order, branch = recurrences_in(texts).find(context)
    assert (order, followers_of(branch)) == found_by_reading(texts, context)


@given(TEXTS, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_results_kept_for_other_samples_equal_those_of_a_new_search(
    texts: list[tuple[list[int], list[int]]], tries: list[tuple[int, int]]
) -> None:
    shared = SharedNgramIndex()
    for number in range(1, len(texts) + 1):
        shared.add(texts[number - 1][0][-LONGEST:], texts[number - 1][1])
        alone = recurrences_in(texts[:number])
        for last, token in tries:
            context = [9] * (LONGEST - 1) + [last]
            (order, branch), (own_order, own_branch) = shared.find(context), alone.find(context)
            assert (order, followers_of(branch)) == (own_order, followers_of(own_branch))
            if branch is not None and own_branch is not None:
                assert followers_of(branch.after(token)) == followers_of(own_branch.after(token))


def test_the_number_of_kept_contexts_is_bounded() -> None:
    shared = SharedNgramIndex()
    shared.add([], list(range(200)))
    for last in range(200):
        order, branch = shared.find([999] * (LONGEST - 1) + [last])
        assert (order, followers_of(branch)) == ((1, [last + 1]) if last < 199 else (0, []))
    assert len(shared._found) <= 64


@given(st.lists(TOKENS, max_size=3))
def test_a_text_added_in_pieces_is_one_text(bits: list[list[int]]) -> None:
    whole, by_bits = NgramIndex(), NgramIndex()
    whole.extend([token for bit in bits for token in bit])
    for bit in bits:
        by_bits.extend(bit)
    assert by_bits.num_tokens == sum(map(len, bits))
    end = [NO_TOKEN] * LONGEST + [token for bit in bits for token in bit]
    (order, branch), (whole_order, whole_branch) = by_bits.find(end[-LONGEST:]), whole.find(end[-LONGEST:])
    assert (order, followers_of(branch)) == (whole_order, followers_of(whole_branch))


@given(st.lists(TOKENS, max_size=4), st.integers(0, 3), st.integers(0, 3))
def test_a_branch_after_a_token_equals_a_search_with_that_token_appended(
    bare: list[list[int]], last: int, token: int
) -> None:
    texts: list[tuple[list[int], list[int]]] = [([], text) for text in bare]
    context = [9] * (LONGEST - 1) + [last]
    _, branch = recurrences_in(texts).find(context)
    order, followers = found_by_reading(texts, [*context[1:], token])
    assert followers_of(branch and branch.after(token)) == (followers if order == 2 else [])


def test_common_tokens_use_their_latest_places() -> None:
    recurrences = NgramIndex()
    recurrences.extend([7, 1] * 50 + [7, 2] * 50 + [7])
    _, branch = recurrences.find([0] * 7 + [7])
    assert followers_of(branch) == [2] * 32


def test_responses_are_kept_for_other_ranks_only_if_there_are_listeners() -> None:
    drafters = [HistoryDrafter(), HistoryDrafter()]
    drafters[1].has_listeners = True
    for drafter in drafters:
        engine = GenerationEngine(target(), speculation=Speculation(), drafter=drafter)
        done = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, n=2))
    assert drafters[0].news() == []
    key = ModelInput((5, 6, 7)).prompt_key
    assert sorted(drafters[1].news()) == sorted((key, completion.token_ids) for completion in done)
    assert drafters[1].news() == []


def test_history_knows_whether_most_prompts_were_seen_before() -> None:
    drafter = HistoryDrafter()
    drafter.receive_news([(ModelInput((5, 6, 7)).prompt_key, (1, 2)), (ModelInput((5, 6)).prompt_key, (3,))])

    def samples(*prompts: tuple[int, ...]) -> list[Sample]:
        return [
            Sample(2 * i + j, i, ModelInput(prompt), 8, key=0) for i, prompt in enumerate(prompts) for j in range(2)
        ]

    assert drafter.has_seen_prompts(samples((5, 6, 7), (5, 6)))
    assert drafter.has_seen_prompts(samples((5, 6, 7), (5, 6), (5,)))
    assert not drafter.has_seen_prompts(samples((5, 6, 7), (5,)))
    assert not drafter.has_seen_prompts([])
    assert not NgramDrafter().has_seen_prompts(samples((5, 6, 7)))
