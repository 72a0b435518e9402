"""Reward functions for worker processes that sleep, crash and start processes on command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], *, seconds: float = 5.0) -> list[int]:
    """Return the processes that still run after ``seconds``."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def leave_processes_behind(note: str) -> None:
    """Start a child and a double-forked daemon with its own session; write their ids to a file."""
    sleeper = "import time; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-S", "-c", sleeper])
    daemon = (
        "import os, sys, time\n"
        "if os.fork(): sys.exit()\n"
        "os.setsid()\n"
        "if os.fork(): sys.exit()\n"
        f"open({note!r} + '.part', 'a').write(f'{child.pid} {{os.getpid()}}')\n"
        f"os.rename({note!r} + '.part', {note!r})\n"
        f"{sleeper}"
    )
    subprocess.run([sys.executable, "-S", "-c", daemon], check=True)
    while not os.path.exists(note):
        time.sleep(0.01)


def obedient(completions: list[str], note: list[str] | None = None, **columns: Any) -> list[float]:
    """Carry out the command in each completion, and return its length."""
    for row, text in enumerate(completions):
        match text:
            case "hang":
                time.sleep(60)
            case "leave and hang":
                assert note is not None
                leave_processes_behind(note[row])
                time.sleep(60)
            case "leave":
                assert note is not None
                leave_processes_behind(note[row])
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError("no such answer")
    return [float(len(text)) for text in completions]


async def in_turn(completions: list[str], **columns: Any) -> list[float]:
    """Return lengths, after the event loop has run other tasks."""
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def process_ids(completions: list[str], **columns: Any) -> list[float]:
    """Return this worker's process id, after a wait that lets other workers take part."""
    time.sleep(0.1)
    return [float(os.getpid())] * len(completions)


def wants_gold(completions: list[str], gold: list[str]) -> list[float]:
    """Return 1 for equal texts; a function with exactly two arguments."""
    return [float(text == right) for text, right in zip(completions, gold, strict=True)]


class Scaled:
    """A callable object with settings, like those constructed from YAML."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        """Return lengths times the factor."""
        return [self.factor * len(text) for text in completions]


class Unloadable:
    """An object that can be pickled, but not unpickled."""

    def __setstate__(self, state: object) -> None:
        raise ImportError("libjudge.so is missing")

    def __getstate__(self) -> object:
        return {"some": 1}

    def __call__(self, **columns: Any) -> list[float]:
        """Never called."""
        return []
