"""vLLM itself on prompts with images: its tokens and log-probabilities are those of transformers, after every update.

Idefics3 is the family that needs no torchvision, of which there is no build for CPU next to vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_realloc import GenerationOptions, PromptDataModule
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import model_inputs
from lightning_realloc.errors import GenerationError
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
from lightning_realloc.strategies import ReallocStrategy
from tests.data.images.test_rows import drawn, prompts, user
from tests.strategies import runs
from tests.strategies.test_image_rows import brightness
from tests.vision_models import IMAGE, forward_arguments, tiny_vision_model
from tests.vision_processors import tiny_processor
from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

FAMILY = "idefics3"
SHOWN = {"type": "image"}
TEXTS: list[dict[str, Any]] = [{"prompt": user("ab"), "images": []}, {"prompt": user("ab" * 3), "images": []}]
ROWS: list[dict[str, Any]] = [
    {"prompt": user(SHOWN, "ab"), "images": [drawn(0)]},
    {"prompt": user(SHOWN, "ab"), "images": [drawn(3)]},
    *TEXTS,
    {"prompt": user("a", SHOWN, "b", SHOWN, "c"), "images": [drawn(1), drawn(2)]},
    {"prompt": user(SHOWN, SHOWN, "ab"), "images": [drawn(4), drawn(0)]},
]
"""Two prompts with the same text and other images of one size, two without images, and two with two images."""
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, n=2)
LARGE = {"hidden_size": 128, "max_position_embeddings": 512}
"""Heads of 32, the least size that vLLM has on CPU, and room for all images."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model that reads images."""
    return tiny_vision_model(FAMILY, **LARGE)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VLLMEngine]:
    """One vLLM for all tests."""
    made = VLLMEngine(
        model, tokenizer=None, max_slots=4, max_cache_bytes=1 << 26, options=VLLMOptions(python=vllm_python())
    )
    yield made
    made.service.close()


def inputs(rows: list[dict[str, Any]] = ROWS) -> list[ModelInput]:
    """Return the prompts of rows."""
    return model_inputs(prompts(rows, FAMILY))


def change_weights(model: PreTrainedModel, engine: VLLMEngine, part: str = "", *, seed: int) -> None:
    """Move the weights whose names hold ``part``, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    engine.weights_updated()


@torch.no_grad()
def recomputed(model: PreTrainedModel, made: Completion, params: SamplingParams) -> Tensor:
    """Return the log-probabilities of a response by transformers' own forward."""
    sequence = [*made.prompt, *made.token_ids]
    logits = model(**forward_arguments(FAMILY, sequence, made.input.extras), use_cache=False).logits[0]
    return sampling_logprobs(logits[len(made.prompt) - 1 : -1], torch.tensor(made.token_ids), params)


def check_logprobs(model: PreTrainedModel, made: list[Completion], params: SamplingParams) -> None:
    """Assert that log-probabilities are those of transformers."""
    for completion in made:
        expected = recomputed(model, completion, params)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_text_alone_is_generated_without_the_tower_and_then_with_images(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    first = engine.generate(inputs(TEXTS), GREEDY)
    process = engine.service.process_id
    check_logprobs(model, first, GREEDY)
    made = engine.generate(inputs(), GREEDY)
    assert engine.service.process_id != process, "started again, with the processor"
    check_logprobs(model, made, GREEDY)


def test_greedy_responses_are_those_of_the_native_engine_after_every_update(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    native, given = GenerationEngine(model), inputs()
    assert given[0].token_ids == given[1].token_ids
    for seed in range(3):
        change_weights(model, engine, seed=seed)
        native.weights_updated()
        ours, theirs = native.generate(given, GREEDY), engine.generate(given, GREEDY)
        assert [one.token_ids for one in theirs] == [one.token_ids for one in ours]
        check_logprobs(model, theirs, GREEDY)
        assert theirs[0].logprobs != theirs[2].logprobs, "other images behind the same text"


@pytest.mark.parametrize("part", ["vision", "projector|connector"])
def test_new_weights_of_the_tower_and_of_the_projector_change_answers_to_images_alone(
    model: PreTrainedModel, engine: VLLMEngine, part: str
) -> None:
    (name,) = {word for word in part.split("|") if any(word in name for name, _ in model.named_parameters())}
    given = inputs()
    before = engine.generate(given, GREEDY)
    change_weights(model, engine, name, seed=20)
    after = engine.generate(given, GREEDY)
    check_logprobs(model, after, GREEDY)
    for old, new in zip(before, after, strict=True):
        shift = abs(old.logprobs[0] - new.logprobs[0])
        assert shift > 1e-3 if old.input.images else shift < 1e-5


def test_sampled_responses_have_the_log_probabilities_of_transformers(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    params = SamplingParams(max_new_tokens=10, n=3, temperature=0.7, top_p=0.9, min_p=0.01, seed=4)
    made = engine.generate(inputs(), params)
    check_logprobs(model, made, params)
    assert len({one.token_ids for one in made[:3]}) > 1


def test_conversations_about_images_are_those_of_the_native_engine(model: PreTrainedModel, engine: VLLMEngine) -> None:
    params, bounds = SamplingParams(max_new_tokens=16, temperature=0), Conversation(max_turns=3, max_turn_tokens=4)

    def environment(turn: Turn) -> list[int]:
        return [9, turn.token_ids[-1]]

    given, native = inputs(), GenerationEngine(model)
    for ours, theirs in zip(
        native.generate(given, params, environment=environment, conversation=bounds),
        engine.generate(given, params, environment=environment, conversation=bounds),
        strict=True,
    ):
        assert theirs.token_ids == ours.token_ids and theirs.model_mask == ours.model_mask and False in ours.model_mask


def test_tokens_that_stand_for_images_are_not_drawn(model: PreTrainedModel, engine: VLLMEngine) -> None:
    kept = model.get_output_embeddings().weight.detach().clone()
    nn.init.zeros_(model.get_output_embeddings().weight)  # all tokens are equally likely
    engine.weights_updated()
    made = engine.generate(inputs(ROWS[:1]), SamplingParams(max_new_tokens=64, n=32, ignore_eos=True, seed=1))
    drawn_tokens = {token for one in made for token in one.token_ids}
    assert IMAGE not in drawn_tokens and len(drawn_tokens) == 127
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(kept)
    engine.weights_updated()


def test_a_prompt_whose_images_vllm_finds_elsewhere_is_refused_by_name(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    (given,) = inputs(ROWS[:1])
    place = given.token_ids.index(IMAGE)
    cut = ModelInput(given.token_ids[:place] + given.token_ids[place + 1 :], given.extras)
    with pytest.raises(
        GenerationError, match=r"vLLM finds 0 images of a prompt's 1, .* processor put them at \d+ tokens"
    ):
        engine.generate([cut], GREEDY)


def test_grpo_learns_from_images_with_the_log_probabilities_that_training_computes() -> None:
    module = runs.grpo(
        actor=tiny_vision_model(FAMILY, **LARGE),
        reference=tiny_vision_model(FAMILY, seed=1, **LARGE),
        reward=brightness,
        tokenizer=tiny_processor(FAMILY),
        engine="vllm",
        generation=GenerationOptions(vllm=VLLMOptions(python=vllm_python()), max_cache_bytes=1 << 26),
        sampling=SamplingParams(n=4, max_new_tokens=8, temperature=0.7, top_p=0.95),
    )
    data = PromptDataModule(ROWS[:4], batch_size=4, shuffle=False)
    record = runs.Record()
    trainer = runs.trainer(ReallocStrategy(), 1, callbacks=[record], max_epochs=-1, max_steps=3)
    trainer.fit(module, data)
    assert len(record.logged) == 3
    for logged in record.logged:
        assert logged["actor/engine_difference"] < 1e-4, "weights change much in every iteration"
