"""Callback that logs an iteration as a line of text where a progress bar cannot be drawn, such as in a job's log."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import mean, median
from typing import Any, TextIO

from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.scores.question_scores import interval_names
from lightning_realloc.trainers import is_last_iteration, planned_iterations

MIN_SECONDS_BETWEEN_LINES = 2.0
"""Iterations that end sooner after the last line get no line. A smaller value makes longer logs."""
MIN_SECONDS_OF_PAUSE = 2.0
"""Least seconds of a save, a search or a change of plans between two iterations that gets a line."""
NUM_RECENT, MIN_RECENT = 20, 3
"""Latest iterations from which the remaining time is estimated, and the least number of them."""
MIN_SHARE_SHOWN = 0.01
"""Least share of the calls' seconds that a kind of calls is shown with."""
_KINDS = {"generate": "gen", "infer": "infer", "compute": "compute", "train": "train"}
"""Kind of a call -> its name in a line, in the order of an iteration."""


class RunLog(Callback):
    """Log step, reward, KL, response length, seconds, speed and remaining time of iterations, one line each.

    Every algorithm of this package adds it to the Trainer. It takes the place of Lightning's progress bar if standard
    output is neither a terminal nor a notebook: in a file, a bar is one line of thousands of characters. Validation,
    test and prediction have no bar there, either.
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
        """Seconds of iterations since the last line."""
        self._num_tokens = self._num_iterations = 0
        """Prompt and response tokens, and iterations, since the last line."""
        self._remaining = RemainingTime()
        self._paused_until = 0.0
        """Seconds of `time.monotonic` until which pauses have been logged."""

    # ---- hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switch off the progress bar if lines take its place."""
        self.teardown(trainer, pl_module, stage)  # an exception may have ended an earlier fit without it
        bar, replaces = trainer.progress_bar_callback, trainer.is_global_zero and not can_draw_bars()
        if replaces and isinstance(bar, TQDMProgressBar | RichProgressBar):
            self._bar = bar
            bar.disable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the run's first step, which is not 0 in a resumed run."""
        self._step, self._logged_at, self._remaining = trainer.global_step, None, RemainingTime()
        self._paused_until = time.monotonic()
        self._forget()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Log the pause before the iteration, and start the clock."""
        self._log_pauses(trainer)
        self._began_at = time.monotonic()
        self._remaining.begin(self._began_at)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log a line if one is due."""
        now = time.monotonic()
        self._seconds += now - self._began_at
        self._remaining.end(now, has_step=trainer.global_step != self._step)
        if self._bar is None or trainer.global_step == self._step:
            return  # without a step, as when dynamic sampling lacks groups
        self._step = trainer.global_step
        self._num_iterations += 1
        lengths = getattr(trainer.strategy, "lengths", None)
        self._num_tokens += 0 if lengths is None else lengths.num_tokens
        is_due = self._logged_at is None or now - self._logged_at >= self.min_seconds
        if is_due or is_last_iteration(trainer):
            _log(trainer, *self._parts(trainer))
            self._logged_at = now
            self._forget()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of held-out samples."""
        if self._bar is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return  # Lightning prints the metrics of trainer.validate()
        metrics = trainer.callback_metrics
        if found := list(_held_out({name: value for name, value in metrics.items() if name.startswith("val/")})):
            _log(trainer, *found)

    def on_evaluation_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float], scores: object
    ) -> None:
        """Log the scores of evaluation sets."""
        if self._bar is None or trainer.state.fn != TrainerFn.FITTING:
            return  # Lightning prints the metrics of trainer.validate()
        _log(trainer, *(one for one in _held_out(metrics) if "accuracy" in one or "@" in one))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the progress bar as it was."""
        if self._bar is not None:
            self._bar.enable()
        self._bar = None

    # ---- lines
    def _forget(self) -> None:
        self._seconds, self._num_tokens, self._num_iterations = 0.0, 0, 0

    def _parts(self, trainer: Trainer) -> Iterator[str]:
        """Yield the parts of a line; the speed is a mean since the last line."""
        metrics, lengths = trainer.callback_metrics, getattr(trainer.strategy, "lengths", None)
        yield from _results(metrics)
        if lengths is not None:
            yield f"len {mean(lengths.responses):.0f}"
        yield _times(trainer) or _seconds(self._seconds / self._num_iterations)
        if lengths is not None:
            yield f"{self._num_tokens / self._seconds:.0f} tok/s"
        total = planned_iterations(trainer)
        seconds = None if total is None else self._remaining.seconds(total - trainer.global_step)
        if seconds:
            yield f"eta {format_duration(seconds)}"

    def _log_pauses(self, trainer: Trainer) -> None:
        """Log long activities between the last iteration and this one, such as the save of a checkpoint."""
        since, self._paused_until = self._paused_until, time.monotonic()
        if self._bar is None or getattr(trainer.strategy, "dataflow", None) is None:
            return
        for activity in run_view(trainer).runner.record.latest():
            is_pause = activity.depth == 0 and activity.kind in ("save", "other") and activity.began_at >= since
            if is_pause and activity.elapsed(self._paused_until) >= MIN_SECONDS_OF_PAUSE:
                _log(trainer, f"{activity.name} {activity.elapsed(self._paused_until):.1f}s")


class RemainingTime:
    """Estimates the rest of a run: the median iteration, and the mean time between two, for saves and validation."""

    def __init__(self) -> None:
        self._inside: deque[float] = deque(maxlen=NUM_RECENT)
        """Seconds of the latest iterations with a step."""
        self._unfinished_s = 0.0
        """Seconds of iterations without a step since the last one with a step."""
        self._between_s, self._num_between = 0.0, 0
        self._began_at = 0.0
        self._ended_at: float | None = None

    def begin(self, now: float) -> None:
        """Begin an iteration."""
        if self._ended_at is not None:
            self._between_s, self._num_between = self._between_s + now - self._ended_at, self._num_between + 1
        self._began_at = now

    def end(self, now: float, *, has_step: bool) -> None:
        """End an iteration. Its time counts for the next step if it took none."""
        self._ended_at = now
        self._unfinished_s += now - self._began_at
        if has_step:
            self._inside.append(self._unfinished_s)
            self._unfinished_s = 0.0

    def seconds(self, num_steps: int) -> float | None:
        """Return the estimated seconds of further steps; None after too few of them."""
        if len(self._inside) < MIN_RECENT:
            return None
        return num_steps * (median(self._inside) + self._between_s / max(1, self._num_between))


def format_duration(seconds: float) -> str:
    """Return seconds in the two largest units: ``45s``, ``3m20s``, ``2h10m``, ``3d04h``."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{int(seconds) % 60:02}s" if minutes else f"{int(seconds)}s"


def can_draw_bars(stream: TextIO | None = None) -> bool:
    """Return whether progress bars can be drawn on a stream, or on standard output: a terminal, and in a notebook."""
    return _IS_INTERACTIVE or (stream or sys.stdout).isatty()


def _results(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reward or score, without one the losses; the divergence; skipped steps if there are any."""
    judged = [name for name in ("reward", "score") if name in metrics]
    losses = [name for name in metrics if name.endswith("/loss") and not name.startswith("val/")]
    for name in judged or losses:
        yield f"{name.rpartition('/')[2] if len(losses) == 1 else name} {_number(metrics[name])}"
    if "actor/kl" in metrics:
        yield f"kl {_number(metrics['actor/kl'])}"
    for name, value in metrics.items():
        if name.endswith("/skipped_steps") and float(value) > 0:
            yield f"{name} {float(value):g}"


def _held_out(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics of held-out samples, scores with their interval."""
    ends = {name: interval_names(name) for name in metrics if {*interval_names(name)} <= metrics.keys()}
    shown_as_ends = {name for pair in ends.values() for name in pair}
    for name in metrics:
        if name not in shown_as_ends:
            interval = "-".join(_number(metrics[one]) for one in ends.get(name, ()))
            yield f"{name} {_number(metrics[name])}" + (f" ({interval})" if interval else "")


def _times(trainer: Trainer) -> str:
    """Return the seconds of calls by kind, and the mean share of waiting; "" where the strategy measures none."""
    metrics, seconds = trainer.callback_metrics, dict.fromkeys(_KINDS, 0.0)
    flow: Dataflow | None = getattr(trainer.strategy, "dataflow", None)
    for call in () if flow is None else flow.calls:
        seconds[call.kind] += float(metrics.get(f"seconds/{call.name}", 0.0))
    least = MIN_SHARE_SHOWN * sum(seconds.values())
    parts = [f"{_KINDS[kind]} {_seconds(value)}" for kind, value in seconds.items() if value > least]
    if "idle_share" in metrics:
        parts.append(f"idle {float(metrics['idle_share']):.0%}")
    return " ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 100 else 1 if seconds >= 1 else 2}f}s"


def _number(value: Any) -> str:
    return f"{float(value):.4g}"


def _log(trainer: Trainer, *parts: str) -> None:
    """Log the step, of how many if that is known, and the parts that are not empty."""
    total = planned_iterations(trainer)
    position = f"step {trainer.global_step}" + (f"/{total}" if total else "")
    rank_zero_info("  ".join(filter(None, (position, *parts))))
