"""A plain log has a summary, a line per iteration, a warning of flat rewards, and the way to resume."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_realloc import GenerationOptions
from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.callbacks import run_log
from lightning_realloc.callbacks.run_log import RemainingTime, RunLog, format_duration
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import CheckpointError, RankLost
from lightning_realloc.generation import Conversation, SamplingParams
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.messages.failure_store import STORE_LOST
from lightning_realloc.strategies.lightning.failures import log_way_to_resume
from lightning_realloc.strategies.realloc import ReallocStrategy
from lightning_realloc.strategies.run_summary import _first_iterations_line, _shortage
from tests.environments.guessing import chat_model, chat_tokenizer, is_even, words_as_calls
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
    # Tests before this one in the same process may have set levels and filters: the demo hides all but its steps.
    level, filters = logger.level, logger.filters
    logger.setLevel(logging.INFO)
    logger.filters = []
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.filters = filters


def told(module: Any, data: Any, *, plan: Any = "heuristic", world_size: int = 1, **options: Any) -> list[str]:
    """Return the messages of a run."""
    found: list[str] = []
    with messages(found):
        runs.trainer(ReallocStrategy(plan), world_size, **{**LOUD, **options}).fit(module, data)
    return found


def lines(found: Sequence[str]) -> list[str]:
    """Return the lines of iterations."""
    return [text for text in found if re.match(r"step \d+", text)]


SMALL = runs.calls(actor_train={"layout": "fsdp2", "micro_batch_tokens": 64}, actor_infer="fsdp2")


def logs() -> dict[str, list[str]]:
    """Return the messages of a run with a line of every iteration, and of one with few lines."""
    world_size = runs.world_size()
    prompts = PromptDataModule(PROMPTS, batch_size=2, val_data=PROMPTS[:2], tokenizer=byte_tokenizer())
    return {
        "every": told(
            runs.grpo(accuracy=Accuracy(threshold=0.5)),
            prompts,
            world_size=world_size,
            callbacks=[RunLog(0.0)],
            max_steps=3,
            val_check_interval=2,
        ),
        "seldom": told(runs.sft(), Batches(4, responses=True), plan=SMALL, world_size=world_size, max_steps=4),
    }


def short_logs() -> dict[str, list[str]]:
    """Return the messages of runs of one iteration."""
    agent = runs.grpo(
        actor=chat_model(), reference=chat_model(1), tokenizer=chat_tokenizer(), tools=[is_even], parser=words_as_calls,
        conversation=Conversation(max_turns=3), sampling=SamplingParams(n=2, max_new_tokens=6),
    )  # fmt: skip
    return {
        "no lines": told(runs.sft(), Batches(1, responses=True), max_steps=1, enable_progress_bar=False),
        "agent": told(agent, PromptDataModule(PROMPTS, batch_size=2), max_steps=1),
        "no summary": told(runs.sft(), Batches(1, responses=True), max_steps=1, enable_model_summary=False),
    }


def test_a_plain_log_has_a_summary_and_a_line_per_iteration(workers: WorkerPool) -> None:
    both, second = workers.run(logs, world_size=2, init_process_group=False)
    (alone,) = workers.run(short_logs, world_size=1, init_process_group=False)
    first = {**both, **alone}
    assert not any(lines(found) or any("models: " in text for text in found) for found in second.values())
    number, seconds = r"-?[0-9.e+-]+", r"\d+(\.\d+)?s"
    every = lines(first["every"])
    assert [line.split("  ")[0] for line in every] == ["step 1/3", "step 2/3", "step 2/3", "step 3/3"]
    times = "".join(rf"({name} {seconds} ?)?" for name in ("gen", "infer", "compute", "train"))
    for line in (every[0], every[1], every[3]):
        assert re.fullmatch(
            rf"step \d/3  reward {number}  kl {number}  len \d+  {times}(idle \d+%)?  \d+ tok/s", line
        ), line
        assert "gen " in line and "train " in line, line
    assert "val/reward " in every[2] and "len " not in every[2]
    assert re.search(rf"  val/accuracy {number} \({number}-{number}\)  ", every[2]) and "/low" not in every[2]
    seldom = lines(first["seldom"])
    assert [line.split("  ")[0] for line in seldom] == ["step 1/4", "step 4/4"]
    assert all(re.match(rf"step ./4  loss {number}  len \d+  train ", line) for line in seldom)
    assert any("actor.train {layout: fsdp2@0-1, micro_batch_tokens: 64}" in text for text in first["seldom"])
    assert not lines(first["no lines"]) and lines(first["no summary"])
    assert not any("models: " in text for text in first["no summary"])
    assert any("  a response: at most 3 turns; tools: is_even\n" in text for text in first["agent"])
    (summary,) = (text for text in first["every"] if "models: " in text)
    assert re.sub(r"(?<=peak of )[0-9]+ MiB|(?<=has )[0-9.]+ GiB|(?<=in )[a-z.]+(?=;)", "?", summary).splitlines() == [
        "RecordedGRPO on 2 cpu ranks, precision 32-true, from step 0 of 3",
        "  models: actor 90.4k (90.4k trained), reference 90.4k",
        "  plan: actor.generate dp2@0-1, actor.train fsdp2@0-1, reference.infer dp2@0-1",
        "  memory: forecast peak of ? on rank 0 in ?; a device has ?",
        "  an iteration: 2 prompts x 2 responses = 4 samples, at most 6 tokens each, 1 optimizer step of actor",
        "  loss: kl=KL(coef=0.04, estimator='k3', place='loss', target=None, gain=None), ratio_level=token, "
        "ratio_to=behaviour, loss_average=sequence",
        "  learning rate: actor 0.01, constant",
        "  other than TRL's default (in brackets): kl_coef=0.04 (0.0), loss_average=sequence (token), "
        "sampling.max_new_tokens=6 (512), constant learning rate (linear decay)",
        "  checkpoints: none",
    ]


def test_the_summary_names_what_the_first_iterations_do_in_addition() -> None:
    def line_on(device: str, module: Any, *, layout: str = "dp1@0", keeps_graphs: bool = True) -> list[str]:
        facts = SimpleNamespace(device=torch.device(device))
        builder: Any = SimpleNamespace(module=module, dataflow=module.dataflow, facts=facts)
        plan = ExecutionPlan.static(module.dataflow, Layout.parse(layout))
        return list(_first_iterations_line(builder, plan, keeps_graphs=keeps_graphs))

    compiled = runs.grpo(train_options=runs.options(compile="eager"))
    captures = "decoding steps are captured as CUDA graphs (seconds in capture_s/actor.generate)"
    assert line_on("cpu", runs.grpo()) == line_on("cuda", runs.sft()) == []
    assert line_on("cuda", runs.grpo(generation=GenerationOptions(cuda_graphs=False))) == []
    assert line_on("cuda", runs.grpo(), keeps_graphs=False) == line_on("cuda", runs.grpo(), layout="fsdp2@0-1") == []
    assert line_on("cuda", runs.grpo(), layout="tp2@0-1") == []
    assert line_on("cuda", runs.grpo()) == [f"the first iterations take longer: {captures}"]
    blocks = "the first iterations take longer: blocks of actor are compiled (eager)"
    assert line_on("cpu", compiled) == [blocks]
    assert line_on("cuda", compiled) == [f"{blocks} and {captures}"]


def test_a_forecast_peak_that_does_not_fit_names_the_way_out() -> None:
    assert _shortage(8 << 30, 8 << 30) == ""
    assert _shortage(10 << 30, 8 << 30).startswith(
        "; 2.0 GiB too much for the longest samples: lightning-realloc plan "
    )


class SlowSave(Callback):
    """Saves a checkpoint after the second iteration."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save."""
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/saved")


def logs_of_saves(folder: str) -> list[str]:
    """Return the lines of a run that saves a checkpoint, which counts as long."""
    before, run_log.MIN_SECONDS_OF_PAUSE = run_log.MIN_SECONDS_OF_PAUSE, 0.0
    try:
        return lines(
            told(runs.sft(), Batches(5, responses=True), callbacks=[RunLog(0.0), SlowSave(folder)], max_steps=5)
        )
    finally:
        run_log.MIN_SECONDS_OF_PAUSE = before


def test_a_long_save_has_a_line_and_later_iterations_show_the_remaining_time(
    workers: WorkerPool, tmp_path: Path
) -> None:
    (found,) = workers.run(logs_of_saves, str(tmp_path), world_size=1, init_process_group=False)
    saves = [line for line in found if "save_checkpoint" in line]
    assert len(saves) == 1 and re.fullmatch(r"step 2/5  save_checkpoint \d+\.\ds", saves[0])
    assert ["eta" in line for line in found if line not in saves] == [False, False, True, True, False]


def test_the_remaining_time_is_the_median_iteration_with_the_mean_pause_between_two() -> None:
    left, now = RemainingTime(), 100.0
    # Iterations of 4 s, one of 60 s; pauses of 1 s, one of 6 s for a validation: 4 + (1 + 6 + 1) / 3 s a step.
    for seconds, pause in [(60.0, 1.0), (4.0, 6.0), (4.0, 1.0)]:
        assert left.seconds(10) is None
        left.begin(now)
        left.end(now + seconds, has_step=True)
        now += seconds + pause
    left.begin(now)
    assert left.seconds(10) == pytest.approx(10 * (4 + 8 / 3))


def test_a_batch_without_a_step_counts_for_the_next_step() -> None:
    left = RemainingTime()
    for number in range(6):  # each step takes two batches of 2 s
        left.begin(2.0 * number)
        left.end(2.0 * number + 2.0, has_step=number % 2 == 1)
    assert left.seconds(1) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (200, "3m20s"), (7800, "2h10m"), (3 * 86400 + 4 * 3600 + 59, "3d04h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


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


def test_another_rank_says_how_to_resume_only_if_rank_0_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    trainer: Any = SimpleNamespace(
        state=TrainerState(fn=TrainerFn.FITTING), ckpt_path=tmp_path, checkpoint_callbacks=[]
    )
    log_way_to_resume(trainer, RankLost("rank 2 was lost"))
    assert not caplog.messages
    for message in (f"{STORE_LOST}; rank 0 was last seen in actor.train", "rank 0 was lost in actor.train"):
        caplog.clear()
        log_way_to_resume(trainer, RankLost(message))
        assert caplog.messages == [f"To resume: trainer.fit(..., ckpt_path='{tmp_path}'), or --ckpt_path={tmp_path}"]


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
