"""vLLM itself: its tokens, log-probabilities and ends are those of the native engine, on weights that change."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
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
from lightning_realloc.generation.core.sampling import sampling_logprobs
from lightning_realloc.generation.vllm.messages import EngineLost
from tests.generation.test_engine import draw_prompts
from tests.generation.vllm.test_vllm_engine import is_running
from tests.models import byte_tokenizer, tiny_model
from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model with tied embeddings, whose reload on CPU needs the most care, and heads of a size that vLLM has."""
    return tiny_model("llama", vocab_size=259, hidden_size=128, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VLLMEngine]:
    """One vLLM for all tests."""
    options = VLLMOptions(python=vllm_python(), restarts=1)
    made = VLLMEngine(model, tokenizer=byte_tokenizer(), max_slots=8, max_cache_bytes=1 << 26, options=options)
    yield made
    made.service.close()


def change_weights(model: PreTrainedModel, engine: VLLMEngine, *, seed: int) -> None:
    """Move every weight, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    engine.weights_updated()


@torch.no_grad()
def recomputed(model: PreTrainedModel, completion: Completion, params: SamplingParams) -> Tensor:
    """Return the log-probabilities of a response by a forward of the model."""
    ids = torch.tensor([[*completion.prompt, *completion.token_ids]])
    logits = model(ids, use_cache=False).logits[0, len(completion.prompt) - 1 : -1]
    return sampling_logprobs(logits, torch.tensor(completion.token_ids), params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=12, temperature=0),
        SamplingParams(max_new_tokens=12, n=3),
        SamplingParams(max_new_tokens=12, n=2, temperature=0.6, top_k=9, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
    ],
    ids=["greedy", "plain", "filters"],
)
def test_log_probabilities_are_those_of_a_forward_after_every_update(
    params: SamplingParams, model: PreTrainedModel, engine: VLLMEngine
) -> None:
    prompts = draw_prompts(5)
    for seed in range(3):
        change_weights(model, engine, seed=seed)
        made = engine.generate(prompts, params)
        assert len(made) == len(prompts) * params.n
        for completion in made:
            expected = recomputed(model, completion, params)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
            assert set(completion.versions) == {engine._version}


def test_prompts_that_are_read_in_several_steps_get_the_same_responses(model: PreTrainedModel) -> None:
    prompts, sampling = draw_prompts(6), SamplingParams(max_new_tokens=12, n=2, seed=3)
    assert sum(map(len, prompts)) > 32

    def responses(**arguments: int) -> list[tuple[int, ...]]:
        options = VLLMOptions(python=vllm_python(), arguments=arguments)
        engine = VLLMEngine(model, max_slots=8, max_cache_bytes=1 << 26, options=options)
        try:
            return [completion.token_ids for completion in engine.generate(prompts, sampling)]
        finally:
            engine.service.close()

    assert responses(max_num_batched_tokens=16) == responses()


@contextmanager
def in_fp8(model: PreTrainedModel) -> Iterator[None]:
    """Round linear layers' weights by output channel, and their inputs by token, to fp8; the head stays."""

    def rounded(values: Tensor) -> Tensor:
        scale = values.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        return (values.float() / scale).to(torch.float8_e4m3fn).float() * scale

    layers = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"]
    with pytest.MonkeyPatch.context() as patch:
        for layer in layers:
            forward = partial(lambda layer, x: (rounded(x) @ rounded(layer.weight).T).to(x.dtype), layer)
            patch.setattr(layer, "forward", forward)
        yield


def test_fp8_rounds_current_weights_by_channel_and_their_inputs_by_token() -> None:
    model = tiny_model("llama", vocab_size=259, hidden_size=128).to(torch.bfloat16)
    options = VLLMOptions(python=vllm_python(), quantization="fp8")
    engine = VLLMEngine(model, max_slots=8, max_cache_bytes=1 << 26, options=options)
    params = SamplingParams(max_new_tokens=24)
    try:
        for seed in range(2):
            change_weights(model, engine, seed=seed)
            made = engine.generate(draw_prompts(6), params)
            found = torch.cat([torch.tensor(completion.logprobs) for completion in made])
            plain = torch.cat([recomputed(model, completion, params) for completion in made])
            with in_fp8(model):
                expected = torch.cat([recomputed(model, completion, params) for completion in made])
            errors = torch.stack([found - plain.float(), expected.float() - plain.float()])
            assert errors.abs().mean() < 0.1
            assert torch.corrcoef(errors)[0, 1] > 0.7, (
                "vLLM is wrong as rounded weights are; the rest is rounding of bf16"
            )
    finally:
        engine.service.close()


def test_greedy_tokens_and_ends_are_those_of_the_native_engine(model: PreTrainedModel, engine: VLLMEngine) -> None:
    change_weights(model, engine, seed=9)
    native, prompts = GenerationEngine(model, tokenizer=byte_tokenizer()), draw_prompts(6)
    for params in (
        SamplingParams(max_new_tokens=20, temperature=0),
        SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=tuple(range(100)), min_new_tokens=3),
        SamplingParams(max_new_tokens=20, temperature=0, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_new_tokens=30, temperature=0, stop_strings=("a", "7", "Q")),
    ):
        ours, theirs = native.generate(prompts, params), engine.generate(prompts, params)
        assert [(c.token_ids, c.finish_reason) for c in theirs] == [(c.token_ids, c.finish_reason) for c in ours]


def test_greedy_conversations_are_those_of_the_native_engine(model: PreTrainedModel, engine: VLLMEngine) -> None:
    change_weights(model, engine, seed=10)

    def environment(turn: Turn) -> list[int] | None:
        last = turn.token_ids[-1] + 3 * turn.sample_id
        return None if turn.number > 4 or last % 7 == 0 else [(last + 11 * step) % 256 for step in range(1 + last % 6)]

    native, prompts = GenerationEngine(model, tokenizer=byte_tokenizer()), draw_prompts(6)
    for params in (
        SamplingParams(max_new_tokens=40, temperature=0, n=2, stop_token_ids=tuple(range(60))),
        SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=tuple(range(100)), min_new_tokens=5),
        SamplingParams(max_new_tokens=40, temperature=0, n=2, stop_strings=("a", "7", "Q")),
    ):
        ours, theirs = (one.generate(prompts, params, environment=environment) for one in (native, engine))
        for own, other in zip(theirs, ours, strict=True):
            assert (own.token_ids, own.model_mask, own.finish_reason) == (
                other.token_ids, other.model_mask, other.finish_reason
            )  # fmt: skip
            logprobs = [torch.tensor(one.logprobs) for one in (own, other)]
            torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
        assert any(False in one.model_mask for one in theirs)


def test_turns_of_a_conversation_are_drawn_by_different_numbers(model: PreTrainedModel, engine: VLLMEngine) -> None:
    params = SamplingParams(max_new_tokens=41, n=16, temperature=2.0, stop_token_ids=tuple(range(259)))
    made = engine.generate([[5]], params, environment=lambda turn: [5], conversation=Conversation(max_turns=2))
    # Nearly uniform over 259 tokens: both turns of a sample agree by chance in 1 of 259 samples.
    assert sum(one.token_ids[0] == one.token_ids[2] for one in made) < 4


def test_a_seed_draws_the_same_responses_in_any_batch(model: PreTrainedModel, engine: VLLMEngine) -> None:
    params, prompts = SamplingParams(max_new_tokens=10, n=2, seed=5), draw_prompts(4)
    together = engine.generate(prompts, params)
    alone = engine.generate(prompts[2:3], params, sample_ids=[4, 5])
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[4:6]]
    assert together[4].token_ids != together[5].token_ids
    other = engine.generate(prompts, SamplingParams(max_new_tokens=10, n=2, seed=6))
    assert [c.token_ids for c in other] != [c.token_ids for c in together]


@contextmanager
def killed_while_it_generates(engine: VLLMEngine) -> Iterator[int]:
    """Kill vLLM's process 0.3 s after the body has begun."""
    process = engine.service.process_id
    assert process is not None
    timer = threading.Timer(0.3, os.kill, (process, signal.SIGKILL))
    timer.start()
    yield process
    timer.join()


def test_a_vllm_that_is_killed_while_it_generates_is_restarted_once_and_then_ends_the_call(
    model: PreTrainedModel, engine: VLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.generate([[5]], SamplingParams(max_new_tokens=2))
    prompts, params = draw_prompts(8), SamplingParams(max_new_tokens=100, n=16, ignore_eos=True)
    with killed_while_it_generates(engine) as first:
        made = engine.generate(prompts, params)
    assert "ended by signal SIGKILL" in caplog.text and "requests are repeated" in caplog.text
    assert [len(completion.token_ids) for completion in made] == [100] * len(made)
    for completion in made[::17]:
        expected = recomputed(model, completion, params)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    with (
        killed_while_it_generates(engine) as second,
        pytest.raises(EngineLost, match="vLLM's process ended by signal SIGKILL, the end of its log: ") as caught,
    ):
        engine.generate(prompts, params)
    assert "\n" not in str(caught.value)
    assert first != second and not is_running(first) and not is_running(second)
