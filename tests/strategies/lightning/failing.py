"""User script for the tests of failures: training fails on all ranks, one rank fails, or one rank is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.strategies import runs
from tests.strategies.runs import Batches


class Overflow(Callback):
    """Makes rank 1 fail inside a forward pass in which all ranks gather weights, and records the time."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Make the last block fail on one rank."""
        if trainer.global_rank == 1:
            pl_module.actor.model.layers[-1].register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        """Record the time, and fail."""
        self.note.write_text(str(time.time()))
        raise ArithmeticError("overflow")


class Late(Callback):
    """Makes rank 1 fail once training is over."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Fail after the other rank may have ended."""
        if trainer.global_rank == 1:
            time.sleep(1.0)
            raise ArithmeticError("overflow")


class EndFirst:
    """Ends rank 0 as if killed, in the second iteration, while rank 1 computes rewards for longer than it may."""

    def __init__(self) -> None:
        self.num_calls = 0

    def judge(self, completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        """Reward nothing, and end or sleep in the second call."""
        self.num_calls += 1
        if self.num_calls == 2 and int(os.environ.get("LOCAL_RANK", "0")):
            time.sleep(100.0)
        elif self.num_calls == 2:
            os._exit(9)
        return [0.0 for _ in completion_ids]


class Leave:
    """Ends rank 1 by ``sys.exit(0)``, or pauses both ranks in an iteration, and records the time."""

    def __init__(self, note: Path, *, pauses: bool) -> None:
        self.note, self.pauses = note, pauses

    def judge(self, completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        """Record the process id and wait, or record the time on rank 1 and exit."""
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.pauses:
            self.note.with_name(f"{self.note.name}{rank}").write_text(str(os.getpid()))
            time.sleep(100.0)
        elif rank == 1:
            self.note.write_text(str(time.time()))
            sys.exit(0)
        return [0.0 for _ in completion_ids]


def main(mode: str, note: Path) -> None:
    """Fit on two devices: ``alike`` asks for more mini-batches than there are samples, ``alone`` fails on rank 1.

    ``late`` fails on rank 1 after training, and ``orphan`` kills rank 0 before rank 1 joins the process group.
    ``killed`` ends rank 0, which started rank 1, without any output but a checkpoint.
    ``left`` calls ``sys.exit(0)`` on rank 1, and ``paused`` waits in an iteration.
    """
    if mode in ("left", "paused"):
        runs.trainer("realloc", 2).fit(runs.grpo(reward=Leave(note, pauses=mode == "paused").judge), Batches(1))
        return
    if mode == "killed":
        saves = ModelCheckpoint(note, every_n_train_steps=1)
        trainer = runs.trainer("realloc", 2, callbacks=[saves], enable_checkpointing=True)
        trainer.fit(runs.grpo(reward=EndFirst().judge), Batches(2))
        return
    if mode == "orphan" and os.environ.get("LOCAL_RANK") == "1":
        note.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
    options = runs.options(num_minibatches=9 if mode == "alike" else 1)
    callbacks: dict[str, list[Callback]] = {"alone": [Overflow(note)], "late": [Late()]}
    trainer = runs.trainer("realloc", 2, callbacks=callbacks.get(mode, []))
    trainer.fit(runs.sft(train_options=options), Batches(1, responses=True))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
