"""A signal to one rank or to all ends every rank after the same iteration, with a checkpoint if one is configured."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.signals import (
    SIGTERM_EXIT_CODE,
    STOP_SIGNALS,
    StopRequest,
    forward_no_signals,
    has_handler,
    signals_forwarded,
)
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.lightning.test_failures import wait_until
from tests.strategies.lightning.test_launchers import end, start
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

SCRIPT = str(Path(__file__).with_name("terminated.py"))
SIGNALLED_AFTER = 2
DEADLINE_S = 30.0
"""Seconds from the signal to the end of all processes."""


class Signal(Callback):
    """Sends a signal to this process in a given hook, if its rank is one of ``ranks``."""

    def __init__(self, ranks: tuple[int, ...], hook: str = "on_train_batch_end", signum: int = signal.SIGTERM) -> None:
        self.ranks = ranks
        self.signum = signum
        setattr(self, hook, self._send)

    def _send(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step >= SIGNALLED_AFTER:
            os.kill(os.getpid(), self.signum)


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


def fit_until_stopped(
    case: str, ranks: tuple[int, ...], folder: str, hook: str, signum: int = signal.SIGTERM
) -> Stopped:
    """Fit until a signal ends it; return the last step and the exception."""
    make, data, options = CASES[case]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start jobs in the background without it
    callbacks = [OnExceptionCheckpoint(folder), Signal(ranks, hook, signum)]
    trainer = runs.trainer(
        ReallocStrategy(**options),
        runs.world_size(),
        callbacks=callbacks,
        max_epochs=50,
        check_val_every_n_epoch=2,
        enable_checkpointing=True,
    )
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.getsignal(each) for each in signals]
    with pytest.raises(SIGTERMException) as stopped:
        trainer.fit(make(), data(), data() if hook == "on_validation_batch_start" else None)
    assert [signal.getsignal(each) for each in signals] == handlers
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


@pytest.mark.parametrize(
    ("case", "ranks"),
    matrix(
        ((case, ranks) for case in CASES for ranks in ((1,), (0, 1))),
        *((case, (1,)) for case in CASES if case not in ("none", "stale", "trained alone")),
        ("plain", (0, 1)),
    ),
)
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
    if case == "stale":  # within an epoch a batch waits to be trained on
        assert "waiting_batches" in torch.load(tmp_path / "on_exception.ckpt" / "meta.pt", weights_only=True)


@pytest.mark.parametrize(
    ("case", "signum", "exit_code"),
    matrix(
        [(case, *each) for case in ("iterations", "plain") for each in ((signal.SIGINT, 130), (signal.SIGUSR1, 138))],
        ("iterations", signal.SIGINT, 130),
        ("plain", signal.SIGUSR1, 138),
    ),
)
def test_ctrl_c_and_sigusr1_end_all_ranks_after_the_same_step_with_a_checkpoint(
    workers: WorkerPool, tmp_path: Path, case: str, signum: int, exit_code: int
) -> None:
    first, second = workers.run(
        fit_until_stopped, case, (1,), str(tmp_path), "on_train_batch_end", signum, world_size=2,
        init_process_group=False,
    )  # fmt: skip
    assert first == second
    assert (first.exit_code, first.has_checkpoint) == (exit_code, True)
    assert SIGNALLED_AFTER <= first.step <= SIGNALLED_AFTER + 2


def test_a_second_ctrl_c_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = runs.trainer("realloc", 1)
    stop = StopRequest()
    stop.handle_signals(trainer)
    press = stop._interrupt_handler(trainer)
    press(signal.SIGINT, None)
    press(signal.SIGINT, None)  # a launcher forwards what the terminal sent
    assert stop.requested == signal.SIGINT
    monkeypatch.setattr("lightning_realloc.strategies.lightning.signals.SAME_INTERRUPT_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        press(signal.SIGINT, None)


def fit_in_a_slurm_job(folder: str) -> tuple[int, list[str]]:
    """Fit until Slurm's warning to rank 1; fit again, and return its first step and the commands to the scheduler."""
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    slurm = {
        "JOB_ID": "4711",
        "JOB_NAME": "rlhf",
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": "0",
    }
    os.environ |= {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURM_NODELIST": "localhost"}
    os.environ |= {"MASTER_PORT": port, "PATH": f"{folder}:{os.environ['PATH']}"}
    record = runs.Record()

    def make(*callbacks: Callback) -> L.Trainer:
        slurm = SLURMEnvironment(auto_requeue=True)
        return runs.trainer(
            "realloc", 2, callbacks=list(callbacks), max_steps=5, max_epochs=-1, default_root_dir=folder,
            enable_checkpointing=True, plugins=[slurm],
        )  # fmt: skip

    with pytest.raises(SIGTERMException):
        make(Signal((1,), signum=signal.SIGUSR1)).fit(runs.sft(), Batches(2, responses=True))
    make(record).fit(runs.sft(), Batches(2, responses=True))
    return len(record.steps), Path(folder, "commands").read_text().splitlines()


def test_slurms_warning_saves_a_checkpoint_and_requeues_the_job(workers: WorkerPool, tmp_path: Path) -> None:
    scheduler = tmp_path / "scontrol"
    scheduler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\n')
    scheduler.chmod(0o755)

    first, second = workers.run(fit_in_a_slurm_job, str(tmp_path), world_size=2, init_process_group=False)

    assert first == second
    num_steps, commands = first
    assert commands == ["requeue 4711"]
    assert 5 - (SIGNALLED_AFTER + 2) <= num_steps <= 5 - SIGNALLED_AFTER


def test_sigterm_during_validation_ends_all_ranks_there(workers: WorkerPool, tmp_path: Path) -> None:
    stopped = workers.run(
        fit_until_stopped, "trained alone", (1,), str(tmp_path), "on_validation_batch_start", world_size=2,
        init_process_group=False,
    )  # fmt: skip
    assert stopped[0] == stopped[1]
    assert (stopped[0].step, stopped[0].has_checkpoint) == (4, True)


@pytest.mark.parametrize("case", ["iterations", "plain"])
def test_a_single_process_ends_after_the_iteration_of_the_signal_and_logs_why(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, data, _ = CASES[case]
    trainer = runs.trainer(
        "realloc",
        1,
        callbacks=[Signal((0,)), OnExceptionCheckpoint(tmp_path)],
        max_epochs=50,
        enable_checkpointing=True,
    )
    with pytest.raises(SIGTERMException) as stopped:
        trainer.fit(make(), data())
    assert (trainer.global_step, stopped.value.code) == (SIGNALLED_AFTER, SIGTERM_EXIT_CODE)
    assert (tmp_path / "on_exception.ckpt").exists()
    reasons = [record.getMessage() for record in caplog.records if "SIGTERM" in record.getMessage()]
    assert reasons == [f"this rank received SIGTERM: the run ends after step {SIGNALLED_AFTER}"]


def test_a_signal_after_the_last_iteration_ends_the_process_after_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    trainer = runs.trainer("realloc", 1, callbacks=[Signal((0,), "on_train_end")], max_epochs=2)
    trainer.fit(runs.sft(), Batches(2, responses=True))
    assert sent == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_rank_gets_the_handlers_from_before_the_forwarding() -> None:
    mine = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    launcher = runs.trainer("realloc_fork", 2).strategy.launcher
    with signals_forwarded(launcher):  # type: ignore[arg-type]
        assert not any(signal.getsignal(signum) in mine for signum in STOP_SIGNALS)
        forward_no_signals()  # as a forked process does
        assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == mine
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == mine


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigusr1_still_prints_stacks_if_faulthandler_is_registered_for_it(tmp_path: Path) -> None:
    assert not has_handler(signal.SIGUSR1)
    trainer, stop = runs.trainer("realloc_fork", 2), StopRequest()
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            assert has_handler(signal.SIGUSR1)
            stop.handle_signals(trainer)
            with signals_forwarded(trainer.strategy.launcher):  # type: ignore[arg-type]
                stop.handle_interrupts(trainer)
                signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert stop.requested == 0 and "most recent call first" in (tmp_path / "stacks").read_text()


def test_the_stop_request_is_removed_from_metrics() -> None:
    stop = StopRequest()
    assert stop.as_metrics() == {}
    stop.requested = signal.SIGTERM
    merged = {"loss": 1.0, **stop.as_metrics()}
    stop.pop_from(merged)
    assert merged == {"loss": 1.0} and stop.agreed == signal.SIGTERM


@CPU_ALONE
@pytest.mark.parametrize("strategy", matrix(["realloc", "realloc_spawn"], "realloc"))
def test_sigterm_to_the_launcher_ends_all_ranks_with_a_checkpoint(tmp_path: Path, strategy: str) -> None:
    started = start((SCRIPT, strategy, str(tmp_path)), tmp_path, tmp_path / "log", forks_ranks=True)
    try:
        assert wait_until((tmp_path / "under way").exists, 120.0)
        started.terminate()
        started.wait(timeout=DEADLINE_S)
        assert wait_until(lambda: not _is_group_alive(started.pid), DEADLINE_S)
    finally:
        end(started)
    log = (tmp_path / "log").read_text()[-3000:]
    assert started.returncode == SIGTERM_EXIT_CODE, log
    assert (tmp_path / "on_exception.ckpt").is_dir(), log


def test_sigterm_before_the_first_iteration_ends_forked_ranks_at_once(tmp_path: Path) -> None:
    caller = start((SCRIPT, "realloc_fork", str(tmp_path), "early"), tmp_path, tmp_path / "log")
    try:
        set_up = [tmp_path / f"set up {rank}" for rank in range(2)]
        assert wait_until(lambda: all(file.exists() for file in set_up), 120.0), (tmp_path / "log").read_text()
        caller.terminate()
        assert caller.wait(timeout=DEADLINE_S) == SIGTERM_EXIT_CODE
        assert wait_until(lambda: not _is_group_alive(caller.pid), DEADLINE_S)
    finally:
        end(caller)
    assert not (tmp_path / "under way").exists()


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
