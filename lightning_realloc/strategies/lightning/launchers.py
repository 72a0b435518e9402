"""Start one process per device from a notebook or a test, and return the trained weights from them."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Process, parent_process
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from lightning_realloc.errors import ConfigError, RankLost, describe_error
from lightning_realloc.parent_watch import end_with_parent
from lightning_realloc.runtime.messages.kept_states import last_seen, states_kept_in
from lightning_realloc.strategies.lightning.failures import report_failures, without_cpp_warnings
from lightning_realloc.strategies.lightning.last_checkpoint import with_last_resolved
from lightning_realloc.strategies.lightning.signals import (
    INTERRUPT_EXIT_CODE,
    STOP_SIGNALS,
    forward_no_signals,
    signals_forwarded,
)

STUCK_S = 10.0
"""Seconds that other processes have to end after one has failed, for example to write their flight records."""


@contextmanager
def pickling_named(setting: str) -> Iterator[None]:
    """Raise ConfigError for objects that cannot be sent to the processes of a run.

    Args:
        setting: The launcher as the user sets it.
    """
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickl" not in str(error) and "local object" not in str(error):
            raise
        raise ConfigError(
            f"{setting} sends the module and all that it holds, such as reward functions, environments and tools, to "
            f"other processes, and cannot pickle a part of it ({describe_error(error)}); define classes and functions "
            f"at the top of a module, or give import paths 'package.module:name'; open files and connections where "
            f"they are used, such as in reset"
        ) from error


class FullStateLauncher(_MultiProcessingLauncher):
    """Lightning's spawn and fork launcher, for sharded models.

    Lightning's own launcher sends rank 0's ``state_dict()`` to the main process, which has no process group and cannot
    rebuild a DTensor. This one sends full tensors, which all ranks gather.
    """

    sends_weights = True
    """Whether the trained weights are sent to the main process. The same on all ranks."""
    _early_signal: int | None = None

    def launch(
        self, function: Callable[..., Any], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> Any:
        """Start the processes and wait for them. Forward signals to them; they decide when to end.

        Raises:
            SIGTERMException: if the processes ended because of a signal, with their exit code.
            RankLost: if another signal ended one of them.
            ConfigError: for objects that cannot be sent to the processes.
        """
        args, kwargs = with_last_resolved(trainer, function, args, kwargs)
        leave_process_group()
        self.procs, self._early_signal = [], None
        with (
            TemporaryDirectory(prefix="realloc-states-", ignore_cleanup_errors=True) as states,
            states_kept_in(states),
            without_cpp_warnings(),
            signals_forwarded(self),
            _stuck_processes_killed(self),
        ):
            try:
                with pickling_named(f"launcher={self._start_method!r}"):
                    return super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessException as error:
                stopped_with = _exit_code_of_stop(error)
                if trainer is not None:
                    drop_callbacks(trainer, only_checkpoints=stopped_with is None)
                if stopped_with is not None:
                    raise SIGTERMException(stopped_with) from None
                if isinstance(error, ProcessExitedException) and error.signal_name is not None:
                    report_failures(rank=0, launcher=None)
                    raise RankLost(
                        f"rank {error.error_index} was ended by {error.signal_name}"
                        f"{last_seen(states, error.error_index)}; SIGKILL mostly means that the host ran out of "
                        f"memory, see the system's log"
                    ) from None
                raise

    @property
    def procs(self) -> list[Process]:
        """The started processes; empty until all have been started, which takes seconds for large objects."""
        return self._started

    @procs.setter
    def procs(self, processes: list[Process]) -> None:
        self._started = processes
        if processes and self._early_signal is not None:
            super().kill(self._early_signal)

    def kill(self, signum: int) -> None:
        """Send a signal to the processes, or keep it until they have been started."""
        if not self._started:
            self._early_signal = signum
        super().kill(signum)

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any, **kwargs: Any) -> None:
        """Run in a started process. After an error, do there what Lightning does only in the main process."""
        forward_no_signals()
        parent = parent_process()
        assert parent is not None and parent.pid is not None, "this process was started by another one"
        end_with_parent(parent.pid)
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            if trainer is not None:
                if isinstance(error, SIGTERMException):
                    _interrupt(trainer, error)
                else:
                    trainer.strategy.on_exception(error)
                trainer._teardown()  # a thread that still used the process group at exit would abort the process
            if isinstance(error, KeyboardInterrupt):  # torch would report no error, and the parent would wait
                raise SIGTERMException(INTERRUPT_EXIT_CODE) from None
            raise

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """Return metrics and the counts of steps, batches and epochs."""
        progress = [counter.state_dict() for counter in _counters(trainer)]
        return {**super().get_extra_results(trainer), "progress": progress}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Take over metrics and counts, as if training had run in the main process."""
        super().update_main_process_results(trainer, extra)
        for counter, state in zip(_counters(trainer), extra["progress"], strict=True):
            counter.load_state_dict(state)

    def _collect_rank_zero_results(self, trainer: Trainer, results: object) -> Any:
        module = trainer.lightning_module
        fitted = trainer.state.fn == TrainerFn.FITTING and self.sends_weights
        full = trainer.strategy.full_state_dict() if fitted else {}  # type: ignore[attr-defined]
        module.state_dict = lambda *args, **kwargs: full  # type: ignore[assignment, method-assign]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        # Models were built only in the started processes. Without models here, loading would silently drop the weights.
        if worker_output.weights_path is not None:
            trainer.lightning_module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)


@contextmanager
def _stuck_processes_killed(launcher: _MultiProcessingLauncher) -> Iterator[None]:
    """Kill processes that have not ended `STUCK_S` after a failed one; torch gives a stopped process 30 s."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            if any(map(_has_failed, launcher.procs)):
                if not is_over.wait(STUCK_S):
                    for process in launcher.procs:
                        with suppress(ProcessLookupError):
                            os.kill(process.pid or 0, signal.SIGKILL)
                return

    if hasattr(os, "waitid"):
        threading.Thread(target=watch, name="ends stuck ranks", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _has_failed(process: BaseProcess) -> bool:
    """Return whether a process ended with an error, without taking its exit code from the thread that waits for it."""
    assert process.pid is not None, "the process was started"
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the other thread has its exit code
        return bool(process.exitcode)
    return ended is not None and ended.si_status != 0


def _exit_code_of_stop(error: ProcessException) -> int | None:
    """Return the exit code of a process that ended because of a signal to end the run; None after another error."""
    code = error.exit_code if isinstance(error, ProcessExitedException) else 1
    if -code in STOP_SIGNALS:  # the signal came before or after the run
        return 128 - code
    return code if code > 128 else None


def drop_callbacks(trainer: Trainer, *, only_checkpoints: bool) -> None:
    """Keep callbacks from running in the main process after an error.

    After a stop, all have already run in the started processes. The main process has no models to save.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [each for each in callbacks if only_checkpoints and not isinstance(each, Checkpoint)]


def leave_process_group() -> None:
    """Destroy the process group of an earlier fit on one device in this process, and give up its port.

    Started processes would otherwise find the port in use, or inherit the group by a fork and train alone.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        os.environ.pop("MASTER_PORT", None)


def _counters(trainer: Trainer) -> tuple[Any, ...]:
    """Return the objects in which Lightning counts a fit's epochs, batches and steps."""
    loop = trainer.fit_loop.epoch_loop
    steps = (loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress)
    return (trainer.fit_loop.epoch_progress, loop.batch_progress, loop.scheduler_progress, *steps)


def refuse_in_notebook(launcher: object) -> None:
    """Raise ConfigError in a notebook for a launcher that would run the notebook's code again as a script."""
    if _IS_INTERACTIVE and isinstance(launcher, _Launcher) and not launcher.is_interactive_compatible:
        raise ConfigError(
            "several devices need processes, and a notebook's code cannot be run again in each of them; use "
            "Trainer(strategy='realloc_fork'), or ReallocStrategy(launcher='fork'), which copies the notebook's "
            "process, and create nothing on a GPU before fit; or run a script"
        )
