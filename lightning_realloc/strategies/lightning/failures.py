"""End a failed run of several processes with one clear message, and leave no process behind.

Mistakes of the caller are mostly found by all ranks alike. Rank 0 prints such an error last, with the caller's frames
only; other ranks print one line each. A rank that only lost the connection to a failed one prints one line, too. Any
other exception keeps its traceback on every rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_realloc.errors import CheckpointError, ConfigError, ReallocError, one_line_message
from lightning_realloc.parent_watch import is_orphan
from lightning_realloc.remote_path import AnyPath, as_path
from lightning_realloc.runtime.messages.failure_store import is_broken_connection, is_loss_of_first_rank
from lightning_realloc.runtime.messages.kept_states import last_seen
from lightning_realloc.strategies.checkpoints.checkpoint_files import age_s

log = logging.getLogger(__name__)

CALLER_ERRORS = (ReallocError, MisconfigurationException)
"""Exceptions for mistakes of the caller, whose message is enough. Any other is a bug and keeps its traceback."""
GRACE_S = 3.0
"""Seconds that started ranks get to print their errors and exit, after the process that started them has failed."""

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Variable that torch reads when a process imports it."""


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


def end_started_ranks(launcher: object, grace_s: float | None = None) -> dict[int, int]:
    """Kill the ranks that this process started, after ``grace_s`` for them to end by themselves.

    Called by a process that is about to end. Otherwise those ranks would wait in a collective and fail with a broken
    connection, whose traceback hides the cause.

    Args:
        launcher: Launcher that started them; any but the one of scripts is ignored.
        grace_s: Seconds they get; None means `GRACE_S`, infinity to wait until all have ended.

    Returns:
        Exit codes of the ranks that failed by themselves, by their offset from this rank.
    """
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return {}
    dismiss_observer(launcher)
    ranks, launcher.procs = launcher.procs, []
    give_up_at = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
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


@contextlib.contextmanager
def naming_taken_port(environment: ClusterEnvironment) -> Iterator[None]:
    """Raise ConfigError, in one line, if the port on which the first rank is to listen is taken."""
    try:
        yield
    except (dist.DistNetworkError, OSError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        place = f"{environment.main_address}:{environment.main_port}"
        raise ConfigError(
            f"another process listens on {place}, where the ranks of this run were to meet; end it, or export "
            f"MASTER_PORT with a free port (torchrun: --master-port)"
        ) from error


@contextlib.contextmanager
def without_cpp_warnings() -> Iterator[None]:
    """Let processes that are started inside omit torch's C++ warnings, unless the user has chosen their level.

    Forked ones do not import torch again, and keep the level of this process.
    The one about a lost store of the process group has fifteen lines of frames, which would hide our message.
    """
    is_chosen = _CPP_LOG_LEVEL in os.environ
    os.environ.setdefault(_CPP_LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if not is_chosen:
            del os.environ[_CPP_LOG_LEVEL]


def is_started_by_torchrun() -> bool:
    """Return whether the parent process is an agent of torchrun, which ends after the ranks that it started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def report_failed_ranks(rank: int, failed: Mapping[int, int], launcher: object) -> None:
    """Print one line for each failed rank that was not reported before.

    Args:
        rank: Rank of this process, which started the others.
        failed: Exit codes, or negative numbers of signals, by the offset from this rank.
        launcher: Launcher that started them. If it starts scripts, it keeps their states in ``states_folder``, and the
            ``reported`` ones.
    """
    folder: str | None = getattr(launcher, "states_folder", None)
    reported: set[int] = getattr(launcher, "reported", set())
    for number, code in failed.items():
        if number in reported:
            continue
        reported.add(number)
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        how = f"ended with exit code {code}; see its error above"
        if code < 0:
            how = f"was ended by {name}{last_seen(folder, rank + number)}"
        _write_stderr(f"rank {rank + number} {how}\n")


def log_way_to_resume(trainer: Trainer | None, error: BaseException | None = None) -> None:
    """Log how to resume training from the newest checkpoint, unless the error may be about this checkpoint.

    Rank 0 logs it, and every rank if rank 0, or the process that started the rank, was lost; without an error that all
    ranks have, the rank that calls this.
    """
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return
    newest = _newest_checkpoint(trainer)
    may_be_damaged = isinstance(error, CheckpointError) and newest == as_path(trainer.ckpt_path or "")
    if newest is not None and not may_be_damaged:
        says_it_here = error is None or is_loss_of_first_rank(error) or is_orphan()
        say = log.warning if says_it_here else rank_zero_info
        say(f"To resume: trainer.fit(..., ckpt_path={str(newest)!r}), or --ckpt_path={newest}")


def _newest_checkpoint(trainer: Trainer) -> AnyPath | None:
    """Return the newest of the checkpoints that this run wrote or resumed from; None without one."""
    found = [trainer.ckpt_path]
    for callback in trainer.checkpoint_callbacks:
        found += [getattr(callback, name, None) for name in ("last_model_path", "best_model_path", "ckpt_path")]
    paths = {str(path): as_path(path) for path in found if path}
    ages = {path: age for path in paths.values() if (age := age_s(path)) is not None}
    return max(ages, key=ages.__getitem__, default=None)


def report_failures(*, rank: int, launcher: object) -> None:
    """Install an exception hook that ends this process as described in the module's docstring.

    A later Trainer has no launcher; its hook ends the ranks that the launcher of an earlier one started.
    """
    previous = sys.excepthook
    if isinstance(previous, _ExceptionHook):
        launcher = launcher or previous.launcher
        previous = previous.previous
    sys.excepthook = _ExceptionHook(previous, rank, launcher)


class _ExceptionHook:
    """Replacement of ``sys.excepthook``."""

    def __init__(self, previous: Callable[..., Any], rank: int, launcher: object) -> None:
        self.previous = previous
        self._rank = rank
        self.launcher = launcher

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed = end_started_ranks(self.launcher)
        if not isinstance(error, CALLER_ERRORS):
            self._report(kind, error, trace)
            report_failed_ranks(self._rank, failed, self.launcher)
            return
        log.debug("the error that ends this run was raised here", exc_info=(kind, error, trace))
        if self._rank:
            _write_stderr(one_line_message(error, self._rank))
            return
        error.__cause__, error.__suppress_context__ = None, True
        outer = _caller_frames(trace)
        self.previous(kind, error.with_traceback(outer), outer)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback, or the causes alone if this rank only lost the connection to ranks that failed first."""
        causes = getattr(error, "__notes__", [])
        if not causes or not is_broken_connection(error):
            self.previous(kind, error, trace)
            return
        log.debug("this rank lost the connection here", exc_info=(kind, error, trace))
        _write_stderr(f"error on rank {self._rank}: {' '.join('; '.join(causes).split())}\n")


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
