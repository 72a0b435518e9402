"""A turn ends at the token that completes a stop string, and at no other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import GenerationEngine, HFEngine, SamplingParams
from lightning_realloc.generation.core.sample import Sample, StopRule
from tests.models import byte_tokenizer, tiny_model


def end_of(rule: StopRule, prompt: int, tokens: Sequence[int]) -> int | None:
    """Return the number of tokens after which the rule ends a response; None: it does not."""
    sample = Sample(0, 0, ModelInput((prompt,)), len(tokens) + 1, key=0)
    for count, token in enumerate(tokens, start=1):
        sample.append(token, 0.0)
        if rule.update(sample):
            return count
    return None


def took(rule: StopRule, prompt: int, tokens: Sequence[int], most: int) -> tuple[int, Sample]:
    """Return the number of tokens that a sample takes at once, and the sample."""
    sample = Sample(0, 0, ModelInput((prompt,)), most, key=0)
    return rule.take(sample, tokens, [float(token) for token in tokens]), sample


@given(st.lists(st.integers(97, 101), min_size=1, max_size=6), st.integers(1, 8), st.sets(st.integers(97, 101)))
@pytest.mark.parametrize("strings", [(), ("bc",)])
def test_tokens_taken_at_once_are_those_taken_one_by_one(
    strings: tuple[str, ...], tokens: list[int], most: int, ends: set[int]
) -> None:
    tokenizer = byte_tokenizer()
    tokens, ends = ([tokenizer.encode(chr(c), add_special_tokens=False)[0] for c in given] for given in (tokens, ends))
    rule = StopRule(token_ids=frozenset(ends), strings=strings, tokenizer=tokenizer)
    count, sample = took(rule, 5, tokens, most)
    alone = Sample(0, 0, ModelInput((5,)), most, key=0)
    for token in tokens:
        alone.append(token, float(token))
        if rule.update(alone):
            break
    assert sample == alone
    assert count == len(alone.token_ids)


@pytest.mark.parametrize(
    ("text", "stop", "least", "end"),
    [
        ("ab..b..b", "ab", 0, 2),
        ("ab..b..b", "ab", 2, 2),  # completed at the minimum length
        ("ab..b..b", "ab", 3, None),  # completed too early, and no later b completes it again
        ("ab..b.ab", "ab", 3, 8),
        ("aaab", "aa", 3, 3),  # begins before the minimum length and ends at it
        ("éa.é", "é", 2, 2),  # two tokens each
        ("éa.é", "é", 3, 6),
    ],
)
def test_a_stop_string_ends_a_turn_if_completed_at_the_minimum_length_or_later(
    text: str, stop: str, least: int, end: int | None
) -> None:
    tokenizer = byte_tokenizer()
    rule = StopRule(token_ids=frozenset(), strings=(stop,), tokenizer=tokenizer, min_new_tokens=least)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert end_of(rule, tokenizer.encode("x", add_special_tokens=False)[0], tokens) == end


def test_a_stop_string_may_end_in_a_space_that_the_tokenizer_strips() -> None:
    words = ["▁one", "▁two", "▁three"]
    spaced = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, "▁one"))
    spaced.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spaced)
    assert tokenizer.decode([1]) == "two"
    rule = StopRule(token_ids=frozenset(), strings=("two ",), tokenizer=tokenizer)
    assert end_of(rule, 0, [0, 1, 2, 0]) == 3


def test_a_stop_string_that_decodes_to_another_text_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    letters = Tokenizer(WordLevel({letter: index for index, letter in enumerate("?abcdefgh")}, "?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spaced = PreTrainedTokenizerFast(tokenizer_object=letters)  # it decodes with a space between tokens
    for tokenizer, warnings in ((spaced, ["'abc' becomes 'a b c'"]), (byte_tokenizer(), [])):
        caplog.clear()
        engine = GenerationEngine(tiny_model("llama", vocab_size=259), tokenizer=tokenizer)
        for _ in range(2):
            engine.generate([[5]], SamplingParams(max_new_tokens=2, stop_strings=("abc", "d")))
        assert [message.split(": ")[1].split(";")[0] for message in caplog.messages] == warnings


def test_stop_tokens_that_the_model_does_not_know_are_refused() -> None:
    model = tiny_model("llama")
    for engine in (GenerationEngine(model), HFEngine(model)):
        with pytest.raises(GenerationError, match=r"stop_token_ids=\[128, -1\] can never occur: .* has 128 tokens"):
            engine.generate([[5]], SamplingParams(stop_token_ids=(128, 7, -1)))


def test_an_end_of_sequence_token_beyond_the_vocabulary_forbids_nothing() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 500]
    params = SamplingParams(max_new_tokens=4, min_new_tokens=4)
    for engine in (GenerationEngine(model), HFEngine(model)):
        assert len(engine.generate([[5]], params)[0].token_ids) == 4


def test_stop_tokens_that_leave_nothing_to_draw_are_refused() -> None:
    params = SamplingParams(min_new_tokens=1, stop_token_ids=tuple(range(128)))
    with pytest.raises(GenerationError, match="min_new_tokens=1 leaves nothing to draw, since all 128 tokens"):
        GenerationEngine(tiny_model("llama")).generate([[5]], params)
