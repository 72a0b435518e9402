"""A rank ends within seconds of the process that started it, from its first import of the package on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_realloc import parent_watch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

ROOT = Path(__file__).parents[1]
DEADLINE_S = 20.0
CHILDREN = """
import subprocess, sys, time
from lightning_realloc.parent_watch import children_watch_this_process
with children_watch_this_process():
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])
{then}
"""
WAIT = "print('imported', flush=True); import time; time.sleep(40)"
IMPORT = "import lightning_realloc"


def start(child: str, then: str = "time.sleep(40)") -> subprocess.Popen[str]:
    """Start a process that starts a child, with the output of both in one pipe, which is open until both have ended."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILDREN.format(then=then), child], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


LAST_WORDS = """
from lightning_realloc.parent_watch import is_orphan, say_before_orphaned_end
say_before_orphaned_end(lambda: print("orphan:", is_orphan(), flush=True))
assert not is_orphan()
"""


def test_a_rank_ends_after_the_process_that_started_it() -> None:
    signals = (signal.SIGTERM, signal.SIGKILL)  # all at once: a rank has seconds to end by itself
    unsaid = "say_before_orphaned_end(None)\n"
    parents = [start(f"{IMPORT}\n{LAST_WORDS}{then}{WAIT}") for then in (unsaid, "")]
    gone = "import os, time\nwhile str(os.getppid()) == os.environ['LIGHTNING_REALLOC_PARENT']: time.sleep(0.05)\n"
    ended_before = start(f"{gone}{IMPORT}; {WAIT}", then="")
    for signum, parent in zip(signals, parents, strict=True):
        assert parent.stdout is not None and parent.stdout.readline() == "imported\n"
        parent.send_signal(signum)
    ended_before.wait()  # otherwise it would still exist as a zombie
    for parent, last_words in zip(parents, ([], ["orphan: True"]), strict=True):
        output, _ = parent.communicate(timeout=DEADLINE_S)
        error, *rest = output.splitlines()
        assert error.startswith(f"error: process {parent.pid}, which started this rank, ended without it")
        assert rest == last_words
    assert not parent_watch.is_orphan()  # this process watches none
    output, _ = ended_before.communicate(timeout=DEADLINE_S)
    assert "which started this rank, ended without it" in output, "a rank that imports the package after the end"


def test_processes_that_a_rank_starts_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []
    monkeypatch.setattr(parent_watch, "end_with_parent", watched.append)
    with parent_watch.children_watch_this_process():
        parent_watch.watch_announced_parent()  # as a rank does, with the environment that it inherits
        parent_watch.watch_announced_parent()  # as a process that it starts
    assert watched == [os.getpid()]
    assert "LIGHTNING_REALLOC_PARENT" not in os.environ
