"""Conversations with an environment equal those of a reference loop without cache, batch or threads."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Conversation, SamplingParams, Speculation, Turn
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.engine import GenerationEngine
from lightning_realloc.generation.speculative.draft_model import ModelDrafter
from tests.generation.dialogues import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    STOPS,
    check_same,
    engine_of,
    exact_model,
    expected,
    tell,
    tool,
)
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model

ENDLESS = Conversation(max_turns=100)


def slow_tool(turn: Turn) -> list[int] | None:
    """Answer like `tool`, after up to four milliseconds: a few forwards."""
    time.sleep(random.Random(hash(turn.token_ids)).random() * 0.004)
    return tool(turn)


def test_the_reference_loop_covers_every_kind_of_turn() -> None:
    told = expected(SAMPLED)
    assert {one.finish_reason for one in told} == {"environment", "length"}
    assert sum(any(one.model_mask[i] < one.model_mask[i + 1] for i in range(len(one.model_mask) - 1))
               for one in told) > 4  # fmt: skip


@pytest.mark.parametrize(
    ("params", "num_slots", "speculates"),
    matrix(
        itertools.product([GREEDY, SAMPLED], [1, 3, 16], [False, True]),
        (GREEDY, 1, True),
        (GREEDY, 3, False),
        (SAMPLED, 3, True),
        (SAMPLED, 16, False),
    ),
)
def test_conversations_equal_those_of_the_reference_loop(
    params: SamplingParams, num_slots: int, speculates: bool
) -> None:
    engine = engine_of(exact_model(), speculates=speculates, max_slots=num_slots)
    for _ in range(1 + speculates):  # the second time with a history
        check_same(engine.generate(PROMPTS, params, environment=slow_tool, conversation=ENDLESS), expected(params))
    assert bool(engine.stats.accepted_tokens) == speculates


@pytest.mark.parametrize("speculates", [False, True])
def test_a_turn_of_too_many_tokens_is_cut_and_answered(speculates: bool) -> None:
    params, model = replace(SAMPLED, n=1, stop_token_ids=STOPS[::2]), exact_model()
    told = [tell(model, prompt, params, index, tool, max_turn_tokens=5) for index, prompt in enumerate(PROMPTS)]
    turns = [len(list(run)) for one in told for chosen, run in groupby(one.model_mask) if chosen]
    assert max(turns) == 5 > min(turns) and sum(length == 5 for length in turns) > 3
    engine, bounds = engine_of(model, speculates=speculates), Conversation(max_turns=100, max_turn_tokens=5)
    for _ in range(1 + speculates):  # the second time with a history
        check_same(engine.generate(PROMPTS, params, environment=tool, conversation=bounds), told)


@pytest.mark.parametrize(("family", "window"), [("mistral", 6), ("gpt2", None), ("qwen3", None)])
def test_long_answers_are_prefilled_in_chunks_in_every_family(family: str, window: int | None) -> None:
    engine = engine_of(exact_model(family, window), max_slots=4, max_prefill_tokens=3)
    completions = engine.generate(PROMPTS, SAMPLED, environment=slow_tool, conversation=ENDLESS)
    check_same(completions, expected(SAMPLED, family, window))


def test_a_draft_model_follows_conversations_through_their_slots() -> None:
    model = exact_model()
    engine = GenerationEngine(
        model, speculation=Speculation(num_draft_tokens=3), drafter=ModelDrafter(model, model), max_slots=3
    )
    long_answers = {turn: [9 + turn] * 20 for turn in range(1, 3)}

    def long_tool(turn: Turn) -> list[int] | None:
        time.sleep(0.002)
        return long_answers.get(turn.number)

    params = SamplingParams(max_new_tokens=90, n=2, stop_token_ids=STOPS)
    completions = engine.generate(PROMPTS, params, environment=long_tool)
    plain = engine_of(model, max_slots=3).generate(PROMPTS, params, environment=long_tool)
    assert [one.token_ids for one in completions] == [one.token_ids for one in plain]
    # The draft model is the target: all drafts are accepted while both hold the same tokens in their slots.
    assert engine.stats.accepted_tokens == engine.stats.verified_tokens > 100


def test_without_an_environment_the_model_mask_is_true_everywhere() -> None:
    for completion in engine_of(exact_model()).generate(PROMPTS, SAMPLED):
        assert completion.model_mask == (True,) * len(completion.token_ids)
        assert completion.prompt == PROMPTS[completion.prompt_index] and completion.error is None


def test_earlier_turns_of_a_conversation_are_not_prefilled_again() -> None:
    engine = engine_of(exact_model())
    (completion,) = engine.generate(PROMPTS[:1], GREEDY, environment=tool)
    told = expected(GREEDY)[0]
    answered = told.model_mask.count(False)
    assert answered > 0 and completion.token_ids == tuple(told.token_ids)
    # The prompt without its last token, which its row reads; for each answer as many tokens as it has.
    assert engine.stats.prefill_tokens == len(PROMPTS[0]) - 1 + answered
    assert engine.stats.num_steps == engine.stats.generated_tokens == told.model_mask.count(True)


def test_seconds_without_a_sample_to_generate_are_counted() -> None:
    def answer(turn: Turn) -> list[int] | None:
        time.sleep(0.05)
        return [1, 2] if turn.number < 3 else None

    engine = engine_of(exact_model())
    with engine.sharing():
        began = time.monotonic()
        engine.generate(PROMPTS[:1], SAMPLED, environment=answer, conversation=ENDLESS)
        took_s = time.monotonic() - began
        assert engine.stats.waited_s >= 0.09  # two or three answers, while nothing else runs
        waits = engine.waits.waits()
        assert waits is not None and waits.idle_s == pytest.approx(engine.stats.waited_s)
        sample_s = sum(waits.samples.means) * waits.samples.bin_s
        assert 0.8 * waits.idle_s <= sample_s <= 2.01 * took_s  # of two samples
        engine.generate(PROMPTS[:1], SAMPLED)
        assert engine.stats.waited_s == 0.0
    with engine.sharing():
        engine.generate(PROMPTS[:1], SAMPLED)
        assert engine.waits.waits() is None


@pytest.mark.parametrize("max_cache_bytes", [None, 200_000])
@pytest.mark.parametrize("num_slots", [1, 16])
def test_a_slow_tool_does_not_stop_the_batch(num_slots: int, max_cache_bytes: int | None) -> None:
    released = threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        if turn.sample_id:
            released.set()
            return None
        return [5, 6] if released.wait(timeout=10) else None

    params = SamplingParams(max_new_tokens=40, stop_token_ids=tuple(range(100)))
    # Stops are so common that the first turn ends within a few tokens; its answer waits for the other sample's turn.
    first, second = engine_of(exact_model(), max_slots=num_slots, max_cache_bytes=max_cache_bytes).generate(
        [[5], [6, 6]], params, environment=environment, conversation=Conversation(max_turns=2), sample_ids=[0, 1]
    )
    assert (first.finish_reason, second.finish_reason) == ("max_turns", "environment")
    assert first.model_mask.count(False) == 2


def test_the_environment_is_not_called_after_the_last_turn() -> None:
    asked: list[int] = []

    def environment(turn: Turn) -> list[int]:
        asked.append(turn.number)
        return [5]

    params = SamplingParams(max_new_tokens=100, stop_token_ids=tuple(range(64)))
    for most in (1, 3):
        asked.clear()
        (completion,) = engine_of(exact_model()).generate(
            [[9, 8]], params, environment=environment, conversation=Conversation(max_turns=most)
        )
        assert (completion.finish_reason, completion.model_mask.count(False)) == ("max_turns", most - 1)
        assert asked == list(range(1, most))


def test_an_answer_that_leaves_no_room_for_a_turn_ends_the_response() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=tuple(range(128)))
    for length, kept in ((10, 12), (11, 1)):  # after the first turn's one token: room for one more, and for none
        (completion,) = engine_of(exact_model()).generate([[9]], params, environment=lambda turn, n=length: [5] * n)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", kept)


def test_a_stop_string_of_an_earlier_turn_does_not_end_the_next() -> None:
    tokenizer = byte_tokenizer()
    rule = StopRule(token_ids=frozenset(), strings=("a", "bq"), tokenizer=tokenizer)
    sample = Sample(0, 0, ModelInput(tuple(tokenizer.encode("?"))), 50, sample_key(0, 0))

    def ends(text: str) -> list[bool]:
        over = []
        for token in tokenizer.encode(text):
            sample.append(token, -1.0)
            over.append(rule.update(sample))
        return over

    assert ends("xa") == [False, True]
    sample.finish_reason = None
    sample.extend(ModelInput(tuple(tokenizer.encode("bbab"))))
    assert ends("qxbq") == [False, False, False, True]  # "bq" across the end of the answer does not count


# ---- environments that fail
def raises(turn: Turn) -> list[int]:
    raise ValueError("no such tool")


def leaves(turn: Turn) -> list[int]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (raises, "the environment raised ValueError(no such tool) after turn 1; catch it there and return what"),
        (leaves, "the environment raised SystemExit(3) after turn 1"),
        (lambda turn: [5, 128], "holds token ids from 5 to 128, the model's vocabulary has 128; use the model's own"),
        (lambda turn: [-1], "holds token ids from -1 to -1"),
        (lambda turn: "text", "the environment's answer to turn 1 is 'text'; return a list of token ids, such as"),
        (lambda turn: 5, "answer to turn 1 is 5; return a list"),
        (lambda turn: [], "holds no tokens; return None to end the response"),
    ],
)
def test_a_failing_environment_ends_only_its_own_sample(fails: Callable[[Turn], Any], message: str) -> None:
    def environment(turn: Turn) -> Any:
        return fails(turn) if turn.sample_id == 4 else tool(turn)

    completions = engine_of(exact_model(), max_slots=3).generate(PROMPTS, SAMPLED, environment=environment)
    told = expected(SAMPLED)
    failed = completions.pop(4)
    assert failed.finish_reason == "failure" and failed.error is not None and message in failed.error
    ended = [token in STOPS for token in told[4].token_ids].index(True) + 1
    assert failed.token_ids == tuple(told[4].token_ids[:ended])
    check_same(completions, [*told[:4], *told[5:]])


@pytest.mark.parametrize("num_slots", [1, 16])
def test_a_tool_that_hangs_ends_its_sample_at_the_deadline(num_slots: int) -> None:
    is_over, came_back = threading.Event(), threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        if turn.sample_id != 4:
            return tool(turn)
        is_over.wait(10)
        came_back.set()
        return [5]

    completions = engine_of(exact_model(), max_slots=num_slots).generate(
        PROMPTS, SAMPLED, environment=environment, conversation=Conversation(deadline_s=1.0)
    )
    assert not came_back.is_set()  # the call did not wait for it
    is_over.set()
    failed = completions.pop(4)
    assert failed.finish_reason == "failure" and "did not answer turn 1 within deadline_s=1.0" in str(failed.error)
    told = expected(SAMPLED)
    check_same(completions, [*told[:4], *told[5:]])


def test_an_answer_after_its_deadline_is_ignored() -> None:
    others_turn, came_late = threading.Event(), threading.Event()
    seconds = [0.0]

    def environment(turn: Turn) -> list[int]:
        if turn.sample_id == 0:
            seconds[0] = 2.0
            others_turn.wait(10)
            came_late.set()
        elif turn.number == 1:
            others_turn.set()
            came_late.wait(10)
        return [5]

    params = SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(128)))
    settings = Conversation(max_turns=3, deadline_s=1.0)
    # With one slot the second sample begins while the first one waits.
    late, other = engine_of(exact_model(), max_slots=1, wall_clock=lambda: seconds[0]).generate(
        [[9]] * 2, params, environment=environment, conversation=settings
    )
    assert came_late.is_set() and (late.finish_reason, len(late.token_ids)) == ("failure", 1)
    assert (other.finish_reason, other.model_mask) == ("max_turns", (True, False, True, False, True))


def test_a_rank_whose_samples_all_wait_stays_in_lockstep_with_the_others() -> None:
    asked: list[bool] = []
    waits, released = threading.Event(), threading.Event()

    def lockstep(has_work: bool) -> bool:
        asked.append(has_work)
        if waits.is_set() and len(asked) > 20:
            released.set()
        return has_work

    def environment(turn: Turn) -> list[int] | None:
        waits.set()
        return [5] if released.wait(timeout=10) else None

    params = SamplingParams(max_new_tokens=40, stop_token_ids=tuple(range(100)))
    settings: Any = {"environment": environment, "conversation": Conversation(max_turns=2)}
    engine = engine_of(exact_model(), lockstep=lockstep)
    completions = engine.generate([[5]], params, **settings)
    assert len(asked) > 20 and asked == [True] * (len(asked) - 1) + [False]
    assert engine.stats.num_steps == len(asked) - 1 > engine.stats.generated_tokens
    assert completions == engine_of(exact_model()).generate([[5]], params, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"deadline_s": 0.0}, "deadline_s=0.0 must be positive; use math.inf to wait for ever"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Conversation(**settings)


def test_tensor_parallel_ranks_without_agree_are_refused_an_adaptive_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr("lightning_realloc.generation.engine.tensor_parallel_group", lambda model: object())
    with pytest.raises(GenerationError, match=r"decide alike how much to draft.* pass GenerationEngine\(agree=...\)"):
        GenerationEngine(model, speculation=Speculation())
    GenerationEngine(model, speculation=Speculation(num_draft_tokens=4))
    GenerationEngine(model, speculation=Speculation(), agree=list)
