"""Start the script once per device, and exit only after those processes: with an error if one of them failed."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.errors import RankLost
from lightning_realloc.parent_watch import children_watch_this_process
from lightning_realloc.runtime.messages.kept_states import states_kept_in
from lightning_realloc.strategies.lightning.failures import (
    end_started_ranks,
    log_way_to_resume,
    report_failed_ranks,
    without_cpp_warnings,
)
from lightning_realloc.strategies.lightning.last_checkpoint import with_last_resolved
from lightning_realloc.strategies.lightning.launchers import STUCK_S
from lightning_realloc.strategies.lightning.process_group import LOOPBACK
from lightning_realloc.strategies.lightning.signals import STOP_SIGNALS

REPORT_S = 0.5
"""Seconds between two checks for ranks that a signal has ended."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, whose process ends after the ranks that it started.

    Lightning's own process ends without waiting. A rank that fails later leaves no trace in the exit code.
    """

    _patience_s = STUCK_S
    """Seconds that the started ranks may outlive this process's script."""
    _is_success = False
    """Whether this process exits with 0, as far as its own run is concerned."""
    _trainer: Trainer | None = None
    """Trainer of the latest run."""

    def launch(
        self, function: Callable[..., Any], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> Any:
        """Start the processes unless they exist, and call the function here, too."""
        self._patience_s, self._is_success, self._trainer = STUCK_S, False, trainer
        args, kwargs = with_last_resolved(trainer, function, args, kwargs)
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        except SIGTERMException:  # all ranks have agreed on it, and end alike
            self._patience_s = math.inf
            raise
        except SystemExit as error:
            self._is_success = not error.code
            raise
        self._patience_s, self._is_success = math.inf, True
        return result

    def _call_children_scripts(self) -> None:
        atexit.register(self._end_last)
        if self.num_nodes == 1:  # so that every process finds that all are on one host
            os.environ["MASTER_ADDR"] = LOOPBACK
        with children_watch_this_process(), states_kept_in(self.states_folder), without_cpp_warnings():
            super()._call_children_scripts()
        threading.Thread(target=self._report_killed, name="names killed ranks", daemon=True).start()

    @cached_property
    def states_folder(self) -> str:
        """Folder of the started ranks' last states. It is removed with this launcher."""
        self._states = TemporaryDirectory(prefix="realloc-states-", ignore_cleanup_errors=True)
        return self._states.name

    @cached_property
    def reported(self) -> set[int]:
        """Started ranks that were reported as failed, as offsets from this rank."""
        return set()

    def _report_killed(self) -> None:
        """Name the first rank that a signal ends, its call, and the way to resume.

        Lightning's observer kills this process soon after, mostly before it fails with a lost connection.
        """
        while self.procs:
            time.sleep(REPORT_S)
            for number, process in enumerate(list(self.procs), start=1):
                code = process.poll() or 0
                if code < 0 and -code not in STOP_SIGNALS and process in self.procs:
                    report_failed_ranks(self.cluster_environment.global_rank(), {number: code}, self)
                    log_way_to_resume(self._trainer, RankLost("a started rank was killed"))
                    return

    def _end_last(self) -> None:
        """Wait for the started ranks, and exit with the code of a failed one if this process would exit with 0."""
        rank = self.cluster_environment.global_rank()
        try:
            failed = end_started_ranks(self, self._patience_s)
        except KeyboardInterrupt:  # during the wait; the parent's end ends them, too
            return
        if failed and self._is_success:
            report_failed_ranks(rank, failed, self)
            logging.shutdown()
            sys.stdout.flush()
            code = next(iter(failed.values()))
            os._exit(code if code > 0 else 128 - code)  # Python offers no other way to set the exit code here
