"""Callback that shows inside the progress bar what an iteration does: the call, its finished parts, and its speed.

A thread reads the rank's flight record and draws the bar again. The thread that trains counts, and does no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from lightning_realloc.callbacks.progress.bars import TextInBar, add_text, find_bar, has_bars
from lightning_realloc.callbacks.run_log import can_draw_bars
from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.runtime.messages.flight_record import BEFORE, BETWEEN, Activity, FlightRecord

UPDATE_S, RICH_UPDATE_S = 0.5, 1.0
"""Seconds between two updates of tqdm's bar, and of Rich's or one in a notebook, which take ten times as long to draw.
Larger values take less of an iteration's time."""
MAX_STOP_S = 1.0
"""Most seconds to wait for the thread at the end of a run."""
MIN_SECONDS_SHOWN = 2.0
"""Seconds after which an activity without finished parts shows its duration."""


class CallProgress(Callback):
    """Show in the Trainer's progress bar which call runs, its finished parts, and the speed of generation.

    Every algorithm of this package adds it to the Trainer. Rank 0 shows its own part of a call. Without a bar of tqdm
    or Rich, with ``Trainer(enable_progress_bar=False)``, and if standard output is a file, it does nothing.

    Args:
        interval_s: Seconds between two updates; None: 0.5 for tqdm on a terminal, else 1.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        self.interval_s = interval_s
        self._painter: _Painter | None = None

    # ---- hooks
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to show progress, unless there is no bar for it, or it is shown already."""
        has_calls = getattr(trainer.strategy, "dataflow", None) is not None
        if self._painter is None and has_calls and trainer.is_global_zero and has_bars(trainer) and can_draw_bars():
            record = run_view(trainer).runner.record
            is_slow = _IS_INTERACTIVE or isinstance(trainer.progress_bar_callback, RichProgressBar)
            interval_s = self.interval_s or (RICH_UPDATE_S if is_slow else UPDATE_S)
            self._painter = _Painter(trainer, ActivityText(record), interval_s)
            self._painter.start()

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar as it was."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the bar as it was."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the bar as it was."""
        self._stop()

    def _stop(self) -> None:
        painter, self._painter = self._painter, None
        if painter is not None:
            painter.stop()


class _Painter(threading.Thread):
    """Draws the Trainer's bar again whenever the text has changed."""

    def __init__(self, trainer: Trainer, text: Callable[[], str], interval_s: float) -> None:
        super().__init__(name="progress", daemon=True)
        self._trainer, self._text, self._interval_s = trainer, text, interval_s
        self._stopped = threading.Event()
        self._shown: TextInBar | None = None

    def run(self) -> None:
        drawn = ""
        while not self._stopped.wait(self._interval_s):
            bar = find_bar(self._trainer)
            if bar is None:
                continue
            if self._shown is None or not self._shown.is_in(bar):
                self._remove()
                self._shown = add_text(bar, self._text)
            text = self._text()
            if text != drawn:
                self._shown.refresh()
                drawn = text

    def stop(self) -> None:
        """End the thread, and remove the text from the bar."""
        self._stopped.set()
        self.join(MAX_STOP_S)  # tqdm keeps its lock if Ctrl-C interrupts it, and the thread would wait for ever
        self._remove()

    def _remove(self) -> None:
        if self._shown is not None:
            self._shown.remove()
        self._shown = None


class ActivityText:
    """Describes the activity of a rank in a line; "" outside of activities. Called by several threads.

    Counts of an activity never decrease: a response that ends a turn counts as finished until its environment answers.

    Args:
        record: Record of the rank.
        clock: Returns the seconds of `Activity.began_at`.
    """

    def __init__(self, record: FlightRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self._record, self._clock = record, clock
        self._lock = threading.RLock()  # a handler of signals may draw, too
        self._activity: Activity | None = None
        self._most_done = 0
        self._start: tuple[float, int] | None = None
        """When the activity's tokens were first read, and their number."""

    def __call__(self) -> str:
        outer, *inside = self._record.current()
        if outer.name in (BEFORE, BETWEEN):
            return ""
        with self._lock:
            if outer is not self._activity:
                self._activity, self._most_done, self._start = outer, 0, None
            text = f"{outer.name}{self._progress(outer)}"
        if inside and inside[-1].kind != "call":
            text += f": {inside[-1].name.removesuffix(f' for {outer.name}')}"
        return text

    def _progress(self, activity: Activity) -> str:
        read, seconds = activity.read_progress, activity.elapsed(self._clock())
        progress = None if read is None else read()
        if progress is None:
            return f" {seconds:.0f} s" if seconds >= MIN_SECONDS_SHOWN else ""
        self._most_done = max(self._most_done, progress.done)
        text = f" {self._most_done}" + ("" if progress.total is None else f"/{progress.total}") + f" {progress.unit}"
        if progress.num_tokens is not None:
            text += self._speed(progress.num_tokens)
        return text if progress.longest is None else f"{text}, longest {progress.longest}"

    def _speed(self, num_tokens: int) -> str:
        """Return the mean speed since the activity's tokens were first read."""
        now = self._clock()
        if self._start is None:
            self._start = now, num_tokens
        began_at, before = self._start
        return (
            f", {(num_tokens - before) / (now - began_at):.0f} tok/s" if num_tokens > before and now > began_at else ""
        )
