"""A user's script, for the tests of how runs end: one rank fails in the middle of training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from tests.strategies import runs
from tests.strategies.runs import Batches


class Overflow(Callback):
    """Lets rank 1 fail in the middle of a forward pass for which all ranks gather weights, and notes when."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Wait for the last block on one rank."""
        if trainer.global_rank == 1:
            pl_module.actor.model.layers[-1].register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        """Note the time, and fail."""
        self.note.write_text(str(time.time()))
        raise ArithmeticError("overflow")


if __name__ == "__main__":
    trainer = runs.trainer("realloc", 2, callbacks=[Overflow(Path(sys.argv[1]))])
    trainer.fit(runs.sft(), Batches(1, responses=True))
