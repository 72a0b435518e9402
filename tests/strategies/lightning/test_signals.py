"""SIGTERM to one rank or to all ends every rank after the same iteration, with a checkpoint if one is configured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.signals import SIGTERM_EXIT_CODE, StopRequest
from tests.strategies import runs
from tests.strategies.lightning.test_failures import TORCHRUN
from tests.strategies.lightning.test_launchers import end, shell_environment
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

SCRIPT = str(Path(__file__).with_name("terminated.py"))
SIGNALLED_AFTER = 3
DEADLINE_S = 30.0
"""Seconds from the signal to the end of all processes."""


class Signal(Callback):
    """Sends SIGTERM to this process in a given hook, if its rank is one of ``ranks``."""

    def __init__(self, ranks: tuple[int, ...], hook: str = "on_train_batch_end") -> None:
        self.ranks = ranks
        setattr(self, hook, self._send)

    def _send(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step >= SIGNALLED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)


class Plain(L.LightningModule):
    """A LightningModule that declares no calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def configure_model(self) -> None:
        """Do nothing; the model exists already."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return a loss."""
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stopped(NamedTuple):
    step: int
    exit_code: object
    has_checkpoint: bool


def fit_until_stopped(case: str, ranks: tuple[int, ...], folder: str, hook: str) -> Stopped:
    """Fit until SIGTERM ends it; return the last step and the exception."""
    make, data, options = CASES[case]
    callbacks = [OnExceptionCheckpoint(folder), Signal(ranks, hook)]
    trainer = runs.trainer(
        ReallocStrategy(**options),
        runs.world_size(),
        callbacks=callbacks,
        max_epochs=50,
        check_val_every_n_epoch=2,
        enable_checkpointing=True,
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as stopped:
        trainer.fit(make(), data(), data() if hook == "on_validation_batch_start" else None)
    assert signal.getsignal(signal.SIGTERM) is handler
    return Stopped(trainer.global_step, stopped.value.code, Path(folder, "on_exception.ckpt").exists())


Case = tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "iterations": (runs.grpo, lambda: Batches(2), {}),
    "none": (runs.grpo, lambda: Batches(2), {"overlap": "none"}),
    "stale": (runs.grpo, lambda: Batches(8), {"max_staleness": 1}),
    "trained alone": (runs.sft, lambda: Batches(2, responses=True), {}),
    "disjoint": (
        runs.grpo, lambda: Batches(2),
        {"plan": {"calls": {"actor.generate": "dp1@0-0", "reference.infer": "dp1@1-1", "actor.train": "dp1@0-0"}}},
    ),
    "plain": (Plain, lambda: torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2), {}),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("case", CASES)
def test_sigterm_ends_all_ranks_after_the_same_step_with_a_checkpoint(
    workers: WorkerPool, tmp_path: Path, case: str, ranks: tuple[int, ...]
) -> None:
    first, second = workers.run(
        fit_until_stopped, case, ranks, str(tmp_path), "on_train_batch_end", world_size=2, init_process_group=False
    )
    assert first == second
    assert first.exit_code == SIGTERM_EXIT_CODE == 143
    assert first.has_checkpoint
    assert SIGNALLED_AFTER <= first.step <= SIGNALLED_AFTER + 2


def test_sigterm_during_validation_ends_all_ranks_there(workers: WorkerPool, tmp_path: Path) -> None:
    stopped = workers.run(
        fit_until_stopped, "iterations", (1,), str(tmp_path), "on_validation_batch_start", world_size=2,
        init_process_group=False,
    )  # fmt: skip
    assert stopped[0] == stopped[1]
    assert (stopped[0].step, stopped[0].has_checkpoint) == (4, True)


def test_a_single_process_ends_after_the_iteration_of_the_signal(tmp_path: Path) -> None:
    trainer = runs.trainer(
        "realloc",
        1,
        callbacks=[Signal((0,)), OnExceptionCheckpoint(tmp_path)],
        max_epochs=50,
        enable_checkpointing=True,
    )
    with pytest.raises(SIGTERMException) as stopped:
        trainer.fit(runs.grpo(), Batches(2))
    assert (trainer.global_step, stopped.value.code) == (SIGNALLED_AFTER, SIGTERM_EXIT_CODE)
    assert (tmp_path / "on_exception.ckpt").exists()


def test_a_signal_after_the_last_iteration_ends_the_process_after_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    trainer = runs.trainer("realloc", 1, callbacks=[Signal((0,), "on_train_end")], max_epochs=2)
    trainer.fit(runs.grpo(), Batches(2))
    assert sent == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_stop_request_is_removed_from_metrics() -> None:
    stop = StopRequest()
    assert stop.as_metrics() == {}
    stop.is_requested = True
    merged = {"loss": 1.0, **stop.as_metrics()}
    stop.pop_from(merged)
    assert merged == {"loss": 1.0} and stop.is_agreed


COMMANDS = {
    "script": (SCRIPT, "realloc"),
    "torchrun": (*TORCHRUN, SCRIPT, "realloc"),
    "spawn": (SCRIPT, "realloc_spawn"),
}


@pytest.mark.slow
def test_sigterm_to_the_launcher_ends_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in COMMANDS}
    started = {}
    try:
        for name, folder in folders.items():
            folder.mkdir()
            with (folder / "log").open("w") as output:
                started[name] = subprocess.Popen(
                    [sys.executable, *COMMANDS[name], str(folder)], cwd=folder, env=shell_environment(), stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        for folder in folders.values():
            _wait_until((folder / "under way").exists, 120.0)
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(timeout=DEADLINE_S)
        _wait_until(lambda: not any(_is_group_alive(process.pid) for process in started.values()), DEADLINE_S)
    finally:
        for process in started.values():
            end(process)
    logs = {name: (folder / "log").read_text()[-3000:] for name, folder in folders.items()}
    codes = {name: process.returncode for name, process in started.items()}
    assert codes == {"script": SIGTERM_EXIT_CODE, "torchrun": 1, "spawn": SIGTERM_EXIT_CODE}, logs
    for name, folder in folders.items():
        assert (folder / "on_exception.ckpt").is_dir(), logs[name]


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
