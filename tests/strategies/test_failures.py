"""A run that cannot go on says why once, and leaves no rank waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_realloc.data.rows import read_rows
from lightning_realloc.errors import DataError
from lightning_realloc.strategies import failures
from lightning_realloc.strategies.failures import end_started_ranks, report_failures
from tests.strategies.test_launchers import end, shell_environment

SCRIPT = str(Path(__file__).with_name("failing.py"))
DEADLINE_S = 160.0
PROMPT_S = 30.0
"""From a rank's failure to the end of all processes: 5 s alone on two cores, where collectives wait for 30 minutes."""

Raised = tuple[type[BaseException], BaseException, TracebackType | None]


# ---- the hook


def raised(function: Callable[[], Any]) -> Raised:
    """Return what Python would hand to ``sys.excepthook``."""
    try:
        function()
    except Exception as error:
        return type(error), error, error.__traceback__
    raise AssertionError("nothing was raised")


def refused() -> None:
    """Read what is no data, as a script would."""
    read_rows([{"prompt": "a"}, {"promt": "b"}])


def surprised() -> None:
    """Fail as nobody expected."""
    raise ArithmeticError("overflow")


@pytest.fixture
def previous_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put Python's own hook in place, and back what was there."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.usefixtures("previous_hook")
def test_rank_0_shows_where_the_script_called_and_other_ranks_tell_in_one_line(
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
def test_what_nobody_expected_keeps_its_traceback_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 3):
        report_failures(rank=rank, launcher=None)
        sys.excepthook(*raised(surprised))
        told = capsys.readouterr().err
        assert told.startswith("Traceback") and "in surprised" in told and told.endswith("ArithmeticError: overflow\n")


def launcher_of(*codes: str) -> _SubprocessScriptLauncher:
    """Return a launcher that has started processes which run this Python code."""
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), len(codes) + 1, 1)
    launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
    return launcher


@pytest.mark.usefixtures("previous_hook")
def test_the_process_that_started_the_others_ends_them_and_names_those_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 2.0)
    launcher = launcher_of("raise SystemExit(7)", "", "import time; time.sleep(100)")
    watched, waiting = launcher.procs, launcher.procs[2]
    report_failures(rank=0, launcher=launcher)

    sys.excepthook(*raised(surprised))

    assert capsys.readouterr().err.endswith(
        "ArithmeticError: overflow\nrank 1 ended with exit code 7; what it said of that is above\n"
    )
    assert waiting.poll() is not None
    assert watched == launcher.procs == []
    assert end_started_ranks(launcher) == end_started_ranks(None) == {}


def test_lightnings_observer_kills_no_process_that_has_yet_to_tell() -> None:
    launcher = launcher_of("raise SystemExit(7)")
    observer = _ChildProcessObserver(os.getpid(), launcher.procs)
    [failed] = launcher.procs
    failed.wait()

    failures.dismiss_observer(launcher)

    assert observer._run()  # else this process would be gone
    assert launcher.procs == [failed]
    failures.dismiss_observer(None)


# ---- a whole run; that ranks which are refused alike tell it once is tests/test_cli.py's


@pytest.mark.slow
def test_a_run_ends_promptly_and_says_why_after_one_rank_fails_alone(tmp_path: Path) -> None:
    note, log = tmp_path / "failed_at", tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, str(note)], cwd=tmp_path, env=shell_environment(), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        process.wait(timeout=DEADLINE_S)
        ended_at = time.time()
    finally:
        end(process)

    told = log.read_text()
    assert process.returncode == 1, told
    assert ended_at - float(note.read_text()) < PROMPT_S
    # The other rank, which knows of a broken collective alone, tells what broke it.
    first = told.index("[rank1]: ArithmeticError: overflow")
    assert first < told.index("[rank0]: lightning_realloc.errors.ReallocError: rank 1 failed with ArithmeticError")
    assert "gloo/transport" not in told


def test_errors_keep_their_text_in_a_line() -> None:
    assert failures.told_in_a_line(DataError("a\n  b"), 0) == "error: a b\n"
