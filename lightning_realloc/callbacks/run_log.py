"""Callback that logs an iteration as a line of text where a progress bar cannot be drawn, such as in a job's log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_info

MIN_SECONDS_BETWEEN_LINES = 2.0
"""Iterations that end sooner after the last line get no line. A smaller value makes longer logs."""


class RunLog(Callback):
    """Log step, reward, losses, speed and response lengths of iterations, one line each.

    Every algorithm of this package adds it to the Trainer. It takes the place of Lightning's progress bar if standard
    output is neither a terminal nor a notebook: in a file, a bar appears at its end only.
    ``Trainer(enable_progress_bar=False)`` switches off both.

    Args:
        min_seconds: Least seconds between two lines. The first and the last iteration always have one.
    """

    def __init__(self, min_seconds: float = MIN_SECONDS_BETWEEN_LINES) -> None:
        self.min_seconds = min_seconds
        self._bar: TQDMProgressBar | RichProgressBar | None = None
        """The bar whose place this log takes; None: this log is off."""
        self._step = 0
        self._began_at = 0.0
        self._logged_at: float | None = None
        self._seconds = 0.0
        self._num_tokens = 0
        self._num_iterations = 0

    # ---- hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switch off the progress bar if lines take its place."""
        self.teardown(trainer, pl_module, stage)  # an exception may have ended an earlier fit without it
        bar, replaces = trainer.progress_bar_callback, stage == "fit" and trainer.is_global_zero
        if replaces and isinstance(bar, TQDMProgressBar | RichProgressBar) and not can_draw_bars():
            self._bar = bar
            bar.disable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the run's first step, which is not 0 in a resumed run."""
        self._step, self._logged_at = trainer.global_step, None
        self._forget()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Start the clock."""
        self._began_at = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log a line if one is due."""
        now = time.perf_counter()
        self._seconds += now - self._began_at
        if self._bar is None or trainer.global_step == self._step:
            return  # without a step, as when dynamic sampling lacks groups
        self._step = trainer.global_step
        self._num_iterations += 1
        lengths = getattr(trainer.strategy, "lengths", None)
        self._num_tokens += 0 if lengths is None else lengths.num_tokens
        is_due = self._logged_at is None or now - self._logged_at >= self.min_seconds
        if is_due or _is_last(trainer):
            rank_zero_info(f"{_position(trainer)}: {', '.join(self._parts(trainer))}")
            self._logged_at = now
            self._forget()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of held-out samples."""
        if self._bar is None or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if found := [f"{name} {float(metrics[name]):.4g}" for name in metrics if name.startswith("val/")]:
            rank_zero_info(f"{_position(trainer)}: {', '.join(found)}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the progress bar as it was."""
        if self._bar is not None:
            self._bar.enable()
        self._bar = None

    # ---- lines
    def _forget(self) -> None:
        self._seconds, self._num_tokens, self._num_iterations = 0.0, 0, 0

    def _parts(self, trainer: Trainer) -> Iterator[str]:
        """Yield the parts of a line; time and speed are means since the last line."""
        yield from _results(trainer.callback_metrics)
        yield f"{self._seconds / self._num_iterations:.3g} s"
        lengths = getattr(trainer.strategy, "lengths", None)
        if lengths is not None:
            yield f"{self._num_tokens / self._seconds:.4g} tokens/s"
            yield f"responses of {min(lengths.responses)} to {max(lengths.responses)} tokens"


def can_draw_bars() -> bool:
    """Return whether progress bars can be drawn: on a terminal, and in a notebook."""
    return _IS_INTERACTIVE or sys.stdout.isatty()


def _results(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reward or score, the losses of all roles, and skipped steps if there are any."""
    losses = [name for name in metrics if name.endswith("/loss") and not name.startswith("val/")]
    for name in ("reward", "score", *losses):
        if name in metrics:
            yield f"{name} {float(metrics[name]):.4g}"
    for name, value in metrics.items():
        if name.endswith("/skipped_steps") and float(value) > 0:
            yield f"{name} {float(value):g}"


def _position(trainer: Trainer) -> str:
    return f"step {trainer.global_step}" + (f"/{trainer.max_steps}" if trainer.max_steps > 0 else "")


def _is_last(trainer: Trainer) -> bool:
    """Return whether the run ends with this iteration, as far as its limits tell."""
    if trainer.should_stop or trainer.global_step == trainer.max_steps:
        return True
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
