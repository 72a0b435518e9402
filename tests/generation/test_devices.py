"""Responses are the same on every device: those of `generate`, and those that the engine draws on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation
from tests.devices import DEVICES
from tests.generation.test_engine import draw_prompts, tokens_of
from tests.matrices import matrix
from tests.models import EXPERT_FAMILIES, FAMILIES, LATENT_FAMILIES, SCORING_FAMILIES, tiny_model

ALL_FAMILIES = (*FAMILIES, *EXPERT_FAMILIES, *LATENT_FAMILIES, *SCORING_FAMILIES)
NUM_TOKENS = 14
SAMPLED = SamplingParams(max_new_tokens=40, n=2, seed=3, ignore_eos=True)
LIMITS = [2, 20, 6, 12, 4, 16, 9, 20, 5]
ENGINES: Mapping[str, Any] = {
    "four slots": {"max_slots": 4},
    "bounded cache": {"max_cache_bytes": 400_000},
    "drafts from the text": {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
    "drafts from the first block": {"speculation": Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=3)},
}


@pytest.mark.parametrize("device", DEVICES)
# On a CPU, test_engine.py generates by the others.
@pytest.mark.parametrize("family", matrix(ALL_FAMILIES, "llama", *EXPERT_FAMILIES))
def test_greedy_responses_are_those_of_generate(family: str, device: str) -> None:
    model, prompts = tiny_model(family).to(device), draw_prompts(4)
    engine = GenerationEngine(model, max_slots=3)
    greedy = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    first, again = (engine.generate(prompts, greedy) for _ in range(2))  # on CUDA, the second one replays graphs
    assert tokens_of(again) == tokens_of(first)
    for prompt, completion in zip(prompts, first, strict=True):
        ids = torch.tensor([prompt], device=device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert list(completion.token_ids) == output[0, len(prompt) :].tolist()


@cache
def on_a_cpu(family: str) -> list[Completion]:
    engine = GenerationEngine(tiny_model(family), max_slots=18)
    return engine.generate(draw_prompts(len(LIMITS)), SAMPLED, token_limits=LIMITS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "engine"),
    matrix(
        itertools.product(ALL_FAMILIES, ENGINES),
        *zip(("gpt_oss", "gemma2", "mixtral", "llama"), ENGINES, strict=True),
    ),
)
def test_sampled_responses_are_those_of_an_engine_on_a_cpu(family: str, engine: str, device: str) -> None:
    model, prompts = tiny_model(family).to(device), draw_prompts(len(LIMITS))
    made = GenerationEngine(model, **ENGINES[engine]).generate(prompts, SAMPLED, token_limits=LIMITS)
    assert tokens_of(made) == tokens_of(on_a_cpu(family))
    for one, other in zip(made, on_a_cpu(family), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
