"""A run that resumes between two epochs takes the same steps as one that was not interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.demonstrations import SFTDataModule
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
    else:
        fit(first, ModelCheckpoint(dirpath=path, filename="{step}", save_top_k=-1), limits)
        saved, first.seen = path / f"step={EPOCH_STEPS}.ckpt", first.seen[:EPOCH_STEPS]
    return (*expected, whole.seen), (*fit(second, OnExceptionCheckpoint(path / "second"), limits, saved), [
        *first.seen, *second.seen
    ])  # fmt: skip


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 100}, {"max_steps": 5}], ids=str)
@pytest.mark.parametrize("how", ["sigterm", "epoch's end"])
def test_no_epoch_is_counted_without_batches(
    how: str, limits: dict[str, int], workers: WorkerPool, tmp_path: Path
) -> None:
    limits = {"max_epochs": -1, **limits}
    ((expected, found),) = workers.run(
        interrupted, how, limits, str(tmp_path), world_size=1, init_process_group=False, deadline_s=60.0
    )
    assert found == expected
