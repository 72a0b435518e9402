"""Responses to prompts with images equal those of transformers' ``generate``, in every family and setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import DataError
from lightning_realloc.generation import Conversation, GenerationEngine, HFEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.base_engine import Engine
from tests.generation.test_extra_inputs import SETTINGS
from tests.matrices import matrix
from tests.models import PLACEHOLDER, model_with_features
from tests.vision_models import (
    BEGIN,
    END,
    IMAGE,
    VIDEO,
    VISION_FAMILIES,
    forward_arguments,
    image_inputs,
    prompt_with_images,
    tiny_vision_model,
)

IMAGES = ((), (1,), (2,), (3, 4, 5))
"""Seeds of the images of each prompt: the second and third have the same tokens."""
CASES = [(family, name) for family in VISION_FAMILIES for name in SETTINGS]
FEW = [(family, "plain") for family in VISION_FAMILIES]
FEW += [("qwen2_5_vl", "drafts"), ("qwen3_vl", "few slots"), ("gemma3", "pages that preempt")]


def expected_response(family: str, model: nn.Module, given: ModelInput, most: int) -> list[int]:
    """Return the greedy response by ``generate``, which may not draw tokens that stand for images."""
    generate: Any = model.generate
    whole = torch.ones(1, len(given.token_ids), dtype=torch.int64)  # by default, padding in a response is left out
    made = generate(
        **forward_arguments(family, given.token_ids, given.extras), attention_mask=whole, max_new_tokens=most,
        do_sample=False, suppress_tokens=[IMAGE, VIDEO],
    )  # fmt: skip
    response: list[int] = made[0, len(given.token_ids) :].tolist()
    return response


@pytest.mark.parametrize(("family", "setting"), matrix(CASES, *FEW))
@torch.no_grad()
def test_responses_equal_those_of_transformers(family: str, setting: str) -> None:
    model, most = tiny_vision_model(family), 60 if setting == "pages that preempt" else 10
    inputs = [ModelInput(tuple(tokens), extras) for tokens, extras in (prompt_with_images(family, s) for s in IMAGES)]
    expected = [expected_response(family, model, given, most) for given in inputs]
    engine = GenerationEngine(model, **SETTINGS[setting])
    for _ in range(2):  # the second call has a history
        completions = engine.generate(inputs, SamplingParams(max_new_tokens=most, temperature=0, n=2))
        assert [list(one.token_ids) for one in completions] == [one for one in expected for _ in range(2)]
        assert inputs[1].token_ids == inputs[2].token_ids and completions[2].logprobs != completions[4].logprobs
    assert engine.stats.shared_prefill_tokens == 0, "pages of other images are not shared"


@pytest.mark.parametrize("family", matrix(VISION_FAMILIES, "qwen3_vl", "gemma3", "mistral3", "idefics3"))
@torch.no_grad()
def test_the_engine_hf_gives_the_same_responses_in_padded_batches(family: str) -> None:
    model = tiny_vision_model(family)
    inputs = [ModelInput(tuple(tokens), extras) for tokens, extras in (prompt_with_images(family, s) for s in IMAGES)]
    expected = [expected_response(family, model, given, 10) for given in inputs]
    params = SamplingParams(max_new_tokens=10, temperature=0, n=2)
    native, engine = GenerationEngine(model).generate(inputs, params), HFEngine(model, max_slots=8)
    for _ in range(2):  # the model keeps nothing of the first call
        made = engine.generate(inputs, params)
        assert [list(one.token_ids) for one in made] == [one for one in expected for _ in range(2)]
        for ours, theirs in zip(made, native, strict=True):
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
    assert engine.stats.num_steps == max(map(len, expected)), "all prompts share a batch"


@torch.no_grad()
def test_the_engine_hf_reads_images_again_in_each_turn() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    inputs = [ModelInput(tuple(tokens), extras) for tokens, extras in map(_of_qwen, IMAGES)]
    params, bounds = SamplingParams(max_new_tokens=16, temperature=0), Conversation(max_turns=3, max_turn_tokens=4)

    def environment(turn: Turn) -> list[int]:
        return [9, turn.token_ids[-1]]

    for ours, theirs in zip(
        HFEngine(model).generate(inputs, params, environment=environment, conversation=bounds),
        GenerationEngine(model).generate(inputs, params, environment=environment, conversation=bounds),
        strict=True,
    ):
        assert ours.token_ids == theirs.token_ids and ours.model_mask == theirs.model_mask and False in ours.model_mask


def _of_qwen(seeds: Sequence[int]) -> tuple[list[int], dict[str, Tensor]]:
    return prompt_with_images("qwen2_5_vl", seeds)


@torch.no_grad()
def test_prompts_that_begin_with_an_image_are_padded_without_another_one() -> None:
    model = tiny_vision_model("llava")
    prompts = [prompt_with_images("llava", seeds) for seeds in ((1,), (2, 3))]
    inputs = [ModelInput(tuple(tokens[3:]), extras) for tokens, extras in prompts]
    assert inputs[0].token_ids[0] == IMAGE
    expected = [expected_response("llava", model, given, 10) for given in inputs]
    made = HFEngine(model).generate(inputs, SamplingParams(max_new_tokens=10, temperature=0))
    assert [list(one.token_ids) for one in made] == expected


@pytest.mark.parametrize("kind", [GenerationEngine, HFEngine])
@torch.no_grad()
def test_images_of_other_shapes_share_a_batch_where_their_sizes_are_known(kind: Callable[[nn.Module], Engine]) -> None:
    model, inputs = tiny_vision_model("mistral3"), []
    for height, width in ((16, 16), (32, 16)):
        values, count = image_inputs("mistral3", height + width, height=height, width=width)
        cut = {"pixel_values": values["pixel_values"][:, :, :height, :width], "image_sizes": values["image_sizes"]}
        inputs.append(ModelInput((5, BEGIN, *[IMAGE] * count, END, 7), cut))
    expected = [expected_response("mistral3", model, given, 8) for given in inputs]
    params = SamplingParams(max_new_tokens=8, temperature=0)
    assert [list(one.token_ids) for one in kind(model).generate(inputs, params)] == expected
    features = [ModelInput((PLACEHOLDER, 5), {"features": torch.zeros(1, width)}) for width in (64, 32)]
    with pytest.raises(DataError, match=r"input 'features' has rows of the shapes \[\(32,\), \(64,\)\] in different"):
        kind(model_with_features()).generate(features, params)


@torch.no_grad()
def test_other_images_behind_the_same_text_get_other_answers() -> None:
    model, engine = tiny_vision_model("smolvlm"), GenerationEngine(tiny_vision_model("smolvlm"))
    prompts = [prompt_with_images("smolvlm", (seed,)) for seed in (1, 2)]
    inputs = [ModelInput(tuple(tokens), extras) for tokens, extras in prompts]
    expected = [expected_response("smolvlm", model, given, 10) for given in inputs]
    assert inputs[0].token_ids == inputs[1].token_ids and expected[0] != expected[1]
    made = engine.generate(inputs, SamplingParams(max_new_tokens=10, temperature=0))
    assert [list(one.token_ids) for one in made] == expected


@torch.no_grad()
def test_tokens_that_stand_for_images_are_not_drawn() -> None:
    model = tiny_vision_model("llava")
    nn.init.zeros_(model.get_output_embeddings().weight)  # all tokens are equally likely
    params, drafts = SamplingParams(max_new_tokens=64, n=32, ignore_eos=True, seed=1), Speculation(drafter="ngram")
    for engine in (GenerationEngine(model), GenerationEngine(model, speculation=drafts), HFEngine(model)):
        made = engine.generate([[5, 6]], params)
        drawn = {token for one in made for token in one.token_ids}
        assert IMAGE not in drawn and len(drawn) == 127


@torch.no_grad()
def test_a_prompt_with_more_images_than_runs_of_their_tokens_is_refused() -> None:
    tokens, extras = prompt_with_images("qwen2_5_vl", (1, 2))
    with pytest.raises(DataError, match="1 run of image tokens and 2 images"):
        GenerationEngine(tiny_vision_model("qwen2_5_vl")).generate([ModelInput((*tokens[:9], 8), extras)])
