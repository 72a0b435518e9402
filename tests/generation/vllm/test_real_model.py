"""vLLM with SmolLM2-135M in training: after every optimizer step, its log-probabilities are those of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.smollm2 import model_folder
from lightning_realloc.generation import Completion, SamplingParams, VLLMEngine, VLLMOptions
from tests.generation.vllm.test_real_vllm import recomputed
from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = ("What is 12 + 7?", "Name three colours.")
SAMPLING = SamplingParams(n=2, max_new_tokens=12, temperature=0.8)


@pytest.fixture
def model() -> PreTrainedModel:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[VLLMEngine]:
    """Its engine."""
    options = VLLMOptions(python=vllm_python(), max_length=256)
    made = VLLMEngine(model, max_slots=4, max_cache_bytes=1 << 26, options=options)
    yield made
    made.service.close()


def chat_prompts() -> list[list[int]]:
    """Return the questions as the model's chat template writes them."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"] for one in asked
    ]


def all_recomputed(model: PreTrainedModel, made: Sequence[Completion]) -> Tensor:
    """Return the log-probabilities of all responses by forward passes."""
    return torch.cat([recomputed(model, completion, SAMPLING) for completion in made])


def train_on(model: PreTrainedModel, optimizer: torch.optim.Optimizer, made: Sequence[Completion]) -> None:
    """Make the responses more likely, in one step."""
    for completion in made:
        ids = torch.tensor([[*completion.prompt, *completion.token_ids]])
        model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_log_probabilities_are_those_of_the_trained_model_after_every_step(
    model: PreTrainedModel, engine: VLLMEngine
) -> None:
    optimizer, prompts = torch.optim.AdamW(model.parameters(), lr=2e-5), chat_prompts()
    for step in range(4):
        made = engine.generate(prompts, SAMPLING)
        found = torch.cat([torch.tensor(completion.logprobs) for completion in made])
        torch.testing.assert_close(found, all_recomputed(model, made), atol=1e-4, rtol=0)
        assert {version for completion in made for version in completion.versions} == {step}
        train_on(model, optimizer, made)
        assert (found - all_recomputed(model, made)).abs().max() > 1e-2, "old weights would be noticed"
        engine.weights_updated()
