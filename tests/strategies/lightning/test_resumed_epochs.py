"""A run that resumes between two epochs, or within one, takes the same steps as one that was not interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.demonstrations import SFTDataModule
from tests.matrices import matrix
from tests.strategies import runs
from tests.workers import WorkerPool

ROWS = [{"prompt": f"{number}+", "completion": str(number)} for number in range(4)]
EPOCH_STEPS = 2


class Rows(Callback):
    """Records the rows of every step, and sends SIGTERM at the end of the first epoch's last batch."""

    def __init__(self, *, is_stopped: bool = False) -> None:
        self.is_stopped = is_stopped
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Samples, *_: Any) -> None:
        """Record the ids."""
        self.seen.append(batch.ids.tolist())
        if self.is_stopped and trainer.global_step == EPOCH_STEPS:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(rows: Rows, saves: Callback, limits: dict[str, int], ckpt_path: Path | None = None) -> tuple[int, int]:
    """Return the steps and epochs of a run."""
    trainer = runs.trainer("realloc", 1, callbacks=[rows, saves], enable_checkpointing=True, **limits)
    module = runs.sft(actor=runs.tiny_model("llama", vocab_size=259))
    data = SFTDataModule(ROWS, batch_size=2, tokenizer=runs.byte_tokenizer())
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except SIGTERMException:
        assert rows.is_stopped
    return trainer.global_step, trainer.current_epoch


def interrupted(how: str, limits: dict[str, int], folder: str) -> Any:
    """Return steps, epochs and rows of a whole run, and of one that resumes after its first epoch."""
    path, whole, first, second = Path(folder), Rows(), Rows(is_stopped=how == "sigterm"), Rows()
    expected = fit(whole, OnExceptionCheckpoint(path / "unused"), limits)
    if how == "sigterm":
        fit(first, OnExceptionCheckpoint(path), limits)
        saved = path / "on_exception.ckpt"
    elif how == "within an epoch":
        fit(first, ModelCheckpoint(dirpath=path, save_last=True), {"max_epochs": -1, "max_steps": EPOCH_STEPS + 1})
        saved = path / "last.ckpt"
    else:
        fit(first, ModelCheckpoint(dirpath=path, filename="{step}", save_top_k=-1), limits)
        saved, first.seen = path / f"step={EPOCH_STEPS}.ckpt", first.seen[:EPOCH_STEPS]
    return (*expected, whole.seen), (*fit(second, OnExceptionCheckpoint(path / "second"), limits, saved), [
        *first.seen, *second.seen
    ])  # fmt: skip


LIMITS: list[dict[str, int]] = [{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 100}, {"max_steps": 5}]
CASES = [
    *((how, limits) for how in ("sigterm", "epoch's end") for limits in LIMITS),
    ("within an epoch", {"max_steps": 5}),
]


@pytest.mark.parametrize(("how", "limits"), matrix(CASES, *(CASES[number] for number in (0, 2, 4, 6))), ids=str)
def test_no_epoch_is_counted_without_batches(
    how: str, limits: dict[str, int], workers: WorkerPool, tmp_path: Path
) -> None:
    limits = {"max_epochs": -1, **limits}
    ((expected, found),) = workers.run(
        interrupted, how, limits, str(tmp_path), world_size=1, init_process_group=False, deadline_s=60.0
    )
    assert found == expected


class Counted(L.LightningModule):
    """Records the index and epoch of every batch, and the start of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[object] = []

    def on_train_epoch_start(self) -> None:
        """Record an epoch's start."""
        self.seen.append("start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Record the batch, and return a loss."""
        self.seen.append((self.current_epoch, batch_idx))
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches_after_three_steps(strategy: str, folder: str) -> Any:
    """Return steps, epochs and batches of a plain module that ended in the middle of an epoch of 8 and resumes."""
    module = Counted()
    for last_step, resumed in ((3, None), (12, f"{folder}/{strategy}/last.ckpt")):
        saves = ModelCheckpoint(dirpath=f"{folder}/{strategy}", save_last=True)
        limits = {"max_epochs": -1, "max_steps": last_step}
        trainer = runs.trainer(strategy, 1, callbacks=[saves], enable_checkpointing=True, **limits)
        trainer.fit(module, DataLoader(torch.arange(8.0)), ckpt_path=resumed)
    return trainer.global_step, trainer.current_epoch, module.seen


def test_a_plain_module_resumes_within_an_epoch_as_under_strategies_of_lightning(
    workers: WorkerPool, tmp_path: Path
) -> None:
    # Batches 0 to 2, then 3 to 7 of the same epoch, then 0 to 3 of the next one.
    within = [(0, index) for index in range(8)]
    expected = (12, 2, ["start", *within, "start", *[(1, index) for index in range(4)]])
    for strategy in ("auto", "realloc"):
        (found,) = workers.run(
            batches_after_three_steps, strategy, str(tmp_path), world_size=1, init_process_group=False
        )
        assert found == expected, strategy
