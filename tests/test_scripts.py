"""Scripts in forked processes end like those that a shell starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scripts import Script


def run(folder: Path, text: str, *, forks_ranks: bool = False) -> tuple[int, str]:
    """Run a script with one argument; return its exit code and its output."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(text)
    environment = {**os.environ, "CITY": "Paris"}
    started = Script([str(script), "given"], folder, environment, log, forks_ranks=forks_ranks)
    return started.wait(timeout=60), log.read_text()


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("import sys; print(sys.argv[1])", 0, "given"),
        ("import os; print(os.environ['CITY'], __name__)", 0, "Paris __main__"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('too late')", 1, "too late"),
        ("import atexit; atexit.register(print, 'the end'); print('first')", 0, "the end"),
        ("import sys; sys.excepthook = lambda kind, *_: print(kind.__name__)\n1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; print(os.getpgid(0) == os.getpid())", 0, "True"),
    ],
)
def test_a_script_ends_as_in_a_shell(tmp_path: Path, text: str, code: int, last: str) -> None:
    ended_with, output = run(tmp_path, text)
    assert ended_with == code, output
    assert output.splitlines()[-1:] == ([last] if last else [])


RANKS = """
import atexit, os, signal, sys
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

if os.environ.get("LOCAL_RANK") == "1":
    assert sys.excepthook is sys.__excepthook__ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print(sys.argv[1], __name__, os.environ["CITY"], os.getppid() == int(os.environ["PARENT"]))
    sys.exit(7)
sys.excepthook = print
signal.signal(signal.SIGTERM, signal.SIG_IGN)
atexit.register(print, "the end")
os.environ["PARENT"] = str(os.getpid())
launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
launcher._call_children_scripts()
(rank,) = launcher.procs
print(rank.wait(), rank.poll())
"""


def test_forked_ranks_are_children_in_the_state_of_a_new_interpreter(tmp_path: Path) -> None:
    code, output = run(tmp_path, RANKS, forks_ranks=True)
    assert code == 0, output
    assert output.splitlines()[-3:] == ["given __main__ Paris True", "7 7", "the end"]


def test_a_traceback_has_the_frames_of_the_script_alone(tmp_path: Path) -> None:
    code, output = run(tmp_path, "def fail():\n    raise KeyError('on purpose')\nfail()\n")
    assert code == 1
    assert output.count("File ") == output.count("script.py") == 2
    assert output.splitlines()[-1] == "KeyError: 'on purpose'"
