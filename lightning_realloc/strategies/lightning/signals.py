"""End a run on SIGTERM: the handler sets a flag, and all ranks stop at the end of the same iteration.

Lightning's own handler broadcasts inside the signal handler. If a rank is elsewhere at that moment, it never joins,
and all ranks hang. Here the flag travels with messages that ranks exchange in every iteration anyway.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

_log = logging.getLogger(__name__)

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that ended because of SIGTERM, as shells report it."""
_METRIC = "stop_requested"


class StopRequest:
    """Request to end the run after SIGTERM, first known to one rank and then to all."""

    def __init__(self) -> None:
        self.is_requested = False
        """Whether this rank received SIGTERM."""
        self.is_agreed = False
        """Whether all ranks know that a rank received SIGTERM. Equal on all ranks after an iteration."""
        self.is_shared = False
        """Whether messages of an iteration carried the request since the last call of `agree_before_batch`."""

    # ---- with the messages of an iteration
    def as_metrics(self) -> dict[str, float]:
        """Return the request as a metric, to send with this rank's metrics."""
        self.is_shared = True
        return {_METRIC: 1.0} if self.is_requested else {}

    def pop_from(self, metrics: dict[str, float]) -> None:
        """Remove the request from the merged metrics of all ranks, and record it in `is_agreed`."""
        self.is_agreed |= metrics.pop(_METRIC, 0.0) > 0

    # ---- with Lightning
    def handle_sigterm(self, trainer: Any) -> None:
        """Replace Lightning's SIGTERM handling in the coming run. Handlers that users installed are still called."""
        self.is_requested = self.is_agreed = self.is_shared = False

        def request(*_: object) -> None:  # runs between any two bytecodes: no logging, no collective
            self.is_requested = True
            if trainer.world_size == 1:
                trainer._signal_connector.received_sigterm = True

        trainer._signal_connector._sigterm_notifier_fn = request
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: self.agree_before_batch(trainer)

    def end_run(self, trainer: Trainer) -> None:
        """End the run after this batch."""
        connector = trainer._signal_connector
        if not connector.received_sigterm:
            where = "this rank" if self.is_requested else "another rank"
            _log.warning("%s received SIGTERM: the run ends after step %d", where, trainer.global_step)
            connector.received_sigterm = True

    def agree_before_batch(self, trainer: Trainer) -> None:
        """Agree on the request by an all-reduce, unless messages carried it since the last batch.

        That is the case before the first batch, for modules without calls, and for hand-written training steps.

        Raises:
            SIGTERMException: on all ranks, if one of them received SIGTERM.
        """
        is_shared, self.is_shared = self.is_shared, False
        if is_shared:
            return
        requested = torch.tensor(self.is_requested, dtype=torch.uint8, device=trainer.strategy.root_device)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        self.is_agreed |= bool(requested)
        if self.is_agreed:
            self.end_run(trainer)
            raise SIGTERMException

    def resend_if_unanswered(self, trainer: Trainer) -> None:
        """End this process if its SIGTERM came after the last iteration. After an error, the error ends it."""
        if not trainer.interrupted:
            trainer._signal_connector.teardown()  # restores the handlers from before the run
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)


def set_exit_code(error: BaseException) -> None:
    """Make Lightning's SIGTERMException exit the process with 143; its default is 0."""
    if isinstance(error, SIGTERMException) and error.code is None:
        error.code = SIGTERM_EXIT_CODE


@contextmanager
def sigterm_forwarded(launcher: _MultiProcessingLauncher) -> Iterator[None]:
    """Forward SIGTERM to the processes that a launcher started, and keep waiting for them."""
    if current_thread() is not main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda signum, _: launcher.kill(signal.Signals(signum)))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
