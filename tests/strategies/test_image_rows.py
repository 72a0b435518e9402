"""Algorithms learn from rows with images as on one rank, in every layout, and after a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

from lightning_realloc import Conversation, MessageEnvironment, PromptDataModule, SamplingParams, StepResult
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies import ReallocStrategy
from tests.data.images.test_rows import drawn, user
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Outcome
from tests.strategies.test_images import PLANS
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor
from tests.workers import WorkerPool

SHOWN = {"type": "image"}
ROWS: list[dict[str, Any]] = [
    {"prompt": user("ab"), "images": []},
    {"prompt": user(SHOWN, "ab"), "images": [drawn(0)]},
    {"prompt": user(SHOWN, "ab"), "images": [drawn(3)]},
    {"prompt": user(SHOWN, SHOWN, "a", SHOWN), "images": [drawn(0), drawn(1), drawn(2)]},
    *({"prompt": user("ab" * number), "images": []} for number in (1, 2, 3)),
    {"prompt": user(SHOWN, "b"), "images": [drawn(2)]},
]
"""Two batches; in the second one, most ranks have no image."""
FAMILIES = ("qwen2_5_vl", "llava_onevision", "smolvlm", "gemma3")
CASES = [(family, plan) for family in FAMILIES for plan in PLANS]


def brightness(
    prompts: Sequence[object], completions: Sequence[object], images: Sequence[Any], **columns: object
) -> list[float]:
    """Score how much a response's length differs from the brightness of its images."""
    scores = []
    for shown, completion in zip(images, completions, strict=True):
        bright = float(np.mean([np.asarray(image).mean() for image in shown])) if shown else 0.0
        scores.append(-abs(bright / 255 - len(str(completion)) / 100))
    return scores


def _train(family: str, plan: Any, steps: int = 2, world_size: int = 0, **options: Any) -> Outcome:
    module = runs.grpo(
        actor=tiny_vision_model(family), reference=tiny_vision_model(family, seed=1), reward=brightness,
        optimizer=partial(SGD, lr=0.5), tokenizer=tiny_processor(family), loss_average="sequence",
    )  # fmt: skip
    data = PromptDataModule(ROWS, batch_size=4, shuffle=False)
    trainer = runs.trainer(
        plan if isinstance(plan, ReallocStrategy) else ReallocStrategy(plan),
        world_size or runs.world_size(),
        callbacks=[record := runs.Record(), *options.get("callbacks", ())], max_epochs=-1, max_steps=steps,
        enable_checkpointing="callbacks" in options,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=options.get("resume"))
    weights = trainer.strategy.full_weights("actor")
    return Outcome(record.logged, record.steps, weights, module.tokens, module.rewards)


@pytest.mark.parametrize(("family", "plan"), matrix(CASES, ("qwen2_5_vl", "fsdp")))
def test_rows_with_images_train_alike_in_every_layout(workers: WorkerPool, family: str, plan: str) -> None:
    (alone,) = workers.run(_train, family, "heuristic", world_size=1, init_process_group=False)
    assert len({str(rewards) for rewards in alone.rewards[0]}) > 1

    everyone = workers.run(_train, family, PLANS[plan], init_process_group=False, deadline_s=150.0)

    runs.check_equal_to_one_rank(everyone, alone)


def _refuse() -> str:
    """Return the error of a run whose reference reads text alone."""
    module = runs.grpo(actor=tiny_vision_model("llava"), tokenizer=tiny_processor("llava"))
    with pytest.raises(ConfigError) as raised:
        runs.trainer(ReallocStrategy(), 1, max_steps=1).fit(module, PromptDataModule(ROWS, batch_size=4))
    assert module.tokens == []
    return str(raised.value)


def test_a_reference_of_text_is_refused_before_the_first_step(workers: WorkerPool) -> None:
    (error,) = workers.run(_refuse, world_size=1, init_process_group=False)

    assert "LlamaForCausalLM.forward has no argument 'pixel_values'" in error


class Again(MessageEnvironment):
    """Asks a second time, and then rewards the width of the row's image."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.row, self.is_over = row, False

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Ask again once."""
        if self.is_over:
            return StepResult(reward=float(self.row["images"][0].width), done=True)
        self.is_over = True
        return StepResult([{"role": "user", "content": "b"}])


def _converse() -> list[float]:
    """Return the rewards of two conversations about each of two images."""
    module = runs.grpo(
        actor=tiny_vision_model("llava"),
        reference=tiny_vision_model("llava"),
        tokenizer=tiny_processor("llava"),
        reward=None,
        environment=Again,
        conversation=Conversation(max_turns=3),
        sampling=SamplingParams(n=2, max_new_tokens=40, stop_token_ids=tuple(range(3, 99))),
    )
    rows = [{"prompt": user(SHOWN, "ab"), "images": [drawn(number)]} for number in (0, 1)]
    runs.trainer(ReallocStrategy(), 1, max_steps=1).fit(module, PromptDataModule(rows, batch_size=2))
    return [reward for rewards in module.rewards for reward in rewards]


def test_an_environment_sees_the_images_of_its_row(workers: WorkerPool) -> None:
    (rewards,) = workers.run(_converse, world_size=1, init_process_group=False)

    assert {0.0, 16.0, 40.0} >= set(rewards)
    assert set(rewards) & {16.0, 40.0}


def _resume(folder: str, staleness: int) -> tuple[Outcome, Outcome]:
    """Return a run of an epoch, and one from its checkpoint in the middle."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    straight = _train("llava", ReallocStrategy(max_staleness=staleness), 2, 1, callbacks=[saving])
    return straight, _train(
        "llava", ReallocStrategy(max_staleness=staleness), 2, 1, resume=f"{folder}/step=1.ckpt"
    )  # fmt: skip


@pytest.mark.parametrize("staleness", matrix([0, 1], 1))
def test_a_batch_with_images_waits_in_a_checkpoint(workers: WorkerPool, tmp_path: Path, staleness: int) -> None:
    ((straight, resumed),) = workers.run(_resume, str(tmp_path), staleness, world_size=1, init_process_group=False)

    assert len(resumed.logged) == 1
    assert resumed.logged == straight.logged[-1:]
    assert runs.largest_difference(resumed.weights, straight.weights) == 0
