"""Rollouts that stop at a budget and resume equal the same rollouts in one piece."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, Conversation, GenerationEngine, SamplingParams, Turn
from lightning_realloc.generation.loop.environment import EVENT_LOOP
from tests.generation.dialogues import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    check_same,
    engine_of,
    exact_model,
    expected,
    tool,
)
from tests.matrices import crossed
from tests.models import byte_tokenizer, tiny_model

FREE = SamplingParams(max_new_tokens=24, n=2, seed=3, ignore_eos=True)
"""Nothing ends a response but its length."""


def in_pieces(engine: GenerationEngine, params: SamplingParams, budget: int, **settings: Any) -> list[Completion]:
    """Return all completions, generated in as many calls as the budget requires."""
    completions = engine.generate(PROMPTS, params, token_budget=budget, **settings)
    num_calls = 1
    while unfinished := [one for one in completions if one.finish_reason == "unfinished"]:
        resumed = engine.generate([], params, token_budget=budget, resume=unfinished, **settings)
        assert [one.sample_id for one in resumed] == [one.sample_id for one in unfinished]
        known = {one.sample_id: one for one in resumed}
        completions = [known.get(one.sample_id, one) for one in completions]
        num_calls += 1
    assert num_calls > 2, "the budget stopped nothing"
    return completions


def bare(completions: Sequence[Completion]) -> list[Completion]:
    """Return completions without logprobs, whose last bits depend on the batch, and without versions."""
    return [replace(one, logprobs=(), versions=()) for one in completions]


@pytest.mark.parametrize(("num_slots", "speculates"), crossed([16, 2, 5], [False, True]))
def test_rollouts_in_pieces_equal_those_in_one_piece(num_slots: int, speculates: bool) -> None:
    whole = engine_of(exact_model()).generate(PROMPTS, FREE)
    engine = engine_of(exact_model(), speculates=speculates, max_slots=num_slots, max_prefill_tokens=9)
    pieces = in_pieces(engine, FREE, 50)
    assert bare(pieces) == bare(whole)
    for piece, one in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.tensor(piece.logprobs), torch.tensor(one.logprobs), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("params", "num_slots", "speculates"), crossed([GREEDY, SAMPLED], [16, 2], [False, True]))
def test_conversations_in_pieces_equal_those_in_one_piece(
    params: SamplingParams, num_slots: int, speculates: bool
) -> None:
    engine = engine_of(exact_model(), speculates=speculates, max_slots=num_slots)
    # Budgets this small end calls while environments run, and between an answer and the next token.
    for budget in (3, 8):
        check_same(in_pieces(engine, params, budget, environment=tool), expected(params))


def test_a_token_budget_ends_the_call_after_the_step_that_spends_it() -> None:
    engine = engine_of(exact_model())
    completions = engine.generate([[5], [6], [7]], replace(FREE, n=1), token_budget=7)
    # Three tokens a step: 3, 6, 9.
    assert engine.stats.num_steps == 3 and engine.stats.generated_tokens == 9
    assert [(len(one.token_ids), one.finish_reason) for one in completions] == [(3, "unfinished")] * 3


def test_a_spent_budget_ends_a_call_only_once_it_may_stop() -> None:
    engine = engine_of(exact_model())
    params = replace(FREE, n=1)
    finished: list[int] = []
    completions = engine.generate(
        [[5], [6], [7]], params, token_budget=7, token_limits=[4, 6, 24],
        on_finished=lambda one: finished.append(one.sample_id), may_stop=lambda: 1 in finished,
    )  # fmt: skip
    # The budget is spent after three steps; the second sample ends with the sixth.
    assert [(len(one.token_ids), one.finish_reason) for one in completions] == [
        (4, "length"), (6, "length"), (6, "unfinished"),
    ]  # fmt: skip
    assert finished == [0, 1, 2]
    with counted_forwards(exact_model()) as sizes:
        engine = engine_of(exact_model(), wall_clock=lambda: float(len(sizes)))
        completions = engine.generate([[5]], params, seconds_budget=2.5, may_stop=lambda: len(sizes) >= 8)
    assert len(completions[0].token_ids) == 8


def test_samples_without_a_slot_are_unfinished_and_empty() -> None:
    engine = engine_of(exact_model(), max_slots=1)
    first, second = engine.generate([[5]], FREE, token_budget=2)
    assert (len(first.token_ids), second.token_ids, second.finish_reason) == (2, (), "unfinished")
    whole = engine_of(exact_model()).generate([[5]], FREE)
    assert bare(engine.generate([], FREE, resume=[second, first])) == bare(whole[::-1])


@contextmanager
def counted_forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield a list that grows by the number of tokens of each forward."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        hook.remove()


def test_a_budget_of_seconds_is_measured_by_the_wall_clock() -> None:
    with counted_forwards(exact_model()) as sizes:
        engine = engine_of(exact_model(), wall_clock=lambda: float(len(sizes)))  # a second a forward
        completions = engine.generate([[5], [6]], replace(FREE, n=1), seconds_budget=4.5)
    assert [len(one.token_ids) for one in completions] == [5, 5]


def test_a_budget_of_seconds_does_not_wait_for_a_tool() -> None:
    released = threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        released.wait(30)
        return None

    params = SamplingParams(max_new_tokens=24, stop_token_ids=tuple(range(128)))
    engine = engine_of(exact_model())
    (waiting,) = engine.generate([[5]], params, environment=environment, seconds_budget=0.1)
    assert (waiting.finish_reason, len(waiting.token_ids)) == ("unfinished", 1)
    released.set()
    asked: list[Turn] = []

    def answers(turn: Turn) -> list[int]:
        asked.append(turn)
        return [7, 8]

    (over,) = engine.generate([], params, resume=[waiting], environment=answers, conversation=Conversation(max_turns=2))
    assert over.token_ids[:3] == (*waiting.token_ids, 7, 8) and len(over.token_ids) == 4
    assert [(turn.number, turn.token_ids) for turn in asked] == [(1, waiting.token_ids)]
    (ended,) = engine.generate([], params, resume=[waiting])  # without an environment the turn is the response
    assert (ended.finish_reason, ended.token_ids) == ("stop", waiting.token_ids)


def test_an_answer_that_arrives_during_the_last_step_is_kept() -> None:
    model = exact_model()
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    ends, goes_on = (one.token_ids for one in engine_of(model).generate([[5], [6]], greedy))
    params = replace(greedy, stop_token_ids=ends[:1])
    assert ends[0] not in goes_on
    begun, asked = threading.Event(), threading.Event()
    num_forwards = 0

    def environment(turn: Turn) -> list[int]:
        begun.set()
        asked.wait(10)
        return [7, 8]

    def answer_now(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 2:  # the first one ended the turn
            assert begun.wait(10)
            asked.set()
            EVENT_LOOP.submit(asyncio.sleep(0.1)).result(10)  # in which the answer reaches the queue

    hook = model.register_forward_pre_hook(answer_now)
    try:
        engine = engine_of(model)
        kept, other = engine.generate([[5], [6]], params, environment=environment, token_budget=3)
    finally:
        hook.remove()
    # One token each; then one of the other sample, while the environment answers.
    assert (kept.token_ids, kept.model_mask) == ((ends[0], 7, 8), (True, False, False))
    assert (kept.finish_reason, other.token_ids) == ("unfinished", goes_on[:2])


def test_resumed_responses_run_together_with_new_prompts() -> None:
    engine = engine_of(exact_model(), max_slots=3)
    started = engine.generate(PROMPTS[:2], FREE, token_budget=20)
    mixed = engine.generate(PROMPTS[2:], FREE, resume=started)
    assert [one.sample_id for one in mixed] == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert [one.prompt_index for one in mixed] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    whole = engine_of(exact_model()).generate(PROMPTS, FREE)
    assert [one.token_ids for one in mixed] == [one.token_ids for one in (*whole[4:], *whole[:4])]
    limited = engine.generate(PROMPTS[2:3], FREE, resume=started[:1], token_limits=[3, 22])
    assert [len(one.token_ids) for one in limited] == [3, 3, 22]


def test_an_environment_receives_the_original_prompt_of_a_resumed_response() -> None:
    engine, heard = engine_of(exact_model()), []

    def environment(turn: Turn) -> list[int] | None:
        heard.append((turn.sample_id, turn.prompt_index, turn.prompt))
        return None

    first = engine.generate(PROMPTS[:4], SAMPLED, token_budget=3, environment=environment)
    unfinished = [one for one in first if one.finish_reason == "unfinished"]
    done = engine.generate(PROMPTS[4:5], SAMPLED, resume=unfinished[::-1], environment=environment)
    assert {one.prompt_index for one in done[SAMPLED.n :]} == {one.prompt_index for one in unfinished}
    begun = {one.sample_id: (one.prompt_index, one.prompt) for one in (*first, *done)}
    assert {sample_id for sample_id, *_ in heard} & {one.sample_id for one in unfinished}
    assert all((prompt_index, prompt) == begun[sample_id] for sample_id, prompt_index, prompt in heard)


def test_every_token_has_the_version_of_the_weights_that_generated_it() -> None:
    model = tiny_model("llama").double()
    engine = engine_of(model)
    params = replace(FREE, n=1)
    (begun,) = engine.generate([PROMPTS[0]], params, token_budget=5)
    assert begun.versions == (0,) * 5
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_model("llama", seed=1).parameters(), strict=True):
            parameter.copy_(other)
    engine.weights_updated()
    (further,) = engine.generate([], params, resume=[begun], token_budget=7)
    engine.weights_updated(version=40)
    (whole,) = engine.generate([], params, resume=[further])
    assert whole.versions == (0,) * 5 + (1,) * 7 + (40,) * 12
    assert whole.token_ids[:5] == begun.token_ids and whole.logprobs[:5] == begun.logprobs
    # Tokens after the update are of the new weights, which have also read the old tokens.
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0], *whole.token_ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(whole.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(whole.logprobs[5:]), logprobs[5:].float(), atol=1e-6, rtol=0)
    assert (torch.tensor(whole.logprobs[:5]) - logprobs[:5].float()).abs().max() > 1e-3


def test_a_response_resumed_with_a_limit_below_its_length_is_finished() -> None:
    engine = engine_of(exact_model())
    (begun, _) = engine.generate([[5]], FREE, token_budget=12)
    (over,) = engine.generate([], replace(FREE, max_new_tokens=4), resume=[begun])
    assert (over.finish_reason, over.token_ids) == ("length", begun.token_ids)
    assert engine.stats.num_steps == 0


def test_a_rank_that_spent_its_budget_stays_in_lockstep_with_the_others() -> None:
    asked: list[bool] = []

    def lockstep(has_work: bool) -> bool:
        asked.append(has_work)
        return len(asked) <= 9

    engine = engine_of(exact_model(), lockstep=lockstep)
    (one,) = engine.generate([[5]], replace(FREE, n=1), token_budget=4)
    assert (len(one.token_ids), engine.stats.num_steps, engine.stats.generated_tokens) == (4, 9, 4)
    assert asked == [True] * 4 + [False] * 6


# ---- prompts in chunks
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 6), ("gpt2", None)])
def test_prompts_prefilled_in_chunks_get_the_same_responses(family: str, window: int | None) -> None:
    model = exact_model(family, window)
    prompts = [[(7 * place + salt) % 128 for place in range(length)] for salt, length in enumerate((60, 3, 41, 1, 90))]
    whole = engine_of(model).generate(prompts, FREE)
    with counted_forwards(model) as sizes:
        parts = engine_of(model, max_slots=3, max_prefill_tokens=7).generate(prompts, FREE)
    assert bare(parts) == bare(whole)
    assert max(sizes) <= 7 + 3


# ---- errors and warnings
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": 0}, "token_budget=0 must be at least 1; leave it out to finish every response"),
        ({"seconds_budget": 0.0}, "seconds_budget=0.0 must be positive; leave it out"),
        ({"seconds_budget": float("nan")}, "seconds_budget=nan must be positive"),
        ({"token_budget": "100"}, "token_budget='100' must be a number or None"),
        ({"seconds_budget": True}, "seconds_budget=True must be a number or None"),
    ],
)
def test_budgets_that_allow_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        engine_of(exact_model()).generate([[5]], FREE, **settings)


def test_completions_that_cannot_be_resumed_are_refused() -> None:
    engine = engine_of(exact_model())
    begun = engine.generate([[5]], FREE, token_budget=4)
    (over, _) = engine.generate([[5]], FREE)
    for given, ids, message in (
        ([begun[1], over], None, r"resume\[1\], sample 0, is finished \('length'\); resume only those whose"),
        ([begun[0], begun[0]], None, r"resume holds the sample ids \[0\] twice, or they are"),
        ([begun[1]], [1, 2], r"sample ids \[1\] twice, .* give sample_ids that were not used before"),
    ):
        with pytest.raises(GenerationError, match=message):
            engine.generate([[6]], FREE, resume=given, sample_ids=ids)
    with pytest.raises(GenerationError, match="got 1 for 1 prompts and 2 resumed completions"):
        engine.generate([[6]], FREE, resume=begun, token_limits=[5])


def test_a_warning_counts_responses_with_room_for_fewer_tokens_than_requested(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine_of(exact_model()).generate([[5] * 100, [6] * 110, [7] * 104], FREE)
        assert "2 of 6 samples have room for fewer than their max_new_tokens: the model's max_posi" in caplog.text
        assert "max_position_embeddings of 128 ends them earlier" in caplog.text and len(caplog.records) == 1
        engine_of(exact_model(), max_length=20).generate([[5]], FREE)
        assert "2 of 2 samples" in caplog.text and "the engine's max_length of 20 ends them" in caplog.text
        caplog.clear()
        engine_of(exact_model()).generate([[5] * 110], FREE, token_limits=[18])
        assert not caplog.records


def test_stop_strings_that_no_token_can_spell_are_refused() -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(("yes", "no", "end", "<unk>"))}, "<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    engine = GenerationEngine(exact_model(), tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=2, stop_strings=("yes no", "End"))
    with pytest.raises(GenerationError, match=r"stop_strings \['End'\] can never occur: no token .* \['E'\]; spell"):
        engine.generate([[1]], params)
    bytes_ = GenerationEngine(exact_model(), tokenizer=byte_tokenizer())
    bytes_.generate([[1]], replace(params, stop_strings=("✓",)))  # made of three tokens
