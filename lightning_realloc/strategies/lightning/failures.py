"""How does a run of several processes end when it cannot go on? With one clear message, and with nobody left behind.

What a caller got wrong is mostly found by all ranks alike: rank 0 tells it last, the others in one line each, which is
also enough of a rank that fails alone. What nobody expected keeps its traceback on every rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_realloc.errors import ReallocError

log = logging.getLogger(__name__)

OUR_ERRORS = (ReallocError, MisconfigurationException)
"""What a caller can get wrong: its message is enough. Anything else is a bug, and keeps its traceback."""
PARENT_WATCH_S = 1.0
"""How often a rank looks whether the process that started it is still there."""
GRACE_S = 3.0
"""How long the others may take to say what they failed with, once the process that started them has failed."""


def told_in_a_line(error: BaseException, rank: int) -> str:
    """Return the line in which a rank tells what it was refused with."""
    return f"error{f' on rank {rank}' if rank else ''}: {' '.join(str(error).split())}\n"


def dismiss_observer(launcher: object) -> None:
    """Let this process, which has failed, end by itself.

    Lightning's observer of the ranks that it started would kill it, with all it has still to tell, as soon as it sees
    one of them end.
    """
    if isinstance(launcher, _SubprocessScriptLauncher):
        ranks = list(launcher.procs)
        launcher.procs.clear()  # the list that the observer watches
        launcher.procs = ranks


def end_started_ranks(launcher: object) -> dict[int, int]:
    """End the ranks that this process has started, after they had time to end by themselves.

    For a process that is about to end: without it they would wait in a collective, and die of a lost connection, each
    with a traceback that says nothing.

    Returns:
        Which of them, counted from this one, failed by themselves, and their exit codes.
    """
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return {}
    dismiss_observer(launcher)
    ranks, launcher.procs = launcher.procs, []
    give_up_at = time.monotonic() + GRACE_S
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, give_up_at - time.monotonic()))
    failed = {number: process.returncode for number, process in enumerate(ranks, start=1) if process.poll()}
    for process in ranks:
        process.kill()
        process.wait()
    return failed


def end_with_parent(strategy: object, is_running: Callable[[Any], bool]) -> None:
    """From here on, let this process end if the one that started it is gone while calls are under way.

    Nobody else would end it: one that was killed, perhaps for its memory, tells nobody, and who waits to receive from
    whoever sends first does not hear of a lost connection.

    Args:
        strategy: While it is there, the process is watched over.
        is_running: Whether its calls are under way, so that the parent cannot have come to its own end.
    """
    thread = threading.Thread(
        target=_watch_parent, args=(weakref.ref(strategy), is_running), name="parent of this rank", daemon=True
    )
    thread.start()


def _watch_parent(strategy: weakref.ref[Any], is_running: Callable[[Any], bool]) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_WATCH_S)
        if strategy() is None:
            return
    while (watched := strategy()) is not None:
        if is_running(watched):
            _tell(
                f"error: process {parent}, which started this rank and was one itself, ended in the middle of a call; "
                f"it was killed, or left by os._exit: see its own log, and the system's for want of memory\n"
            )
            os._exit(1)
        del watched
        time.sleep(PARENT_WATCH_S)


def report_failures(*, rank: int, launcher: object) -> None:
    """From here on, let an exception that nobody catches end this process as the module says."""
    previous = sys.excepthook
    if isinstance(previous, _Report):
        previous = previous.previous
    sys.excepthook = _Report(previous, rank, launcher)


class _Report:
    """Takes the place of ``sys.excepthook``."""

    def __init__(self, previous: Callable[..., Any], rank: int, launcher: object) -> None:
        self.previous = previous
        self._rank = rank
        self._launcher = launcher

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed = end_started_ranks(self._launcher)
        if not isinstance(error, OUR_ERRORS):
            self.previous(kind, error, trace)
            for number, code in failed.items():  # a lost connection, for one, is not what went wrong
                _tell(f"rank {self._rank + number} ended with exit code {code}; what it said of that is above\n")
            return
        log.debug("what ends this run was raised here", exc_info=(kind, error, trace))
        if self._rank:
            _tell(told_in_a_line(error, self._rank))
            return
        error.__cause__, error.__suppress_context__ = None, True
        outer = _frames_of_the_caller(trace)
        self.previous(kind, error.with_traceback(outer), outer)


def _tell(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def _frames_of_the_caller(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback down to where a user's code called Lightning or this package."""
    if trace is None or _package(trace) in ("lightning", "lightning_realloc"):
        return None
    return TracebackType(_frames_of_the_caller(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
