"""End a failed run of several processes with one clear message, and leave no process behind.

Mistakes of the caller are mostly found by all ranks alike. Rank 0 prints such an error last, with the caller's frames
only; other ranks print one line each. Any other exception keeps its traceback on every rank.
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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_realloc.errors import ReallocError

log = logging.getLogger(__name__)

CALLER_ERRORS = (ReallocError, MisconfigurationException)
"""Exceptions for mistakes of the caller, whose message is enough. Any other is a bug and keeps its traceback."""
PARENT_WATCH_S = 1.0
"""Seconds between a rank's checks that the process that started it still exists."""
GRACE_S = 3.0
"""Seconds that started ranks get to print their errors and exit, after the process that started them has failed."""


def one_line_message(error: BaseException, rank: int) -> str:
    """Return the line that a rank prints for a mistake of the caller."""
    return f"error{f' on rank {rank}' if rank else ''}: {' '.join(str(error).split())}\n"


def raised_in(error: BaseException) -> str:
    """Return the top-level package whose code raised an error; "" for one that was not raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else _package(trace)


def dismiss_observer(launcher: object) -> None:
    """Detach Lightning's observer of the ranks that this process started, so that this process can report its failure.

    The observer kills this process as soon as one of those ranks ends.
    """
    if isinstance(launcher, _SubprocessScriptLauncher):
        ranks = list(launcher.procs)
        launcher.procs.clear()  # the list that the observer watches
        launcher.procs = ranks


def end_started_ranks(launcher: object) -> dict[int, int]:
    """Kill the ranks that this process started, after `GRACE_S` for them to end by themselves.

    Called by a process that is about to end. Otherwise those ranks would wait in a collective and fail with a broken
    connection, whose traceback hides the cause.

    Returns:
        Exit codes of the ranks that failed by themselves, by their offset from this rank.
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


@contextlib.contextmanager
def ending_started_ranks(launcher: object) -> Iterator[None]:
    """Kill the ranks that this process started if an error is raised inside; they would wait for this one."""
    try:
        yield
    except BaseException:
        end_started_ranks(launcher)
        raise


def is_started_by_launcher(environment: ClusterEnvironment, local_rank: int) -> bool:
    """Return whether this process must not outlive its parent: torchrun, or a rank with Lightning's launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    is_started = isinstance(environment, LightningEnvironment) and environment.creates_processes_externally
    return is_started and local_rank > 0


def end_with_parent(strategy: object, is_running: Callable[[Any], bool]) -> None:
    """Start a thread that ends this process if the parent process dies while calls are running.

    A parent that is killed, for example for lack of memory, reports nothing. A rank that waits to receive from any
    sender does not notice the lost connection, and would wait forever.

    Args:
        strategy: The running strategy, held by a weak reference; the thread ends once it is gone.
        is_running: Function that returns whether the strategy's calls are running, so that the parent cannot have
            ended normally.
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
            _write_stderr(
                f"error: process {parent}, which started this rank, ended during a call; it was killed or called "
                f"os._exit: see its log, and the system's log for an out-of-memory kill\n"
            )
            os._exit(1)
        del watched
        time.sleep(PARENT_WATCH_S)


def report_failures(*, rank: int, launcher: object) -> None:
    """Install an exception hook that ends this process as described in the module's docstring."""
    previous = sys.excepthook
    if isinstance(previous, _ExceptionHook):
        previous = previous.previous
    sys.excepthook = _ExceptionHook(previous, rank, launcher)


class _ExceptionHook:
    """Replacement of ``sys.excepthook``."""

    def __init__(self, previous: Callable[..., Any], rank: int, launcher: object) -> None:
        self.previous = previous
        self._rank = rank
        self._launcher = launcher

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed = end_started_ranks(self._launcher)
        if not isinstance(error, CALLER_ERRORS):
            self.previous(kind, error, trace)
            for number, code in failed.items():  # this rank's error may be only a broken connection
                _write_stderr(f"rank {self._rank + number} ended with exit code {code}; see its error above\n")
            return
        log.debug("the error that ends this run was raised here", exc_info=(kind, error, trace))
        if self._rank:
            _write_stderr(one_line_message(error, self._rank))
            return
        error.__cause__, error.__suppress_context__ = None, True
        outer = _caller_frames(trace)
        self.previous(kind, error.with_traceback(outer), outer)


def _write_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def _caller_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback up to the user's call of Lightning or this package."""
    if trace is None or _package(trace) in ("lightning", "lightning_realloc"):
        return None
    return TracebackType(_caller_frames(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
