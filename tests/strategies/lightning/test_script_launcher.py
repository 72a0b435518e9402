"""The process that started the ranks of a script ends last, and not with 0 if one of them failed."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.runtime.messages.kept_states import keep_state, states_kept_in
from lightning_realloc.runtime.messages.stalls import RankState
from lightning_realloc.strategies.lightning import failures, script_launcher
from lightning_realloc.strategies.lightning.script_launcher import ScriptLauncher
from tests.strategies import runs

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
FAILS = "import time; time.sleep(0.5); raise SystemExit(7)"


def launcher_after(run: Callable[[], object], *codes: str) -> ScriptLauncher:
    """Return a launcher that has started one process for each piece of Python code, and whose own run has ended."""
    launcher = ScriptLauncher(LightningEnvironment(), len(codes) + 1, 1)
    launcher._call_children_scripts = lambda: None  # type: ignore[method-assign]
    launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
    try:
        launcher.launch(run)
    except BaseException as error:
        assert isinstance(error, SystemExit | KeyError)
    return launcher


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the codes with which this process would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    return codes


@pytest.mark.parametrize(
    ("codes", "expected", "lines"),
    [
        ((FAILS, ""), 7, "rank 1 ended with exit code 7; see its error above\n"),
        (("", DIES), 143, "rank 2 was ended by SIGTERM\n"),
        (("", ""), None, ""),
    ],
)
def test_a_rank_that_fails_after_the_run_decides_the_exit_code(
    exit_codes: list[int], capsys: pytest.CaptureFixture[str], codes: tuple[str, ...], expected: int | None, lines: str
) -> None:
    launcher = launcher_after(lambda: None, *codes)
    launcher._end_last()
    assert exit_codes == ([] if expected is None else [expected])
    assert capsys.readouterr().err == lines


def test_a_killed_rank_is_named_at_once_with_its_last_known_call_and_the_way_to_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[object] = []
    monkeypatch.setattr(script_launcher, "log_way_to_resume", lambda trainer, error: resumed.append(trainer))
    monkeypatch.setenv("LOCAL_RANK", "0")
    launcher = ScriptLauncher(LightningEnvironment(), 3, 1)
    with states_kept_in(launcher.states_folder):
        keep_state(2, RankState("actor.generate", 3.0, 2.0, "rewards.py:7 in judge", waits_for=None))
    codes = ("import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)")
    launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
    launcher._report_killed()
    failures.report_failed_ranks(0, {2: -9}, launcher)
    launcher.procs[0].kill()
    assert resumed == [launcher._trainer]
    assert capsys.readouterr().err == (
        "rank 2 was ended by SIGKILL; it was last seen in actor.generate, at last in rewards.py:7 in judge\n"
    )


@pytest.mark.parametrize(("chosen", "level"), [(None, "ERROR"), ("INFO", "INFO")])
def test_started_ranks_omit_cpp_warnings_unless_a_level_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, level: str
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", chosen)
    with failures.without_cpp_warnings():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == level
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") == chosen


def leave(code: object) -> Callable[[], object]:
    """Return a run that calls ``sys.exit``."""
    return lambda: sys.exit(code)  # type: ignore[arg-type]


def stop() -> None:
    """End the run by a signal."""
    raise SIGTERMException


@pytest.mark.parametrize(
    ("run", "expected", "waits_forever"),
    [(leave(0), [7], False), (leave(3), [], False), (stop, [], True), (lambda: {}["x"], [], False)],
)
def test_the_error_of_this_process_decides_the_exit_code(
    exit_codes: list[int], run: Callable[[], object], expected: list[int], waits_forever: bool
) -> None:
    launcher = launcher_after(run, FAILS)
    launcher._end_last()
    assert exit_codes == expected
    assert (launcher._patience_s == math.inf) == waits_forever


def test_a_trainer_with_several_script_processes_uses_this_launcher() -> None:
    assert isinstance(runs.trainer("realloc", 2).strategy.launcher, ScriptLauncher)


def test_errors_of_a_later_trainer_end_the_ranks_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(failures, "GRACE_S", 0.1)
    launcher = ScriptLauncher(LightningEnvironment(), 2, 1)
    waiting = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    launcher.procs = [waiting]
    failures.report_failures(rank=0, launcher=launcher)
    failures.report_failures(rank=0, launcher=None)
    sys.excepthook(ArithmeticError, ArithmeticError("overflow"), None)
    assert waiting.poll() is not None
