"""Lightning's hooks, logs, callbacks, loggers, loops and step counts work while calls run as phases."""

from __future__ import annotations

import csv
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import pack_columns
from lightning_realloc.callbacks import PhaseCallback
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

PLAN = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2")
HALVING = partial(StepLR, step_size=1, gamma=0.5)
DESCENT = partial(SGD, lr=0.5)


class Watcher(PhaseCallback):
    """Records every hook, and logs from it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_phase_start(self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str) -> None:
        """Record the phase, and log."""
        self.events.append(f"start {phase}")
        if not trainer.predicting:
            pl_module.log(f"callback/{phase}", float(len(self.events)))

    def on_phase_end(self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str) -> None:
        """Record the phase."""
        self.events.append(f"end {phase}")

    def on_reallocate(
        self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Record the bytes that moved and the least possible number."""
        self.events.append(f"moved for {phase}")
        assert report.bytes_moved >= report.bytes_minimum > 0


class Hooked(runs.RecordedGRPO):
    """GRPO with a phase hook of its own."""

    def on_phase_end(self, phase: str) -> None:
        """Log from the module."""
        if not self.trainer.predicting:
            self.log(f"module/{phase}", 3.0)


def hooked(**settings: Any) -> Hooked:
    """Return GRPO with two mini-batches and a schedule."""
    return Hooked(
        tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), optimizer=DESCENT,
        lr_scheduler=HALVING, train_options=runs.options(num_minibatches=2), **settings,
    )  # fmt: skip


def run_every_loop(folder: str) -> dict[str, Any]:
    """Fit with callbacks and loggers; then validate, test and predict, and continue the fit."""
    world_size = runs.world_size()
    watcher, module = Watcher(), hooked()
    held_out = Batches(1, size=3, seed=5)
    checkpoint = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints", monitor="val/reward", mode="max", filename="{epoch}-{step}"
    )
    callbacks = [
        watcher, checkpoint, EarlyStopping("val/reward", mode="max", patience=3), LearningRateMonitor("step"),
        EarlyStopping("val/rewards", strict=False), RichProgressBar(),
    ]  # fmt: skip
    trainer = runs.trainer(
        runs.ReallocStrategy(PLAN), world_size, callbacks=callbacks, max_epochs=2, num_sanity_val_steps=1,
        logger=[CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard")], log_every_n_steps=1,
        enable_progress_bar=True, enable_checkpointing=True,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Batches(2), held_out)
    found: dict[str, Any] = {
        "events": watcher.events,
        "logged": runs.numbers(trainer.logged_metrics),
        "steps": trainer.global_step,
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "best": Path(checkpoint.best_model_path).name,
    }
    found["validated"] = trainer.validate(module, held_out, verbose=False)
    found["tested"] = trainer.test(module, held_out, verbose=False)
    found["predicted"] = [samples.ragged("response_ids").to_lists() for samples in trainer.predict(module, held_out)]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, Batches(2), held_out)
    found["steps after more"] = trainer.global_step
    if trainer.is_global_zero:
        monitors = [text for one in caught if "waits for a metric" in (text := str(one.message))]
        Path(folder, "monitors.txt").write_text("\n".join(monitors))
    return found


def warnings_of_saving(folder: str) -> list[str]:
    """Return warnings about manual optimization in a run that saves after each of two steps."""
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runs.trainer("realloc", 1, callbacks=[checkpoint], enable_checkpointing=True).fit(
            runs.sft(), Batches(2, responses=True)
        )
    assert len(list(Path(folder).glob("*.ckpt"))) == 2
    return [str(warning.message) for warning in seen if "manual optimization" in str(warning.message)]


def test_saving_after_steps_brings_no_advice_about_manual_optimization(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(warnings_of_saving, str(tmp_path), world_size=1, init_process_group=False) == [[]]


@pytest.fixture(scope="module")
def every_loop(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Results of `run_every_loop` on both ranks, and its folder."""
    folder = tmp_path_factory.mktemp("runs")
    found = workers.run(run_every_loop, str(folder), world_size=2, init_process_group=False, deadline_s=120.0)
    return found, folder


def test_ranks_agree_on_everything(every_loop: tuple[list[dict[str, Any]], Path]) -> None:
    (first, second), _ = every_loop
    assert first == second


def test_phase_hooks_run_in_order_and_weights_move_once_per_change(
    every_loop: tuple[list[dict[str, Any]], Path],
) -> None:
    events = every_loop[0][0]["events"]
    generate = ["start actor.generate", "end actor.generate"]
    rest = ["start reference.infer", "end reference.infer", "start actor.train", "end actor.train"]
    moved = ["moved for actor.generate"]
    # The sanity check moves fresh weights, so the first iteration has nothing to move.
    first_epoch = [*moved, *generate, *generate, *rest, *moved, *generate, *rest]
    second_epoch = [*moved, *generate, *generate, *rest, *moved, *generate, *rest]
    # Validation follows each epoch and moves the weights of the next iteration.
    fit = [*first_epoch, *second_epoch, *moved, *generate]
    assert events[: len(fit)] == fit


def test_metrics_from_phase_hooks_are_logged(every_loop: tuple[list[dict[str, Any]], Path]) -> None:
    (found, _), folder = every_loop
    for phase in ("actor.generate", "reference.infer", "actor.train"):
        assert f"callback/{phase}" in found["logged"]
        assert found["logged"][f"module/{phase}"] == 3.0
    with next(folder.glob("csv/*/metrics.csv")).open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    iterations = [row for row in rows if "actor/loss" in row]
    assert [int(row["step"]) for row in iterations] == [0, 1, 2, 3, 4, 5]
    assert all(
        {"callback/actor.train", "module/actor.train", "seconds/actor.generate"} <= row.keys() for row in iterations
    )
    rates = [float(row["lr/actor"]) for row in rows if "lr/actor" in row]
    # Another fit makes new optimizers and schedules, as under any strategy.
    assert rates == [0.5, 0.25, 0.125, 0.0625, 0.5, 0.25]
    assert list(folder.glob("tensorboard/*/events*"))


def test_an_iteration_is_one_step_for_any_number_of_mini_batches(every_loop: tuple[list[dict[str, Any]], Path]) -> None:
    found = every_loop[0][0]
    assert found["steps"] == 4
    assert found["steps after more"] == 6
    # Halved once per iteration, four times: 0.5 / 16.
    assert found["rates"] == [0.03125]
    assert found["best"] in ("epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt")
    (kept,) = (every_loop[1] / "checkpoints").iterdir()
    assert kept.name in (found["best"], "epoch=2-step=6.ckpt")


def test_validation_test_and_prediction_see_the_same_model(every_loop: tuple[list[dict[str, Any]], Path]) -> None:
    found = every_loop[0][0]
    (validated,), (tested,) = found["validated"], found["tested"]
    assert validated["val/reward"] == pytest.approx(found["logged"]["val/reward"])
    assert tested["test/reward"] == pytest.approx(validated["val/reward"])
    (predicted,) = found["predicted"]
    assert len(predicted) == 3
    assert sum(runs.low_tokens(predicted)) / 3 == pytest.approx(validated["val/reward"])


def test_a_monitored_metric_that_no_validation_logs_is_named_before_training(
    every_loop: tuple[list[dict[str, Any]], Path],
) -> None:
    (warning,) = (every_loop[1] / "monitors.txt").read_text().splitlines()
    assert warning.startswith("EarlyStopping(monitor='val/rewards') waits for a metric that the validation before")
    assert ", val/reward, " in warning


class HandWritten(SFT):
    """An algorithm with its own training step, which uses the strategy's phases."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.gaps: list[float] = []

    def training_step(self, batch: Samples, batch_idx: int) -> None:
        """Score in one layout, train in another, and measure whether both hold the same weights."""
        packed = pack_columns(batch, self.device)
        with self.trainer.strategy.phase("actor.infer") as copy, torch.no_grad():
            scored = token_logprobs(copy, packed, only_responses=True).logprobs
        optimizer = self.optimizers()
        with self.trainer.strategy.phase("actor.train") as actor:
            logprobs = token_logprobs(actor, packed, only_responses=True).logprobs
            self.gaps.append(float((logprobs.detach() - scored).abs().max()))
            self.manual_backward(-logprobs.mean())
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", -logprobs.mean())


def train_by_hand() -> tuple[list[float], list[str], int]:
    """Return the difference between the log-probabilities of two layouts, the events, and the step count."""
    watcher = Watcher()
    module = HandWritten(tiny_model("llama"), tokenizer=byte_tokenizer(), optimizer=DESCENT)
    strategy = runs.ReallocStrategy(calls(actor_train="fsdp2", actor_infer="tp2"))
    trainer = runs.trainer(strategy, runs.world_size(), callbacks=[watcher])
    trainer.fit(module, Batches(3, responses=True))
    return module.gaps, watcher.events, trainer.global_step


def test_a_hand_written_step_finds_current_weights_in_every_phase(workers: WorkerPool) -> None:
    for gaps, events, steps in workers.run(train_by_hand, world_size=2, init_process_group=False):
        assert len(gaps) == steps == 3
        assert max(gaps) < 1e-5
        one = ["moved for actor.infer", "start actor.infer", "end actor.infer", "start actor.train", "end actor.train"]
        assert events == one * 3


def go_on_with_another_trainer() -> tuple[tuple[int, int], float, float, str]:
    """Return the steps of two Trainers, the rewards that both validate, and the error of a third with another plan."""
    module, held_out = hooked(), Batches(1, size=3, seed=5)
    world_size = runs.world_size()
    first = runs.trainer(
        runs.ReallocStrategy(PLAN), world_size, max_steps=3, max_epochs=-1, callbacks=[TQDMProgressBar()],
        enable_progress_bar=True,
    )  # fmt: skip
    first.fit(module, Batches(2))
    (before,) = first.validate(module, held_out, verbose=False)
    second = runs.trainer(runs.ReallocStrategy(PLAN), world_size)
    (after,) = second.validate(module, held_out, verbose=False)
    second.fit(module, Batches(2))
    with pytest.raises(ConfigError) as caught:
        runs.trainer("realloc-static", world_size).fit(module, Batches(1))
    return (first.global_step, second.global_step), before["val/reward"], after["val/reward"], str(caught.value)


def seconds_of_supervised_training() -> set[str]:
    """Return the names of the logged seconds in an iteration after a validation."""
    trainer = runs.trainer(runs.ReallocStrategy(), 1, num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(runs.sft(), Batches(2, responses=True), Batches(1, responses=True))
    return {name for name in trainer.logged_metrics if name.startswith("seconds/")}


def test_only_calls_that_ran_are_timed(workers: WorkerPool) -> None:
    (names,) = workers.run(seconds_of_supervised_training, world_size=1, init_process_group=False)
    assert names == {"seconds/actor.train"}


def test_max_steps_counts_iterations_and_another_trainer_continues_the_models(workers: WorkerPool) -> None:
    for steps, before, after, refusal in workers.run(
        go_on_with_another_trainer, world_size=2, init_process_group=False
    ):
        assert steps == (3, 2)
        assert after == before
        assert "the models were laid out by an earlier Trainer" in refusal
        assert "build the LightningModule anew" in refusal


class Storage(PhaseCallback):
    """Compares the model that generates with the model that trains."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool, bool]] = []

    def on_phase_end(self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str) -> None:
        """Record whether FSDP wraps each of the two, and whether they share storage."""
        if phase == "actor.generate":
            pool: Any = trainer.strategy.pool  # type: ignore[attr-defined]
            home, used = pool.home("actor").model, pool.target(phase).model
            pointers = [{n: t.data_ptr() for n, t in local_tensors(model).items()} for model in (home, used)]
            self.seen.append((isinstance(home, FSDPModule), isinstance(used, FSDPModule), pointers[0] == pointers[1]))


def _generates_where_copies_are_trained() -> tuple[list[tuple[bool, bool, bool]], Any, Any]:
    storage, same = Storage(), calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2")
    trained_apart = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2")
    outcomes = [
        runs.train(runs.grpo(optimizer=DESCENT), plan, 2, Batches(2), callbacks=[storage])
        for plan in (same, trained_apart)
    ]
    return storage.seen[:2], outcomes[0].tokens, outcomes[1].tokens


def test_generation_in_replicated_layouts_bypasses_fsdp_and_shares_weights(workers: WorkerPool) -> None:
    seen, tokens, expected = workers.run(_generates_where_copies_are_trained, world_size=2, init_process_group=False)[0]
    assert seen == [(True, False, True)] * 2
    assert tokens == expected, "the second iteration's tokens come from trained weights"
