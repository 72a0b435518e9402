"""End a run on SIGTERM, Ctrl-C or Slurm's warning: all ranks stop at the end of the same iteration.

Lightning's own handlers broadcast or save a checkpoint inside the signal handler. If a rank is elsewhere at that
moment, it never joins, and all ranks hang. Here a handler sets a flag, which travels with messages that ranks exchange
in every iteration anyway.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

_log = logging.getLogger(__name__)

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that ended because of SIGTERM, as shells report it."""
INTERRUPT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a process that ended because of Ctrl-C."""
SAME_INTERRUPT_S = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C: a rank may get it from the terminal and from a launcher."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
"""Signals that end a run; Windows has no SIGUSR1."""
_METRIC = "stop_requested"


class StopRequest:
    """Request to end the run after a signal, first known to one rank and then to all."""

    def __init__(self) -> None:
        self.requested: int = 0
        """Number of the signal that this rank received; 0 without one."""
        self.agreed: int = 0
        """Number of the signal that some rank received. Equal on all ranks after an iteration; 0 without one."""
        self.is_shared = False
        """Whether messages of an iteration carried the request since the last call of `agree_before_batch`."""
        self.is_logged = False
        """Whether this rank has logged why the run ends."""

    # ---- with the messages of an iteration
    def as_metrics(self) -> dict[str, float]:
        """Return the request as a metric, to send with this rank's metrics."""
        self.is_shared = True
        return {_METRIC: float(self.requested)} if self.requested else {}

    def pop_from(self, metrics: dict[str, float]) -> None:
        """Remove the request from the merged metrics of all ranks, and record it in `agreed`."""
        self.agreed = max(self.agreed, int(metrics.pop(_METRIC, 0.0)))

    # ---- with Lightning
    def handle_signals(self, trainer: Trainer) -> None:
        """Replace Lightning's handling of SIGTERM, and of Slurm's signal, in the coming run.

        Handlers that users installed are still called.
        """
        self.requested = self.agreed = 0
        self.is_shared = self.is_logged = False
        connector: Any = trainer._signal_connector
        epoch_loop: Any = trainer.fit_loop.epoch_loop

        def request(signum: int, _: object) -> None:  # runs between any two bytecodes: no logging, no collective
            self.requested = max(self.requested, signum)
            if trainer.world_size == 1:
                connector.received_sigterm = True

        connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = request
        epoch_loop._broadcast_sigterm_tensor = lambda: self.agree_before_batch(trainer)

    def handle_interrupts(self, trainer: Trainer) -> None:
        """Handle Ctrl-C and SIGUSR1 from now on until the run ends, unless the user has a handler for them.

        The first Ctrl-C ends the run after this iteration, the second one at once. SIGUSR1 ends the run like SIGTERM;
        by default it would kill the process.
        """
        if current_thread() is not main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt_handler(trainer))
        if hasattr(signal, "SIGUSR1") and not has_handler(signal.SIGUSR1):
            notify: Any = trainer._signal_connector._sigterm_notifier_fn
            signal.signal(signal.SIGUSR1, notify)

    def _interrupt_handler(self, trainer: Trainer) -> Callable[[int, FrameType | None], None]:
        first_at: list[float] = []

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if first_at and time.monotonic() - first_at[0] > SAME_INTERRUPT_S:
                signal.default_int_handler(signum, frame)
            if first_at:
                return
            first_at.append(time.monotonic())
            if trainer.is_global_zero:
                os.write(2, b"\nCtrl-C: the run ends after this iteration. Press it again to end at once.\n")
            notify: Any = trainer._signal_connector._sigterm_notifier_fn
            notify(signum, frame)

        return interrupt

    def end_run(self, trainer: Trainer) -> None:
        """End the run after this batch."""
        self.agreed = self.agreed or self.requested
        self.log_reason(trainer)
        trainer._signal_connector.received_sigterm = True

    def log_reason(self, trainer: Trainer) -> None:
        """Log once which signal ends the run, and after which step."""
        signum = self.agreed or self.requested
        if not self.is_logged and signum:
            where = "this rank" if self.requested else "another rank"
            name = signal.Signals(signum).name
            _log.warning("%s received %s: the run ends after step %d", where, name, trainer.global_step)
        self.is_logged = True

    def end_with(self, error: SIGTERMException, trainer: Trainer | None) -> None:
        """Set the exit code to 128 + the signal's number; with a trainer, log the reason and requeue a Slurm job."""
        if error.code is None:  # Lightning's default is 0
            error.code = 128 + (self.agreed or self.requested or signal.SIGTERM)
        if trainer is not None:
            self.log_reason(trainer)
            self.requeue(trainer)

    def requeue(self, trainer: Trainer) -> None:
        """Save a checkpoint and requeue the Slurm job, if a rank received Slurm's signal. Collective over all ranks."""
        environment = trainer._accelerator_connector.cluster_environment
        connector: Any = trainer._signal_connector
        asked = self.agreed or self.requested
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        if asked == environment.requeue_signal:
            type(connector)._slurm_sigusr_handler_fn(connector, asked, None)

    def agree_before_batch(self, trainer: Trainer) -> None:
        """Agree on the request by an all-reduce, unless messages carried it since the last batch.

        That is the case before the first batch, for modules without calls, and for hand-written training steps.

        Raises:
            SIGTERMException: on all ranks, if one of them received a signal.
        """
        is_shared, self.is_shared = self.is_shared, False
        if is_shared:
            return
        requested = torch.tensor(self.requested, dtype=torch.uint8, device=trainer.strategy.root_device)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        self.agreed = max(self.agreed, int(requested))
        if self.agreed:
            self.end_run(trainer)
            raise SIGTERMException

    def resend_if_unanswered(self, trainer: Trainer) -> None:
        """End this process if its SIGTERM came after the last iteration. After an error, the error ends it."""
        if not trainer.interrupted:
            trainer._signal_connector.teardown()  # restores the handlers from before the run
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)


def has_handler(signum: int) -> bool:
    """Return whether a signal has a handler. On Linux, count those that C code installed, such as ``faulthandler``."""
    if signal.getsignal(signum) is not signal.SIG_DFL:
        return True
    status = Path("/proc/self/status")
    caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


class _Forwarding:
    """Handler that forwards a signal to the processes that a launcher started."""

    def __init__(self, launcher: _MultiProcessingLauncher, signum: int) -> None:
        self.previous = signal.getsignal(signum)
        self._launcher = launcher

    def __call__(self, signum: int, _: FrameType | None) -> None:
        self._launcher.kill(signal.Signals(signum))


@contextmanager
def signals_forwarded(launcher: _MultiProcessingLauncher) -> Iterator[None]:
    """Forward signals that end the run to the processes that a launcher started, and keep waiting for them."""
    if current_thread() is not main_thread():
        yield
        return
    for signum in STOP_SIGNALS:
        if signum in (signal.SIGTERM, signal.SIGINT) or not has_handler(signum):
            signal.signal(signum, _Forwarding(launcher, signum))
    try:
        yield
    finally:
        forward_no_signals()


def forward_no_signals() -> None:
    """Restore the handlers from before `signals_forwarded`, which a forked process inherits."""
    for signum in STOP_SIGNALS:
        handler = signal.getsignal(signum)
        if isinstance(handler, _Forwarding):
            signal.signal(signum, handler.previous)
