"""User script for the tests of SIGTERM: fit GRPO on two devices, and save a checkpoint on interruption.

Its arguments are the strategy and a folder: rank 0 writes a file there once training is under way. With a third
argument, all ranks write a file before training, and wait.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from tests.strategies import runs
from tests.strategies.runs import Batches


class Pace(Callback):
    """Signals that training has started, and delays iterations until SIGTERM arrives."""

    def __init__(self, folder: Path, *, waits_early: bool) -> None:
        self.folder = folder
        self.waits_early = waits_early

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Write a file before the first iteration, and wait there for the signal."""
        if self.waits_early:
            (self.folder / f"set up {trainer.global_rank}").touch()
            time.sleep(10.0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Write the file after two iterations, and idle between the later ones."""
        if trainer.global_step == 2 and trainer.is_global_zero:
            (self.folder / "under way").touch()
        if trainer.global_step >= 2:
            time.sleep(0.5)


def main(strategy: str, folder: Path, *, waits_early: bool) -> None:
    """Fit for longer than the test waits."""
    callbacks = [Pace(folder, waits_early=waits_early), OnExceptionCheckpoint(folder)]
    runs.trainer(strategy, 2, callbacks=callbacks, max_epochs=10_000, enable_checkpointing=True).fit(
        runs.grpo(), Batches(2)
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), waits_early=len(sys.argv) > 3)
