"""GRPO with an environment that draws images gives the results of one rank, in every layout and after a checkpoint."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch.optim import SGD

from lightning_realloc import (
    Conversation,
    GenerationOptions,
    MessageEnvironment,
    PromptDataModule,
    RolloutBudget,
    RolloutTable,
    SamplingParams,
    StepResult,
)
from lightning_realloc.report.runs.conversations import read_conversations
from lightning_realloc.strategies import ReallocStrategy
from tests.data.images.test_rows import user
from tests.environments.test_images import shown_in
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_rollout_budget import noted
from tests.strategies.calls.test_sample_reallocation import Moved
from tests.strategies.runs import Outcome, calls
from tests.strategies.test_image_rows import ROWS
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor
from tests.workers import WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=62, seed=1)
BOUNDS = Conversation(max_turns=3, max_turn_tokens=6)
PLANS: dict[str, Any] = {
    "fsdp": calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp1@1"),
    "tp": calls(actor_train="dp2", actor_generate="tp2", reference_infer="dp1@1"),
    "pp": calls(actor_train="pp2", actor_generate="pp2", reference_infer="dp2"),
}


class Drawing(MessageEnvironment):
    """Draws an image of the brightness of the turn's length, and rewards turns for their first letter."""

    def reset(self, row: Mapping[str, Any]) -> list[Any]:
        """Begin with an image after the row's question."""
        image = {"type": "image", "image": Image.new("RGB", (16, 16), (len(row["images"]) * 60, 200, 10))}
        return [*row["prompt"], *user(image, "a")]

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Show the image, twice as wide for turns that begin with a small letter."""
        text = str(message["content"])
        wide = text[:1].islower()
        image = Image.new("RGB", (32 if wide else 16, 16), (40 * len(text) % 256, 10, 200))
        return StepResult([{"role": "user", "content": "c"}], images=[image], reward=float(wide) + 0.1 * len(text))


class DrawingOnce(Drawing):
    """Ends the conversations of questions with one image after the first turn, so that some end long before others."""

    def reset(self, row: Mapping[str, Any]) -> list[Any]:
        """Note the number of images."""
        self.is_short = len(row["images"]) == 1
        return super().reset(row)

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Draw, or end the conversation."""
        return StepResult(reward=0.0, done=True) if self.is_short else super().step(message)


def brightness(prompts: list[Any], completions: list[Any]) -> list[float]:
    """Reward bright images in prompts and answers."""
    shown = ([*shown_in(prompt), *shown_in(talk)] for prompt, talk in zip(prompts, completions, strict=True))
    return [sum(float(np.asarray(image).mean()) for image in images) / 255 for images in shown]


def _train(
    family: str, plan: Any, world_size: int, *, steps: int = 2, moves: bool = False,
    **options: Any,
) -> tuple[Outcome, float]:  # fmt: skip
    """Return the outcome of a run, and the number of samples that moved."""
    module = runs.RecordedGRPO(
        tiny_vision_model(family, max_position_embeddings=256),
        reference=tiny_vision_model(family, seed=1, max_position_embeddings=256), environment=Drawing,
        conversation=BOUNDS, sampling=SAMPLING, optimizer=partial(SGD, lr=0.5), tokenizer=tiny_processor(family),
        reward=brightness,
        generation=GenerationOptions(sample_reallocation="all" if moves else False),
    )  # fmt: skip
    callbacks = [record := runs.Record(), moved := Moved(), *options.get("callbacks", ())]
    saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    strategy = plan if isinstance(plan, ReallocStrategy) else ReallocStrategy(plan)
    trainer = runs.trainer(
        strategy, world_size, callbacks=callbacks, max_epochs=-1, max_steps=steps,
        enable_checkpointing=saves,
    )  # fmt: skip
    with moving(every=1, plan_balance=at_random):
        trainer.fit(module, PromptDataModule(ROWS * 2, batch_size=4, shuffle=False), ckpt_path=options.get("resume"))
    assert all(step.get("stopped/failure", 0.0) == 0.0 for step in record.logged)
    weights = strategy.full_weights("actor")
    return Outcome(record.logged, record.steps, weights, module.tokens, module.rewards), sum(moved.counts)


CASES = [(family, plan) for family in ("llava", "qwen2_5_vl", "gemma3") for plan in PLANS]


@pytest.mark.parametrize(("family", "plan"), matrix(CASES, ("qwen2_5_vl", "fsdp")))
def test_every_plan_gives_the_results_of_one_rank(workers: WorkerPool, family: str, plan: str) -> None:
    ((alone, _),) = workers.run(_train, family, "heuristic", 1, world_size=1, init_process_group=False)
    moves = plan == "fsdp"

    everyone = workers.run(partial(_train, moves=moves), family, PLANS[plan], 2, world_size=2, init_process_group=False)

    runs.check_equal_to_one_rank([outcome for outcome, _ in everyone], alone)
    assert len({reward for rewards in alone.rewards for reward in rewards}) > 3
    assert (everyone[0][1] > 0) == moves


def _resume(folder: str) -> tuple[Outcome, Outcome]:
    """Return a run whose batches wait for an iteration, and one from its checkpoint in the middle."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    strategies = [ReallocStrategy(max_staleness=1) for _ in range(2)]
    straight, _ = _train("llava", strategies[0], 1, steps=3, callbacks=[saving])
    return straight, _train("llava", strategies[1], 1, steps=3, resume=f"{folder}/step=1.ckpt")[0]


def _show(folder: str) -> None:
    """Write the table of a run."""
    table = RolloutTable(num_samples=4, path=f"{folder}/rollouts.csv")
    _train("llava", ReallocStrategy(), 1, steps=1, callbacks=[table])


def test_tables_and_reports_show_the_images_of_answers(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(_show, str(tmp_path), world_size=1, init_process_group=False)

    rows = list(csv.DictReader((tmp_path / "rollouts.csv").open(newline="")))
    assert "user: [image]" in rows[0]["conversation"]
    talks = read_conversations(tmp_path / "rollouts.jsonl", problems := [])
    assert len(talks) == 4 and not problems
    for row, talk in zip(rows, reversed(talks), strict=True):
        names = [name for message in talk["messages"] for name in message["pictures"]]
        assert names == json.loads(row["images"] or "[]") and all(
            (tmp_path / "rollouts_images" / n).is_file() for n in names
        )
    answers = [one for talk in talks for one in talk["messages"][1:] if one["role"] == "user"]
    assert answers and all(one["text"].startswith("[image]") and len(one["pictures"]) == 1 for one in answers)


@pytest.mark.exhaustive  # a checkpoint within a conversation: below
def test_a_batch_whose_answers_show_images_waits_in_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    ((straight, resumed),) = workers.run(_resume, str(tmp_path), world_size=1, init_process_group=False)

    for ours, theirs in zip(resumed.logged, straight.logged[1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-5)
    assert straight.logged[-1]["turns"] > 1, "environments answer, always with an image"
    assert runs.largest_difference(resumed.weights, straight.weights) < 1e-6


def _continue(folder: str) -> list[list[dict[int, list[int]]]]:
    """Return the responses of runs without a budget, with one, and from a checkpoint of the second, by sample id."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    budget = GenerationOptions(rollout_budget=RolloutBudget(tokens=50))
    found = []
    for settings in ({}, {"callbacks": [saving]}, {"resume": f"{folder}/step=1.ckpt"}):
        module = noted(runs.RecordedGRPO)(
            tiny_vision_model("llava"), reference=tiny_vision_model("llava", seed=1), environment=DrawingOnce,
            conversation=BOUNDS, sampling=SAMPLING, learning_rate=0.0, tokenizer=tiny_processor("llava"),
            generation=budget if settings else GenerationOptions(),
        )  # fmt: skip
        trainer = runs.trainer(
            ReallocStrategy(), 1, callbacks=settings.get("callbacks", []), max_steps=3, max_epochs=-1,
            enable_checkpointing="callbacks" in settings,
        )  # fmt: skip
        data = PromptDataModule(ROWS * 2, batch_size=4, shuffle=False)
        trainer.fit(module, data, ckpt_path=settings.get("resume"))
        found.append(module.learnt.responses)
    return found


def test_conversations_with_images_go_on_after_a_budget_and_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    ((plain, cut, resumed),) = workers.run(_continue, str(tmp_path), world_size=1, init_process_group=False)

    expected = {sample: tokens for responses in plain for sample, tokens in responses.items()}
    assert len(cut[0]) < 8, "some conversations go on in the next iteration"
    for responses in (*cut, *resumed):
        assert {sample: expected[sample] for sample in responses} == responses
    assert resumed[0] and cut[0].keys().isdisjoint(resumed[0])
    # Those that had begun before the checkpoint end in the first iteration after it, or in the second.
    begun = {sample for sample in expected if sample < 8} - cut[0].keys()
    lengths = [len(tokens) for responses in resumed for sample, tokens in responses.items() if sample in begun]
    assert max(lengths) > 30, "they go on after an answer with an image"
