"""User script for the tests of SIGTERM: fit GRPO on two devices, and save a checkpoint on interruption.

Its arguments are the strategy and a folder: rank 0 writes a file there once training is under way.
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

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Write the file after two iterations."""
        time.sleep(0.05)
        if trainer.global_step == 2 and trainer.is_global_zero:
            (self.folder / "under way").touch()


def main(strategy: str, folder: Path) -> None:
    """Fit for longer than the test waits."""
    callbacks = [Pace(folder), OnExceptionCheckpoint(folder)]
    runs.trainer(strategy, 2, callbacks=callbacks, max_epochs=10_000, enable_checkpointing=True).fit(
        runs.grpo(), Batches(2)
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
