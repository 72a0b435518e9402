"""Scripts in forked processes end like those that a shell starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scripts import Script


def run(folder: Path, text: str) -> tuple[int, str]:
    """Run a script with one argument; return its exit code and its output."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(text)
    started = Script([str(script), "given"], folder, {**os.environ, "CITY": "Paris"}, log)
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


def test_a_traceback_has_the_frames_of_the_script_alone(tmp_path: Path) -> None:
    code, output = run(tmp_path, "def fail():\n    raise KeyError('on purpose')\nfail()\n")
    assert code == 1
    assert output.count("File ") == output.count("script.py") == 2
    assert output.splitlines()[-1] == "KeyError: 'on purpose'"
