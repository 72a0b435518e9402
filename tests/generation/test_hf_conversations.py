"""Greedy conversations of HFEngine equal those of the native engine, with every kind of end."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, Conversation, Environment, HFEngine, SamplingParams, Turn
from tests.generation.dialogues import GREEDY, PROMPTS, STOPS, check_same, engine_of, exact_model, expected, tool
from tests.models import byte_tokenizer, tiny_model

PAIRS = replace(GREEDY, n=2, ignore_eos=True)


def by_sample(turn: Turn) -> list[int] | None:
    """Answer like `tool`, but otherwise for each sample of a prompt, and up to five times."""
    last = turn.token_ids[-1] + 3 * turn.sample_id
    return None if turn.number > 5 or last % 7 == 0 else [(last + 11 * step) % 128 for step in range(1 + last % 6)]


def both(
    environment: Environment,
    params: SamplingParams = PAIRS,
    *,
    model: Any = None,
    prompts: Any = PROMPTS,
    **settings: Any,
) -> list[Completion]:
    """Return the native engine's completions, after comparing them with those of `HFEngine`."""
    model, tokenizer = model or tiny_model("llama"), settings.pop("tokenizer", None)
    native = engine_of(model, tokenizer=tokenizer).generate(prompts, params, environment=environment, **settings)
    finished: list[Completion] = []
    engine = HFEngine(model, tokenizer=tokenizer, max_slots=4)
    made = engine.generate(prompts, params, environment=environment, on_finished=finished.append, **settings)
    assert [without_logprobs(one) for one in made] == [without_logprobs(one) for one in native]
    for own, other in zip(made, native, strict=True):
        torch.testing.assert_close(torch.tensor(own.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
    assert sorted(finished, key=made.index) == made
    assert engine.stats.generated_tokens == sum(sum(one.model_mask) for one in made)
    return native


def without_logprobs(completion: Completion) -> Completion:
    """Return a completion whose other fields equal those of the same one by another engine."""
    return replace(completion, logprobs=())


def num_turns(completion: Completion) -> int:
    """Return how many turns the model had."""
    mask = (False, *completion.model_mask)
    return sum(not before and after for before, after in pairwise(mask))


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gpt2", None), ("mistral", 6)])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_conversations_equal_those_of_the_reference_loop(family: str, window: int | None, num_slots: int) -> None:
    engine = HFEngine(exact_model(family, window), max_slots=num_slots)
    completions = engine.generate(PROMPTS, GREEDY, environment=tool, conversation=Conversation(max_turns=100))
    check_same(completions, expected(GREEDY, family, window))


@pytest.mark.parametrize(
    "params",
    [
        PAIRS,
        replace(PAIRS, repetition_penalty=1.3),
        replace(PAIRS, max_new_tokens=60, stop_token_ids=tuple(range(100)), min_new_tokens=6),
    ],
    ids=["plain", "penalty", "early stops"],
)
def test_several_samples_of_a_prompt_go_their_own_ways(params: SamplingParams) -> None:
    made = both(by_sample, params)
    assert {num_turns(one) for one in made} > {1, 2}
    assert any(made[i].token_ids != made[i + 1].token_ids for i in range(0, len(made), 2))
    if params.min_new_tokens:  # counted from the response's first token, not from each turn's
        assert all(all(token >= 100 for token in one.token_ids[:5]) for one in made)
        assert any(one.model_mask[i - 1 : i + 2] == (False, True, False) for one in made
                   for i in range(1, len(one.token_ids) - 1))  # fmt: skip


def test_lengths_end_a_turn_or_leave_no_room_for_an_answer() -> None:
    limits = [3, 30, 12, 9, 20]
    made = both(by_sample, token_limits=limits, conversation=Conversation(max_turns=4))
    assert {one.finish_reason for one in made} > {"environment", "length"}
    is_cut = [one.finish_reason == "length" and one.token_ids[-1] in STOPS for one in made]
    assert any(is_cut) and not all(is_cut), "some end before an answer that would leave no room"
    for index, one in enumerate(made):
        assert len(one.token_ids) <= limits[index // 2]


def test_turns_are_cut_and_answered() -> None:
    cut = both(by_sample, conversation=Conversation(max_turns=9, max_turn_tokens=3))
    runs = [len(list(run)) for one in cut for chosen, run in groupby(one.model_mask) if chosen]
    assert max(runs) == 3 and runs.count(3) > 3


def test_no_turn_exceeds_the_models_context() -> None:
    model = tiny_model("gpt2", n_positions=24)  # it has 24 learnt positions
    params = SamplingParams(max_new_tokens=100, temperature=0, stop_token_ids=tuple(range(64)), ignore_eos=True)
    made = both(lambda turn: [5] * 3, params, model=model, prompts=[[*range(3, 20)], [5], [7, 8]])
    assert {one.finish_reason for one in made} == {"length"} or max(num_turns(one) for one in made) > 2
    assert all(len(one.prompt) + len(one.token_ids) <= 24 for one in made)


def test_stop_strings_end_every_turn_on_its_own() -> None:
    model, tokenizer = tiny_model("llama", vocab_size=259), byte_tokenizer()
    answers = {1: tokenizer.encode("a7"), 2: tokenizer.encode("Q!")}
    params = SamplingParams(max_new_tokens=60, temperature=0, n=2, stop_strings=("a", "e", "t", "7", "Q", "\n"))
    made = both(lambda turn: answers.get(turn.number), params, model=model, prompts=PROMPTS[:4], tokenizer=tokenizer)
    assert max(num_turns(one) for one in made) == 3


def test_an_environment_that_fails_or_hangs_ends_its_own_sample() -> None:
    is_over = threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        if turn.sample_id == 2 and turn.number == 2:
            raise ValueError("no such tool")
        if turn.sample_id == 4:
            is_over.wait(20)
        return by_sample(turn)

    made = both(environment, replace(PAIRS, max_new_tokens=60), conversation=Conversation(deadline_s=0.5))
    is_over.set()
    assert [one.sample_id for one in made if one.finish_reason == "failure"] == [2, 4]
    assert "raised ValueError(no such tool) after turn 2" in str(made[2].error)
    assert "did not answer turn 1 within deadline_s=0.5" in str(made[4].error)


def test_every_turn_reads_the_whole_sequence_again() -> None:
    engine = HFEngine(exact_model(), max_slots=1)
    params = SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=tuple(range(128)))  # turns of one token
    (made,) = engine.generate(
        [[9, 8, 7]], params, environment=lambda turn: [5, 6], conversation=Conversation(max_turns=3)
    )
    assert made.model_mask == (True, False, False, True, False, False, True)
    stats = engine.stats
    # Three tokens of the prompt, then three more after each of two turns: 3 + 6 + 9.
    assert (stats.prefill_tokens, stats.generated_tokens, stats.num_steps, stats.row_steps) == (18, 3, 3, 3)


def test_environments_that_cannot_be_asked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HFEngine(tiny_model("llama"))
    with pytest.raises(GenerationError, match="environment=5 cannot be called with a Turn"):
        engine.generate([[5]], GREEDY, environment=5)  # type: ignore[arg-type]
    with pytest.raises(GenerationError, match="bounds a conversation without environment"):
        engine.generate([[5]], GREEDY, conversation=Conversation())
    monkeypatch.setattr("lightning_realloc.generation.hf_engine.tensor_parallel_group", lambda model: object())
    with pytest.raises(GenerationError, match=r"each would ask separately; pass HFEngine\(agree"):
        engine.generate([[5]], GREEDY, environment=tool)
