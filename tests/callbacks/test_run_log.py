"""A plain log has a summary, a line per iteration, a warning of flat rewards, and the way to resume."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.callbacks.run_log import RunLog
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.errors import CheckpointError
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

LOUD: dict[str, Any] = {"enable_progress_bar": True, "enable_model_summary": True, "max_epochs": -1}
PROMPTS = [{"prompt": "ab" * length} for length in (1, 2, 3, 4)]


@contextmanager
def messages(found: list[str]) -> Any:
    """Collect the messages of Lightning's logger."""
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # tests before this one in the same process may have raised that of its parents
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def told(module: Any, data: Any, *, world_size: int = 1, **options: Any) -> list[str]:
    """Return the messages of a run."""
    found: list[str] = []
    with messages(found):
        runs.trainer("realloc", world_size, **{**LOUD, **options}).fit(module, data)
    return found


def lines(found: Sequence[str]) -> list[str]:
    """Return the lines of iterations."""
    return [text for text in found if re.match(r"step \d+", text)]


def logs() -> dict[str, list[str]]:
    """Return the messages of runs with several settings."""
    world_size = runs.world_size()
    prompts = PromptDataModule(PROMPTS, batch_size=2, val_data=PROMPTS[:2], tokenizer=byte_tokenizer())
    return {
        "every": told(
            runs.grpo(), prompts, world_size=world_size, callbacks=[RunLog(0.0)], max_steps=3, val_check_interval=2
        ),
        "seldom": told(runs.sft(), Batches(4, responses=True), world_size=world_size, max_steps=4),
        "no lines": told(
            runs.sft(), Batches(1, responses=True), world_size=world_size, max_steps=1, enable_progress_bar=False
        ),
        "no summary": told(
            runs.sft(), Batches(1, responses=True), world_size=world_size, max_steps=1, enable_model_summary=False
        ),
    }


def test_a_plain_log_has_a_summary_and_a_line_per_iteration(workers: WorkerPool) -> None:
    first, second = workers.run(logs, world_size=2, init_process_group=False)
    assert not any(lines(found) or any("models: " in text for text in found) for found in second.values())
    number = r"-?[0-9.e+-]+"
    every = lines(first["every"])
    assert [line.split(":")[0] for line in every] == ["step 1/3", "step 2/3", "step 2/3", "step 3/3"]
    for line in (every[0], every[1], every[3]):
        assert re.fullmatch(
            rf"step \d/3: reward {number}, actor/loss {number}, {number} s, {number} tokens/s, responses of \d+ to \d+ "
            r"tokens",
            line,
        ), line
    assert "val/reward " in every[2] and "actor/loss" not in every[2]
    assert [line.split(":")[0] for line in lines(first["seldom"])] == ["step 1/4", "step 4/4"]
    assert not lines(first["no lines"]) and lines(first["no summary"])
    assert not any("models: " in text for text in first["no summary"])
    (summary,) = (text for text in first["every"] if "models: " in text)
    assert re.sub(r"(?<=peak of )[0-9]+ MiB|(?<=has )[0-9.]+ GiB|(?<=in )[a-z.]+(?=;)", "?", summary).splitlines() == [
        "RecordedGRPO on 2 cpu ranks, precision 32-true, from step 0 of 3",
        "  models: actor 90.4k (90.4k trained), reference 90.4k",
        "  plan: actor.generate dp2@0-1, actor.train fsdp2@0-1, reference.infer dp2@0-1",
        "  memory: forecast peak of ? on rank 0 in ?; a device has ?",
        "  an iteration: 2 prompts x 2 responses = 4 samples, 1 optimizer step of actor",
        "  learning rate: actor 0.01, constant",
        "  other than TRL's default (in brackets): kl_coef=0.04 (0.0), loss_average=sequence (token), "
        "sampling.max_new_tokens=6 (512), constant learning rate (linear decay)",
        "  checkpoints: none",
    ]


class Failing(Callback):
    """Fails after two iterations."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Fail before the third iteration."""
        if trainer.global_step == 2:
            raise KeyError("on purpose")


def fail(folder: str) -> tuple[list[str], list[str]]:
    """Return the messages of failing runs, with checkpoints and without."""
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    both = []
    for options in ({"callbacks": [Failing(), saves], "enable_checkpointing": True}, {"callbacks": [Failing()]}):
        found: list[str] = []
        with messages(found), pytest.raises(KeyError, match="on purpose"):
            runs.trainer("realloc", 1, max_steps=4, **{"max_epochs": -1, **options}).fit(
                SFT(tiny_model("llama"), tokenizer=byte_tokenizer()), Batches(2, responses=True)
            )
        both.append(found)
    return both[0], both[1]


def test_a_failed_run_says_how_to_resume_where_there_is_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    ((saved, unsaved),) = workers.run(fail, str(tmp_path), world_size=1, init_process_group=False)
    (line,) = (text for text in saved if text.startswith("To resume"))
    path = re.fullmatch(r"To resume: trainer\.fit\(\.\.\., ckpt_path='(.*)'\), or --ckpt_path=\1", line)[1]  # type: ignore[index]
    assert Path(path).exists() and Path(path).parent == tmp_path
    assert not any(text.startswith("To resume") for text in unsaved)


def resume_from_damaged(folder: str) -> list[str]:
    """Return the messages of a run that resumes from a folder without the files of a checkpoint."""
    found: list[str] = []
    with messages(found), pytest.raises(CheckpointError, match=r"realloc\.json"):
        runs.trainer("realloc", 1, max_steps=4).fit(
            SFT(tiny_model("llama"), tokenizer=byte_tokenizer()), Batches(2, responses=True), ckpt_path=folder
        )
    return found


def test_a_damaged_checkpoint_is_not_recommended_to_resume_from(workers: WorkerPool, tmp_path: Path) -> None:
    (found,) = workers.run(resume_from_damaged, str(tmp_path), world_size=1, init_process_group=False)
    assert not any(text.startswith("To resume") for text in found)
