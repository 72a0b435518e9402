"""A model's further inputs reach it with their prompts, whole, in every setting of the engine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import GenerationEngine, HFEngine, SamplingParams, Speculation, VLLMEngine
from lightning_realloc.generation.speculative.lookup import HistoryDrafter
from tests.models import PLACEHOLDER, model_with_features, tiny_model

GREEDY = SamplingParams(max_new_tokens=12, temperature=0, n=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few slots": {"max_slots": 3},
    "prompts above the budget of a step": {"max_prefill_tokens": 8},
    "pages that preempt": {"max_cache_bytes": 100_000},
    "drafts": {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
    "history": {"speculation": Speculation(drafter="history", num_draft_tokens=3)},
}


def draw_inputs(count: int, *, seed: int = 0) -> list[ModelInput]:
    """Return prompts with one to three rows of features; every second has the tokens of the one before it."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs: list[ModelInput] = []
    for index in range(count):
        if index % 2:
            tokens = inputs[-1].token_ids
        else:
            tokens = (*(rng.randrange(3, 90) for _ in range(rng.randint(1, 9))), 5)
            places = [rng.randrange(len(tokens) - 1) for _ in range(3)]
            tokens = tuple(PLACEHOLDER if place in places else token for place, token in enumerate(tokens))
        features = 3 * torch.randn(tokens.count(PLACEHOLDER), 64, generator=generator)
        inputs.append(ModelInput(tokens, {"features": features}))
    return inputs


def naive_response(model: torch.nn.Module, given: ModelInput, most: int) -> list[int]:
    """Return the greedy response, by a full forward for every token."""
    ids: list[int] = list(given.token_ids)
    while len(ids) - len(given.token_ids) < most:
        logits: Tensor = model(torch.tensor([ids]), features=given.extras["features"], use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == 2:
            break
    return ids[len(given.token_ids) :]


@torch.no_grad()
def test_the_engine_hf_passes_features_on() -> None:
    model, inputs = model_with_features(), draw_inputs(6)
    made = HFEngine(model).generate(inputs, GREEDY)
    assert [list(one.token_ids) for one in made[::2]] == [naive_response(model, given, 12) for given in inputs]


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_responses_equal_those_of_full_forwards(name: str) -> None:
    preempts = name == "pages that preempt"
    model, inputs, most = model_with_features(), draw_inputs(4 if preempts else 8), 80 if preempts else 12
    engine = GenerationEngine(model, **SETTINGS[name])
    expected = [naive_response(model, given, most) for given in inputs]
    assert len(set(map(tuple, expected))) == len(inputs), "features change responses"
    for _ in range(2):  # the second call has a history
        completions = engine.generate(inputs, replace(GREEDY, max_new_tokens=most))
        assert [list(one.token_ids) for one in completions[::2]] == expected
        assert [list(one.token_ids) for one in completions[1::2]] == expected
    if preempts:
        assert engine.stats.num_preemptions > 0
    assert engine.stats.shared_prefill_tokens == 0, "pages of other features are not shared"


@torch.no_grad()
def test_resumed_responses_read_their_features_again() -> None:
    model, inputs = model_with_features(), draw_inputs(4)
    engine = GenerationEngine(model)
    begun = engine.generate(inputs, GREEDY, token_budget=20)
    unfinished = [one for one in begun if one.finish_reason == "unfinished"]
    assert unfinished and any(one.token_ids for one in unfinished)
    done = engine.generate([], GREEDY, resume=unfinished)
    for one in done:
        assert list(one.token_ids) == naive_response(model, one.input, 12)


def test_history_tells_prompts_apart_by_their_features() -> None:
    first, second = draw_inputs(2)
    assert first.token_ids == second.token_ids and first.prompt_key != second.prompt_key
    drafter = HistoryDrafter()
    engine = GenerationEngine(model_with_features(), speculation=Speculation(), drafter=drafter)
    engine.generate([first], GREEDY)
    sample = engine.generate([second], GREEDY)[0]
    assert sample.input == second != first
    assert set(drafter._responses) == {first.prompt_key, second.prompt_key}


def test_engines_and_models_that_cannot_read_an_input_refuse_it() -> None:
    (given, _) = draw_inputs(2)
    with pytest.raises(GenerationError, match=r"input 'features' needs .* passes further inputs.*'native'.*'hf'"):
        VLLMEngine(model_with_features()).generate([given], GREEDY)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.forward has no argument 'features'"):
        GenerationEngine(tiny_model("llama")).generate([given], GREEDY)
    with pytest.raises(GenerationError, match="batch_invariant=True"):
        GenerationEngine(model_with_features(), batch_invariant=True).generate([given], GREEDY)
    alone = ModelInput((PLACEHOLDER,), {"features": torch.zeros(1, 64)})
    with pytest.raises(GenerationError, match=r"prompt 1 is one token, .* input 'features' .* add a token after its"):
        GenerationEngine(model_with_features()).generate([given, alone], GREEDY)
    without = ModelInput((5,), {"features": torch.zeros(0, 64)})
    assert len(GenerationEngine(model_with_features()).generate([without], GREEDY)) == GREEDY.n
