"""Losses and gradients of rows with images equal those of TRL's trainers, which collate the same rows themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lightning_realloc import PreferenceDataModule, PromptDataModule, SFTDataModule
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.training import pack_columns
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.data.images.test_rows import drawn, table, user
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor

pytest.importorskip("trl", reason="parity needs TRL: pip install 'lightning-realloc[parity]'")

from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from tests.parity import trl_trainers as trl
from tests.parity.test_trl import CPU, assert_equal, padded, scored, totals_of

SHOWN = {"type": "image"}
FAMILIES = ("qwen2_5_vl", "llava", "gemma3")
BETA = 0.3


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def rows(**responses: tuple[str, str]) -> list[dict[str, Any]]:
    """Return two rows with one and two images."""
    prompts = (user(SHOWN, "ab?"), user(SHOWN, "a", SHOWN))
    images = ([drawn(1)], [drawn(0), drawn(2)])
    texts = ({name: said(both[row]) for name, both in responses.items()} for row in range(2))
    return [{"prompt": p, "images": i, **t} for p, i, t in zip(prompts, images, texts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_sft(family: str) -> None:
    data, processor = rows(completion=("red", "no")), tiny_processor(family)
    ours, theirs = tiny_vision_model(family), trl.fused(tiny_vision_model(family))
    samples = table(SFTDataModule(data, batch_size=2, tokenizer=processor))

    loss = SFT(ours).actor_loss(ours, pack_columns(samples, CPU), totals_of(samples)).value

    inputs = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)(data)
    assert_equal(loss, trl.sft_loss(theirs, dict(inputs)), ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_dpo(family: str) -> None:
    data, processor = rows(chosen=("red", "no"), rejected=("blue", "yes")), tiny_processor(family)
    ours, theirs = tiny_vision_model(family), trl.fused(tiny_vision_model(family))
    samples = table(PreferenceDataModule(data, batch_size=2, tokenizer=processor))
    samples = scored(samples, ref_logprobs=tiny_vision_model(family, seed=1))

    loss = DPO(ours, beta=BETA).actor_loss(ours, pack_columns(samples, CPU), totals_of(samples, 2)).value

    inputs = DataCollatorForVisionPreference(processor)(data)
    reference = trl.fused(tiny_vision_model(family, seed=1))
    assert_equal(loss, trl.dpo_loss(theirs, reference, dict(inputs), beta=BETA), ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_grpo(family: str) -> None:
    data, processor = rows(), tiny_processor(family)
    ours, theirs = tiny_vision_model(family), trl.fused(tiny_vision_model(family))
    responses, advantages = [[5, 9, 12], [8, 2], [30, 31, 2], [40]], torch.tensor([0.5, -1.0, 1.5, -0.3])
    samples = table(PromptDataModule(data, batch_size=2, tokenizer=processor)).repeat(2)
    prompts = samples.ragged("prompt_ids").to_lists()
    samples = samples.with_columns(response_ids=Ragged.from_list(responses), advantages=advantages)
    with torch.no_grad():
        packed = pack(samples)
        behaviour = packed.responses(token_logprobs(ours, packed, only_responses=True).logprobs)
    samples = samples.with_columns(behaviour_logprobs=behaviour)
    module = GRPO(ours, lambda **_: [], loss_average="sequence", tokenizer=processor)

    loss = module.actor_loss(ours, pack_columns(samples, CPU, share_prompts=True), totals_of(samples, 2)).value

    assert_equal(
        loss, trl.model_policy_loss(theirs, _trl_inputs(processor, data, prompts, responses, advantages)), ours, theirs
    )


def _trl_inputs(
    processor: Any, data: list[dict[str, Any]], prompts: list[list[int]], responses: list[list[int]], advantages: Any
) -> Mapping[str, Any]:
    """Return two responses to each prompt in the layout of TRL's GRPO, which pads prompts on the left."""
    repeated = [row for row in data for _ in range(2)]
    longest = max(map(len, prompts))
    texts = [
        processor.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in repeated
    ]
    made = processor(
        text=texts, images=[row["images"] for row in repeated], padding=True, padding_side="left", return_tensors="pt"
    )
    images = {name: values for name, values in made.items() if name not in ("input_ids", "attention_mask")}
    completions = padded(responses)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in images:
            images[name] = torch.cat([images[name], torch.zeros_like(completions)], 1)
    return {
        **images,
        "num_images": [len(row["images"]) for row in repeated],
        "prompt_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        "completion_ids": completions,
        "completion_mask": padded([[1] * len(response) for response in responses]),
        "advantages": advantages,
    }
