"""One script trains to equal weights under every launcher."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_realloc.errors import ConfigError, RankLost, ReallocError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning import launchers
from lightning_realloc.strategies.lightning.last_checkpoint import InProcessLauncher
from lightning_realloc.strategies.lightning.process_group import end_process_group
from lightning_realloc.strategies.lightning.signals import SIGTERM_EXIT_CODE
from lightning_realloc.strategies.lightning.trainer_checks import check_started_processes, warn_of_stale_addresses
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.scripts import Script
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("launched.py"))
DEADLINE_S = 160.0


def shell_environment() -> dict[str, str]:
    """Return the environment variables of a shell, without those of other runs."""
    foreign = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "NODE_RANK", "TORCHELASTIC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(
    command: Sequence[str], folder: Path, log: Path, *, forks_ranks: bool = False
) -> Script | subprocess.Popen[bytes]:
    """Start a script, or a module of Python as ``-m module``, in ``folder`` as from a user's shell."""
    if command[0] != "-m":
        return Script(command, folder, shell_environment(), log, forks_ranks=forks_ranks)
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=shell_environment(), stderr=subprocess.STDOUT, stdout=output,
            start_new_session=True,
        )  # fmt: skip


def launch(folder: Path, *commands: tuple[str, ...]) -> None:
    """Run commands in parallel, each as from a user's shell."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    with contextlib.ExitStack() as stack:
        started = []
        for command, log in zip(commands, logs, strict=True):
            started.append(start(command, folder, log))
            stack.callback(end, started[-1])
        give_up_at = time.monotonic() + DEADLINE_S
        for process, log in zip(started, logs, strict=True):
            assert process.wait(timeout=give_up_at - time.monotonic()) == 0, log.read_text()[-6000:]


def end(process: Script | subprocess.Popen[bytes]) -> None:
    """Kill the processes of a command that are still running."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the results of both ranks, and of the process that called ``fit``."""
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    caller = json.loads((folder / "caller.json").read_text())
    for rank in ranks:
        assert (rank["world_size"], rank["steps"]) == (2, 2)
        assert rank["logged"] == ranks[0]["logged"]
    assert ranks[0]["process"] != ranks[1]["process"]
    return ranks, caller


def fit_here() -> tuple[dict[str, float], dict[str, float]]:
    """Return one rank's logged metrics, and the sums of its weights."""
    outcome = runs.train(runs.sft(), "heuristic", 1, Batches(2, responses=True))
    return outcome.logged[-1], {name: float(value.abs().sum()) for name, value in outcome.weights.items()}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
LAUNCHED: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "script": ((SCRIPT, "script", "realloc"), {"script/realloc": "ScriptLauncher"}),
    "fork": ((SCRIPT, "fork", "realloc_fork"), {"fork/realloc_fork": "FullStateLauncher"}),
    "torchrun": ((*TORCHRUN, SCRIPT, "torchrun", "realloc"), {"torchrun/realloc": "InProcessLauncher"}),
    "processes": (
        (SCRIPT, "processes", "realloc_fork", "alone", "realloc_spawn"),
        {"processes/realloc_spawn": "FullStateLauncher", "processes/realloc_fork": "FullStateLauncher"},
    ),
}
"""A command, and the launchers of the runs that it starts."""


@CPU_ALONE
@pytest.mark.slow
@pytest.mark.parametrize("names", matrix(["script", "fork", "torchrun processes"], "script"))
def test_one_script_gives_the_same_results_under_every_launcher(
    names: str, tmp_path: Path, workers: WorkerPool
) -> None:
    started = [LAUNCHED[name] for name in names.split()]
    launch(tmp_path, *(command for command, _ in started))
    logged, sums = workers.run(fit_here, world_size=1, init_process_group=False)[0]
    for folder, launcher in (pair for _, expected in started for pair in expected.items()):
        ranks, caller = read(tmp_path / folder)
        assert ranks[0]["launcher"] == launcher
        if launcher != "InProcessLauncher" and Path("/proc/net/tcp").exists():
            assert ranks[0]["store"] == ["0100007F"], "other hosts reach the store"
        assert ranks[0]["logged"] == pytest.approx(logged, abs=1e-5)
        # Weights and counts come back, whether the caller is a rank or has waited for the ranks.
        assert (caller["process"] == ranks[0]["process"]) == (launcher != "FullStateLauncher")
        assert caller["sums"] == pytest.approx(sums, rel=1e-4)
        assert (caller["steps"], caller["epoch"]) == (2, 1)


def test_the_error_in_a_notebook_names_the_strategy_that_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_IS_INTERACTIVE", True)
    for name in ("realloc", "realloc_spawn"):
        with pytest.raises(ConfigError, match=r"use Trainer\(strategy='realloc_fork'\)"):
            runs.trainer(name, 2)
    assert isinstance(runs.trainer("realloc_fork", 2).strategy.launcher, launchers.FullStateLauncher)
    assert isinstance(runs.trainer("realloc", 1).strategy.launcher, InProcessLauncher)


@pytest.mark.parametrize(
    ("error", "expected", "kept"),
    [
        (ProcessExitedException("", 0, 1, exit_code=143), SIGTERMException, []),
        (ProcessExitedException("", 0, 1, exit_code=-signal.SIGTERM), SIGTERMException, []),  # before the handlers
        (ProcessExitedException("", 0, 1, exit_code=-signal.SIGINT, signal_name="SIGINT"), SIGTERMException, []),
        (ProcessExitedException("", 0, 1, exit_code=-9, signal_name="SIGKILL"), RankLost, [Callback]),
        (ProcessExitedException("", 0, 1, exit_code=1), ProcessExitedException, [Callback]),
        (ProcessRaisedException("", 0, 1), ProcessRaisedException, [Callback]),
    ],
)
def test_the_process_that_waits_for_ranks_saves_no_checkpoint_after_their_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: type[BaseException], kept: list[type]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(_MultiProcessingLauncher, "launch", fail)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trainer = runs.trainer(
        "realloc_spawn", 2, callbacks=[Callback(), OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True
    )
    with pytest.raises(expected) as caught:
        trainer.fit(runs.sft(), Batches(2))
    if isinstance(caught.value, SIGTERMException):
        assert caught.value.code == (130 if getattr(error, "signal_name", None) == "SIGINT" else SIGTERM_EXIT_CODE)
    if expected is RankLost:
        assert caught.value.__suppress_context__ and sys.excepthook is not sys.__excepthook__  # a short message, last
    assert [type(each) for each in trainer.callbacks if type(each) in (Callback, OnExceptionCheckpoint)] == kept


def test_a_started_process_handles_its_error_before_it_is_torn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    error, seen = RuntimeError("gloo/transport/tcp/pair.cc:1: Connection reset by peer"), list[object]()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_MultiProcessingLauncher, "_wrapping_function", fail)
    monkeypatch.setattr(launchers, "parent_process", lambda: SimpleNamespace(pid=1))
    monkeypatch.setattr(launchers, "end_with_parent", lambda _: None)
    trainer = runs.trainer("realloc_spawn", 2)
    monkeypatch.setattr(trainer.strategy, "on_exception", seen.append)  # which logs how to resume
    monkeypatch.setattr(trainer, "_teardown", lambda: seen.append("torn down"))
    assert isinstance(trainer.strategy.launcher, launchers.FullStateLauncher)
    with pytest.raises(RuntimeError, match="gloo"):
        trainer.strategy.launcher._wrapping_function(0, trainer)
    assert seen == [error, "torn down"]


def test_processes_that_outlive_a_failed_one_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "STUCK_S", 0.5)
    context = get_context("spawn")
    launcher = runs.trainer("realloc_spawn", 2).strategy.launcher
    assert isinstance(launcher, launchers.FullStateLauncher)
    launcher.procs = [context.Process(target=time.sleep, args=(60.0,)), context.Process(target=sys.exit, args=(1,))]
    with launchers._stuck_processes_killed(launcher):
        for process in launcher.procs:
            process.start()
        for process in launcher.procs:
            process.join(30.0)
    assert [process.exitcode for process in launcher.procs] == [-signal.SIGKILL, 1]


def test_a_signal_before_all_processes_exist_is_kept_for_them() -> None:
    launcher = runs.trainer("realloc_spawn", 2).strategy.launcher
    assert isinstance(launcher, launchers.FullStateLauncher)
    launcher.kill(signal.SIGTERM)
    process = get_context("spawn").Process(target=time.sleep, args=(60.0,))
    process.start()
    launcher.procs = [process]
    process.join(30.0)
    assert process.exitcode == -signal.SIGTERM


def test_ctrl_c_while_a_process_ends_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.is_initialized", interrupted)
    end_process_group()


def test_a_run_that_fails_before_its_models_are_set_up_raises_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.trainer(
        ReallocStrategy({"calls": {"actor.train": "tp3@0-2"}}), 1, callbacks=[OnExceptionCheckpoint(tmp_path)],
        enable_checkpointing=True,
    )  # fmt: skip
    with pytest.raises(ReallocError, match=r"actor\.train"):
        trainer.fit(runs.sft(), Batches(2))
    assert "the run failed before its models were set up" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on_node", [1, 3])
def test_nodes_with_another_number_of_processes_are_refused(monkeypatch: pytest.MonkeyPatch, on_node: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))
    with pytest.raises(MisconfigurationException, match=rf"^{on_node} processes were started on .*asks for 2; start"):
        check_started_processes(2, 2)


def test_a_store_that_torchrun_keeps_over_restarts_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    warn_of_stale_addresses()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.warns(UserWarning, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        warn_of_stale_addresses()


def start_too_many() -> list[str]:
    """Return the errors of Trainers whose number of devices differs from torchrun's number of processes."""
    world_size, rank = runs.world_size(), os.environ["RANK"]
    texts = []
    for devices in (1, 4):
        # Lightning removes some variables afterwards.
        os.environ |= {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": str(world_size), "RANK": rank, "LOCAL_RANK": rank}
        with pytest.raises(MisconfigurationException) as caught:
            runs.trainer("realloc", devices).fit(runs.sft(), Batches(1, responses=True))
        texts.append(str(caught.value))
    return texts


def test_torchrun_with_another_number_of_devices_is_refused(workers: WorkerPool) -> None:
    for one, four in workers.run(start_too_many, world_size=2, init_process_group=False):
        assert one == "2 processes were started, but Trainer(devices=1, num_nodes=1) asks for 1; make both equal"
        assert four == "2 processes were started, but Trainer(devices=4, num_nodes=1) asks for 4; make both equal"


def test_what_cannot_be_sent_to_the_processes_of_a_run_is_named() -> None:
    def low(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        return runs.low_tokens(completion_ids)

    trainer = runs.trainer(ReallocStrategy("static", launcher="spawn"), 2)
    with pytest.raises(ConfigError, match=r"launcher='spawn' sends .* cannot pickle a part of it \(.*local.*; define"):
        trainer.fit(runs.grpo(reward=low), Batches(1))
    with pytest.raises(ConfigError, match="launcher='ray' sends"), launchers.pickling_named("launcher='ray'"):
        pickle.dumps(number for number in range(3))
    with pytest.raises(TypeError, match="another"), launchers.pickling_named("launcher='ray'"):
        raise TypeError("another error")
