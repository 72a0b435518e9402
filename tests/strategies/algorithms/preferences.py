"""Tiny batches of pairs, labelled responses and steps, and every algorithm that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import SGD

from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.kto import KTO
from lightning_realloc.algorithms.orpo import ORPO
from lightning_realloc.algorithms.process_reward import ProcessReward
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
from tests.models import byte_tokenizer, tiny_model, tiny_scorer

# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
DESCENT = partial(SGD, lr=0.05)


class Responses:
    """The same batches of random responses in every epoch and on every rank.

    Args:
        count: Batches.
        size: Prompts per batch.
        per_prompt: Adjacent responses to each prompt.
        columns: Function that makes further columns of a batch from its responses.
    """

    def __init__(
        self, count: int, *, size: int = 6, per_prompt: int = 1, columns: Callable[[Ragged], Mapping[str, Column]]
    ) -> None:
        self.count, self.size, self.per_prompt, self.columns = count, size, per_prompt, columns

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Samples]:
        generator = torch.Generator().manual_seed(7)
        for index in range(self.count):
            responses = _rows(self.size * self.per_prompt, generator)
            rows = torch.arange(self.size).repeat_interleave(self.per_prompt)
            prompts = _rows(self.size, generator).select(rows)
            ids = torch.arange(len(rows)) + index * len(rows)
            yield Samples(ids, {"prompt_ids": prompts, "response_ids": responses, **self.columns(responses)})


def _rows(count: int, generator: torch.Generator) -> Ragged:
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return Ragged.from_list([torch.randint(3, 128, (length,), generator=generator) for length in lengths])


def pairs(count: int = 2, *, size: int = 6, margins: bool = False) -> Responses:
    """Return batches of pairs; with ``margins``, of 0, 0.5, 1, ... in turn."""

    def columns(responses: Ragged) -> Mapping[str, Column]:
        return {"margin": (torch.arange(len(responses)) // 2) * 0.5} if margins else {}

    return Responses(count, size=size, per_prompt=2, columns=columns)


def judged(count: int = 2, *, size: int = 6) -> Responses:
    """Return batches of responses; every third response is good."""
    return Responses(count, size=size, columns=lambda responses: {"label": torch.arange(len(responses)) % 3 == 0})


def steps(count: int = 2, *, size: int = 6) -> Responses:
    """Return batches of responses whose odd and last tokens end a step; steps that end on low tokens are correct."""

    def columns(responses: Ragged) -> Mapping[str, Column]:
        ends = [[place % 2 == 1 or place == length - 1 for place in range(length)] for length in responses.lengths]
        labels = (responses.values < 64) & torch.tensor([end for row in ends for end in row])
        return {
            "step_ends": Ragged.from_list(ends, dtype=torch.bool),
            "step_labels": Ragged(labels.float(), responses.lengths),
        }

    return Responses(count, size=size, columns=columns)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"optimizer": DESCENT, "tokenizer": byte_tokenizer(), **given}


def dpo(**settings: Any) -> DPO:
    """Return DPO on the tiny llama, with another model as the reference, so that log-ratios are not all zero."""
    return DPO(tiny_model("llama"), **_settings({"reference": tiny_model("llama", seed=1), **settings}))


def dpo_with_adapters(**settings: Any) -> DPO:
    """Return DPO that trains adapters; the reference is the model below them."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actor = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return DPO(actor, **_settings(settings))


def kto(**settings: Any) -> KTO:
    """Return KTO on the tiny llama."""
    return KTO(tiny_model("llama"), reference=tiny_model("llama", seed=1), **_settings(settings))


def orpo(**settings: Any) -> ORPO:
    """Return ORPO on the tiny llama."""
    return ORPO(tiny_model("llama"), **_settings(settings))


def reward_model(**settings: Any) -> RewardModel:
    """Return a reward model whose scores differ clearly between sequences from the beginning."""
    return RewardModel(tiny_scorer("llama", seed=5), **_settings(settings))


def process_reward(**settings: Any) -> ProcessReward:
    """Return a process reward model with a new head."""
    return ProcessReward(tiny_model("llama"), **_settings(settings))
