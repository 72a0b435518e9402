"""A run that fails prints one message with the reason, and leaves no rank waiting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_realloc.data.rows import read_rows
from lightning_realloc.errors import ConfigError, DataError, RankLost
from lightning_realloc.runtime.messages.failure_store import peer_error
from lightning_realloc.strategies.lightning import failures
from lightning_realloc.strategies.lightning.failures import end_started_ranks, report_failures
from tests.devices import CPU_ALONE
from tests.strategies import runs
from tests.strategies.lightning.test_launchers import TORCHRUN, end, start

SCRIPT = str(Path(__file__).with_name("failing.py"))
DEADLINE_S = 160.0
PROMPT_S = 30.0
"""Seconds from a rank's failure to the end of all processes. It takes 5 s on two idle cores; collectives time out after
30 minutes."""

Raised = tuple[type[BaseException], BaseException, TracebackType | None]


# ---- the hook


def raised(function: Callable[[], Any]) -> Raised:
    """Return the arguments that Python passes to ``sys.excepthook``."""
    try:
        function()
    except Exception as error:
        return type(error), error, error.__traceback__
    raise AssertionError("nothing was raised")


def refused() -> None:
    """Read invalid data, like a user's script."""
    read_rows([{"prompt": "a"}, {"promt": "b"}])


def surprised() -> None:
    """Raise an unexpected error."""
    raise ArithmeticError("overflow")


@pytest.fixture
def previous_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install Python's own hook, and restore the previous one afterwards."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.usefixtures("previous_hook")
def test_rank_0_shows_the_script_and_other_ranks_print_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_failures(rank=0, launcher=None)
    sys.excepthook(*raised(refused))
    first = capsys.readouterr().err
    report_failures(rank=3, launcher=None)  # of another Trainer in the same process
    sys.excepthook(*raised(refused))
    other = capsys.readouterr().err

    message = "row 1 of the data set must have the same columns as row 0 of the data set; it lacks 'prompt' and adds"
    assert first.splitlines()[-1].startswith(f"lightning_realloc.errors.DataError: {message}")
    assert "in refused" in first and "data/rows.py" not in first
    assert other.startswith(f"error on rank 3: {message}") and other.count("\n") == 1


@pytest.mark.usefixtures("previous_hook")
def test_an_error_that_all_ranks_raise_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def agree() -> None:
        raise peer_error(1, "GenerationError", "no such interpreter")

    report_failures(rank=0, launcher=None)
    sys.excepthook(*raised(agree))
    assert capsys.readouterr().err.endswith("lightning_realloc.errors.GenerationError: no such interpreter\n")
    report_failures(rank=3, launcher=None)
    sys.excepthook(*raised(agree))
    assert capsys.readouterr().err == "error on rank 3: the error of rank 0\n"


@pytest.mark.usefixtures("previous_hook")
def test_unexpected_errors_keep_their_traceback_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 3):
        report_failures(rank=rank, launcher=None)
        sys.excepthook(*raised(surprised))
        printed = capsys.readouterr().err
        assert (
            printed.startswith("Traceback")
            and "in surprised" in printed
            and printed.endswith("ArithmeticError: overflow\n")
        )


@pytest.mark.usefixtures("previous_hook")
@pytest.mark.parametrize(
    ("cause", "is_short"), [("rank 1 failed first, with ValueError: no such file", True), (None, False)]
)
def test_a_rank_that_lost_a_connection_prints_the_cause_alone(
    capsys: pytest.CaptureFixture[str], cause: str | None, is_short: bool
) -> None:
    def lose() -> None:
        error = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9617.")
        if cause is not None:
            error.add_note(cause)
        raise error

    report_failures(rank=0, launcher=None)
    sys.excepthook(*raised(lose))
    printed = capsys.readouterr().err
    assert (printed == f"error on rank 0: {cause}\n") == is_short
    assert ("Traceback" in printed) != is_short


def launcher_of(*codes: str) -> _SubprocessScriptLauncher:
    """Return a launcher that has started one process for each piece of Python code."""
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), len(codes) + 1, 1)
    launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
    return launcher


@pytest.mark.usefixtures("previous_hook")
def test_the_launching_process_ends_the_others_and_names_the_failed_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 2.0)
    launcher = launcher_of("raise SystemExit(7)", "", "import time; time.sleep(100)")
    watched, waiting = launcher.procs, launcher.procs[2]
    report_failures(rank=0, launcher=launcher)

    sys.excepthook(*raised(surprised))

    assert capsys.readouterr().err.endswith(
        "ArithmeticError: overflow\nrank 1 ended with exit code 7; see its error above\n"
    )
    assert waiting.poll() is not None
    assert watched == launcher.procs == []
    assert end_started_ranks(launcher) == end_started_ranks(None) == {}


def test_a_process_group_that_cannot_start_ends_the_started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the port is taken")

    monkeypatch.setattr(failures, "GRACE_S", 0.1)
    trainer = runs.trainer("realloc", 1)
    strategy: Any = trainer.strategy
    strategy._launcher = launcher_of("import time; time.sleep(100)")
    (waiting,) = strategy._launcher.procs
    monkeypatch.setattr(strategy, "_setup_distributed", fail)
    with pytest.raises(RuntimeError, match="the port is taken"):
        strategy.setup_environment()
    assert waiting.poll() is not None


def test_a_port_that_another_process_listens_on_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        trainer = runs.trainer("realloc", 1)
        with pytest.raises(ConfigError) as error:
            trainer.fit(runs.sft(), runs.Batches(1, responses=True))
    told = f"another process listens on 127.0.0.1:{port}, where the ranks of this run were to meet; end it, or "
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


def test_lightnings_observer_kills_no_process_before_its_report() -> None:
    launcher = launcher_of("raise SystemExit(7)")
    observer = _ChildProcessObserver(os.getpid(), launcher.procs)
    [failed] = launcher.procs
    failed.wait()

    failures.dismiss_observer(launcher)

    assert observer._run()  # otherwise this process would have been killed
    assert launcher.procs == [failed]
    failures.dismiss_observer(None)


# ---- whole runs


class Ended(NamedTuple):
    code: int
    output: str
    at: float


def run_side_by_side(folder: Path, *commands: tuple[str, ...]) -> list[Ended]:
    """Run commands in separate shells, and return their exit codes and output."""
    files = [folder / f"{number}.log" for number in range(len(commands))]
    started = []
    try:
        for command, file in zip(commands, files, strict=True):
            started.append(start(command, folder, file, forks_ranks=True))
        ended_at: dict[int, float] = {}
        give_up_at = time.monotonic() + DEADLINE_S
        while len(ended_at) < len(started) and time.monotonic() < give_up_at:
            for number, process in enumerate(started):
                if process.poll() is not None:
                    ended_at.setdefault(number, time.time())
            time.sleep(0.05)
    finally:
        for process in started:
            end(process)
    assert len(ended_at) == len(started), [file.read_text()[-3000:] for file in files]
    return [
        Ended(process.returncode, file.read_text(), ended_at[number])
        for number, (process, file) in enumerate(zip(started, files, strict=True))
    ]


@CPU_ALONE
def test_runs_end_with_one_message_and_promptly_if_one_rank_fails(tmp_path: Path) -> None:
    notes = [tmp_path / name for name in ("alone", "left")]
    alike, alone, left = run_side_by_side(
        tmp_path, (SCRIPT, "alike", "-"), (SCRIPT, "alone", str(notes[0])), (SCRIPT, "left", str(notes[1]))
    )

    message = "num_minibatches=9 needs as many samples in an iteration"
    lines = alike.output.splitlines()
    assert alike.code == 1
    assert lines[-1].startswith(f"[rank0]: lightning_realloc.errors.ConfigError: {message}")
    assert lines.count("error on rank 1: the error of rank 0") == 1
    assert alike.output.count("Traceback") == 1
    assert alike.output.count("File ") == 2  # the script's own frames
    first = "[rank1]: ArithmeticError: overflow"
    assert alone.code == 1
    assert alone.at - float(notes[0].read_text()) < PROMPT_S
    # The other rank sees only a broken collective and names the cause.
    expected = "[rank0]: lightning_realloc.errors.ReallocError: rank 1 failed with ArithmeticError: overflow"
    assert alone.output.index(first) < alone.output.index(expected)
    assert "gloo/transport" not in alone.output
    assert left.code == 1
    assert "[rank0]: lightning_realloc.errors.ReallocError: sys.exit(0) was called during an iteration" in left.output
    assert left.at - float(notes[1].read_text()) < PROMPT_S / 2


def is_alive(process: int) -> bool:
    """Return whether a process exists, and is no zombie."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it came true in time."""
    give_up_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return condition()


@pytest.mark.exhaustive
@CPU_ALONE
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    agent = start((*TORCHRUN, SCRIPT, "paused", str(tmp_path / "note")), tmp_path, log)
    notes = [tmp_path / "note0", tmp_path / "note1"]
    try:
        assert wait_until(lambda: all(note.exists() and note.read_text() for note in notes), DEADLINE_S), (
            log.read_text()
        )
        ranks = [int(note.read_text()) for note in notes]
        agent.kill()
        agent.wait()
        assert wait_until(lambda: not any(map(is_alive, ranks)), PROMPT_S), log.read_text()[-3000:]
    finally:
        end(agent)


@CPU_ALONE
def test_a_busy_rank_ends_after_the_launching_rank_was_killed_and_says_how_to_resume(tmp_path: Path) -> None:
    (killed,) = run_side_by_side(tmp_path, (SCRIPT, "killed", str(tmp_path / "saved")))
    assert killed.code == 9
    log = tmp_path / "0.log"
    wait_until(lambda: "To resume" in log.read_text(), PROMPT_S)
    printed = log.read_text()
    (checkpoint,) = (tmp_path / "saved").iterdir()
    resume = f"To resume: trainer.fit(..., ckpt_path='{checkpoint}'), or --ckpt_path={checkpoint}"
    assert resume in printed.splitlines()
    assert printed.index("which started this rank, ended without it") < printed.index(resume)


@CPU_ALONE
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_the_launching_rank_which_reports_failures_after_training(tmp_path: Path) -> None:
    late, orphan = run_side_by_side(tmp_path, (SCRIPT, "late", "-"), (SCRIPT, "orphan", str(tmp_path / "note")))
    assert late.code == 1
    assert late.output.index("[rank1]: ArithmeticError: overflow") < late.output.index(
        "rank 1 ended with exit code 1; see its error above"
    )
    assert orphan.code == -signal.SIGKILL
    waiting = int((tmp_path / "note").read_text())
    assert wait_until(lambda: not is_alive(waiting), PROMPT_S), (tmp_path / "1.log").read_text()[-3000:]


def test_error_messages_are_printed_on_one_line() -> None:
    assert failures.one_line_message(DataError("a\n  b"), 0) == "error: a b\n"


def test_messages_of_gloo_are_quoted_without_its_source_and_its_wishes() -> None:
    quoted = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:58122"
    lost = RankLost(
        f"a rank ended while this one waited for its data ({quoted}. GLHF! \U0001f3d6\ufe0f); see its own log"
    )

    assert str(lost) == (
        "a rank ended while this one waited for its data (Connection closed by peer [127.0.0.1]:58122); see its own log"
    )
