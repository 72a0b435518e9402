"""SmolLM2-135M-Instruct on one, two and four ranks: losses and gradients of one rank, greedy tokens of `generate`.

``make demo-real`` makes the model; then ``pytest -m real tests/examples/test_real_model.py`` takes seven minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workload import stable_adam
from examples.smollm2 import model_folder
from lightning_realloc import SFT, PromptDataModule, SamplingParams, SFTDataModule, TrainOptions
from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.workers import WorkerPool

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 12 + 7?", "Who wrote Hamlet?")
ANSWERS = ("Paris.", "Red, green and blue are three colours.", "19", "William Shakespeare wrote it around 1600.")
LENGTH = 12
LAYOUTS = {
    "fsdp2": ("fsdp2", "fsdp2"),
    "dp2": ("dp2", "dp2"),
    "tp2": ("tp2", "tp2"),
    "fsdp2 -> tp2": ("tp2", "fsdp2"),
    "fsdp2 -> dp2": ("dp2", "fsdp2"),
    "pp2 -> dp2": ("dp2", "pp2"),
    "pp2 -> tp2": ("tp2", "pp2"),
    "fsdp4 -> dp2.tp2": ("dp2.tp2", "fsdp4"),
    "fsdp2.tp2 -> dp4": ("dp4", "fsdp2.tp2"),
    "tp4 -> fsdp4": ("fsdp4", "tp4"),
}
"""Name -> layouts of generation and training."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Greedy tokens before training, and sampled tokens, losses and gradient norms of two iterations."""

    greedy: list[list[int]]
    sampled: list[list[list[int]]]
    losses: list[float]
    grad_norms: list[float]


def share_of_letters(completions: list[str], **_: object) -> list[float]:
    """Reward the share of letters in a response."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


def train(folder: str, generate: str, train: str) -> Outcome:
    """Answer greedily, then train for two iterations."""
    module = runs.RecordedGRPO(
        folder, share_of_letters, sampling=SamplingParams(n=2, max_new_tokens=LENGTH), optimizer=stable_adam(1e-5),
        kl_coef=0.0,
    )  # fmt: skip
    rows = [{"prompt": question} for question in QUESTIONS]
    settings: dict[str, Any] = {"batch_size": len(rows), "text_prompts": "user"}
    record = runs.Record()
    plan = {"calls": {"actor.generate": generate, "actor.train": train}}
    trainer = runs.trainer(ReallocStrategy(plan), runs.world_size(), max_steps=2, max_epochs=-1, callbacks=[record])
    trainer.validate(module, PromptDataModule(rows, val_data=rows, **settings), verbose=False)
    trainer.fit(module, PromptDataModule(rows, shuffle=False, **settings))
    greedy, *sampled = module.tokens
    return Outcome(
        greedy,
        sampled,
        [float(logged["actor/loss"]) for logged in record.logged],
        [float(logged["actor/grad_norm"]) for logged in record.logged],
    )


def fine_tune(folder: str, layout: str) -> list[float]:
    """Return the losses of two steps of SFT in packs of at most 64 tokens."""
    rows = [
        {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": text}]}
        for question, text in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    module = SFT(folder, optimizer=stable_adam(1e-4), train_options=TrainOptions(micro_batch_tokens=64))
    record = runs.Record()
    strategy = ReallocStrategy({"calls": {"actor.train": layout}})
    trainer = runs.trainer(strategy, runs.world_size(), max_steps=2, max_epochs=-1, callbacks=[record])
    trainer.fit(module, SFTDataModule(rows, batch_size=len(rows), shuffle=False))
    return [float(logged["actor/loss"]) for logged in record.logged]


def on_ranks(workers: WorkerPool, folder: Path, generate: str, train_layout: str, world_size: int) -> Outcome:
    """Return rank 0's outcome."""
    return workers.run(
        train, str(folder), generate, train_layout, world_size=world_size, init_process_group=False, deadline_s=600.0
    )[0]


def require_equal(found: Outcome, expected: Outcome) -> None:
    """Compare two outcomes. After a step, rounding may turn a near tie of two tokens, in one response of eight."""
    assert found.greedy == expected.greedy
    assert found.sampled[0] == expected.sampled[0]
    assert found.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=1e-4)
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    equal = [mine == theirs for mine, theirs in zip(found.sampled[1], expected.sampled[1], strict=True)]
    assert len(equal) == 2 * len(QUESTIONS) and sum(equal) >= len(equal) - 1


@pytest.fixture(scope="module")
def one_rank(workers: WorkerPool) -> Outcome:
    """The outcome of one rank."""
    return on_ranks(workers, model_folder(), "dp1", "dp1", 1)


def test_greedy_tokens_are_those_of_generate(one_rank: Outcome) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    for question, found in zip(QUESTIONS, one_rank.greedy, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**ids, do_sample=False, max_new_tokens=LENGTH)
        assert found == output[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_learns_as_one_rank(name: str, one_rank: Outcome, workers: WorkerPool) -> None:
    generate, train_layout = LAYOUTS[name]
    world_size = 4 if "4" in name or "." in name else 2
    require_equal(on_ranks(workers, model_folder(), generate, train_layout, world_size), one_rank)


@pytest.fixture(scope="module")
def sft_losses(workers: WorkerPool) -> list[float]:
    """Losses of SFT on one rank, the first as transformers computes it."""
    (losses,) = workers.run(fine_tune, str(model_folder()), "dp1", world_size=1, init_process_group=False)
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    total = count = 0
    for question, text in zip(QUESTIONS, ANSWERS, strict=True):
        asked: Any = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = [{"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template([*asked, *answer], return_dict=True)["input_ids"]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        with torch.no_grad():
            output = model(torch.tensor([ids]), labels=torch.tensor([labels]))
        total, count = total + float(output.loss) * (len(labels) - len(prompt)), count + len(labels) - len(prompt)
    assert losses[0] == pytest.approx(total / count, abs=1e-5)
    assert losses[1] < losses[0]
    return losses


@pytest.mark.parametrize("layout", ["fsdp2", "dp2", "tp2", "fsdp4", "fsdp2.tp2", "tp4"])
def test_losses_of_sft_are_those_of_one_rank(layout: str, sft_losses: list[float], workers: WorkerPool) -> None:
    world_size = 4 if "4" in layout or "." in layout else 2
    for losses in workers.run(
        fine_tune, str(model_folder()), layout, world_size=world_size, init_process_group=False, deadline_s=600.0
    ):
        assert losses == pytest.approx(sft_losses, abs=1e-5)
