"""Responses to prompts with images equal those of transformers' ``generate``, in every family and setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import DataError
from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from tests.generation.test_extra_inputs import SETTINGS
from tests.matrices import matrix
from tests.vision_models import (
    IMAGE,
    VIDEO,
    VISION_FAMILIES,
    forward_arguments,
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
    made = generate(
        **forward_arguments(family, given.token_ids, given.extras), max_new_tokens=most, do_sample=False,
        suppress_tokens=[IMAGE, VIDEO],
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
    params = SamplingParams(max_new_tokens=64, n=32, ignore_eos=True, seed=1)
    for speculation in (None, Speculation(drafter="ngram", num_draft_tokens=2)):
        made = GenerationEngine(model, speculation=speculation).generate([[5, 6]], params)
        drawn = {token for one in made for token in one.token_ids}
        assert IMAGE not in drawn and len(drawn) == 127


@torch.no_grad()
def test_a_prompt_with_more_images_than_runs_of_their_tokens_is_refused() -> None:
    tokens, extras = prompt_with_images("qwen2_5_vl", (1, 2))
    with pytest.raises(DataError, match="1 runs of image tokens and 2 images"):
        GenerationEngine(tiny_vision_model("qwen2_5_vl")).generate([ModelInput((*tokens[:9], 8), extras)])
