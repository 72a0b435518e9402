"""vLLM itself with budgets: responses in pieces equal those in one piece, whatever cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.generation import (
    Completion,
    Conversation,
    GenerationEngine,
    SamplingParams,
    Turn,
    VLLMEngine,
    VLLMOptions,
)
from tests.generation.test_engine import draw_prompts
from tests.generation.vllm.test_real_vllm import killed_while_it_generates, recomputed
from tests.models import byte_tokenizer, tiny_model
from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
GREEDY = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model with heads of a size that vLLM has."""
    return tiny_model("llama", vocab_size=259, hidden_size=128)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VLLMEngine]:
    """One vLLM for all tests, which runs fewer samples at a time than they ask for."""
    options = VLLMOptions(python=vllm_python(), restarts=1)
    made = VLLMEngine(model, tokenizer=byte_tokenizer(), max_slots=4, max_cache_bytes=1 << 26, options=options)
    yield made
    made.service.close()


def in_pieces(
    engine: VLLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, **settings: Any
) -> tuple[list[Completion], int]:
    """Return all completions, from as many calls as a budget needs, and the number of calls.

    Each call labels its tokens with a version of its own.
    """
    completions, num_calls = engine.generate(prompts, params, **settings), 1
    while unfinished := [one for one in completions if one.finish_reason == "unfinished"]:
        engine.weights_updated(num_calls)
        resumed = engine.generate([], params, resume=unfinished, **settings)
        for before, after in zip(unfinished, resumed, strict=True):
            count = len(before.token_ids)
            assert after.token_ids[:count] == before.token_ids and after.logprobs[:count] == before.logprobs
            assert after.versions[:count] == before.versions and set(after.versions[count:]) <= {num_calls}
        known = {one.sample_id: one for one in resumed}
        completions = [known.get(one.sample_id, one) for one in completions]
        num_calls += 1
    engine.weights_updated(0)
    return completions, num_calls


def check_same(pieces: Sequence[Completion], whole: Sequence[Completion]) -> None:
    """Assert that responses are the same, up to the rounding of log-probabilities."""
    for piece, one in zip(pieces, whole, strict=True):
        assert (piece.sample_id, piece.token_ids, piece.model_mask, piece.finish_reason) == (
            one.sample_id, one.token_ids, one.model_mask, one.finish_reason
        )  # fmt: skip
        torch.testing.assert_close(torch.tensor(piece.logprobs), torch.tensor(one.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, n=3),
        replace(GREEDY, stop_token_ids=tuple(range(20)), min_new_tokens=5),
        replace(GREEDY, stop_strings=("a", "7", "Q", "bc")),
    ],
    ids=["plain", "several a prompt", "stop tokens", "stop strings"],
)
def test_greedy_responses_in_pieces_equal_uncut_ones(params: SamplingParams, engine: VLLMEngine) -> None:
    prompts = draw_prompts(7)
    whole = engine.generate(prompts, params)
    pieces, num_calls = in_pieces(engine, prompts, params, token_budget=33)
    check_same(pieces, whole)
    assert num_calls > 2


def test_a_budget_cuts_after_the_step_that_spends_it_as_the_native_engine(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    native = GenerationEngine(model, tokenizer=byte_tokenizer(), max_slots=4)
    prompts = draw_prompts(6)
    ours, theirs = (
        one.generate(prompts, GREEDY, token_budget=50, token_limits=[4, *[30] * 5]) for one in (engine, native)
    )
    assert [(len(c.token_ids), c.finish_reason) for c in ours] == [(len(c.token_ids), c.finish_reason) for c in theirs]
    assert ours[-1].token_ids == () and engine.stats.generated_tokens == native.stats.generated_tokens


def test_conversations_in_pieces_equal_uncut_ones(engine: VLLMEngine) -> None:
    def environment(turn: Turn) -> list[int] | None:
        last = turn.token_ids[-1] + 3 * turn.sample_id
        return None if last % 7 == 0 else [(last + 11 * step) % 256 for step in range(1 + last % 6)]

    params = replace(GREEDY, max_new_tokens=60, n=2, stop_token_ids=tuple(range(60)))
    talk: dict[str, Any] = {"environment": environment, "conversation": Conversation(max_turns=5)}
    prompts = draw_prompts(5)
    whole = engine.generate(prompts, params, **talk)
    assert {one.finish_reason for one in whole} >= {"environment", "max_turns"}
    for budget in (3, 20):
        pieces, num_calls = in_pieces(engine, prompts, params, token_budget=budget, **talk)
        check_same(pieces, whole)
        assert num_calls > 2


def test_sampled_responses_in_pieces_have_the_log_probabilities_of_a_forward(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    params = SamplingParams(max_new_tokens=40, n=8, temperature=0.8, ignore_eos=True)
    pieces, _ = in_pieces(engine, draw_prompts(3), params, token_budget=150)
    for piece in pieces:
        expected = recomputed(model, piece, params)
        torch.testing.assert_close(torch.tensor(piece.logprobs), expected, atol=1e-4, rtol=0)
        assert len(piece.token_ids) == 40
    # Nearly uniform over 259 tokens: a rest that is drawn by the first numbers again would repeat its beginning.
    assert sum(one.token_ids[:5] == one.token_ids[start : start + 5] for one in pieces for start in range(1, 35)) == 0


def test_a_budget_of_seconds_cuts_what_runs_and_leaves_what_waits(engine: VLLMEngine) -> None:
    params = replace(GREEDY, max_new_tokens=100, n=64)
    engine.generate([[5]], GREEDY)  # the first step compiles
    made = engine.generate(draw_prompts(16), params, seconds_budget=1.0)
    lengths = [len(one.token_ids) for one in made]
    assert max(lengths) > 1 and lengths[-1] == 0 and made[-1].finish_reason == "unfinished"


def test_a_vllm_that_is_killed_midway_loses_and_doubles_no_response(model: PreTrainedModel, engine: VLLMEngine) -> None:
    params, finished = SamplingParams(max_new_tokens=100, n=16, ignore_eos=True), list[Completion]()
    engine.generate([[5]], GREEDY)
    with killed_while_it_generates(engine):
        made = engine.generate(draw_prompts(4), params, token_budget=3000, on_finished=finished.append)
    assert sorted(one.sample_id for one in finished) == [one.sample_id for one in made] == list(range(64))
    num_tokens = sum(len(one.token_ids) for one in made)
    assert 3000 <= num_tokens < 3004, "a step of four samples spends it; lost tokens are not counted"
    rest = engine.generate([], params, resume=[one for one in made if one.finish_reason == "unfinished"])
    for completion in (*rest, *(one for one in made if one.finish_reason != "unfinished")):
        assert len(completion.token_ids) == 100
    expected = recomputed(model, rest[0], params)
    torch.testing.assert_close(torch.tensor(rest[0].logprobs), expected, atol=1e-4, rtol=0)
