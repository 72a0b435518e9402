"""Additional text in the line of Lightning's progress bars, drawn by tqdm or Rich.

The text is read whenever the line is drawn. So it is never older than the line, and nothing of Lightning's changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

_BARS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""Name of a Trainer's function -> name of its bar."""


def has_bars(trainer: Trainer) -> bool:
    """Return whether the Trainer draws bars of tqdm or Rich on this rank."""
    callback = trainer.progress_bar_callback
    return isinstance(callback, TQDMProgressBar | RichProgressBar) and callback.is_enabled


def find_bar(trainer: Trainer) -> Any:
    """Return the bar that the Trainer draws now: tqdm's, or Rich's display with the bar's id; None without one."""
    callback, name = trainer.progress_bar_callback, _BARS.get(str(trainer.state.fn and trainer.state.fn.value))
    if name is None or not has_bars(trainer):
        return None
    if isinstance(callback, RichProgressBar):
        name = "val_sanity" if trainer.sanity_checking else name
        task = getattr(callback, f"{name}_progress_bar_id", None)
        return None if callback.progress is None or task is None else (callback.progress, task)
    name = "val" if trainer.sanity_checking else name
    with suppress(TypeError):  # Lightning's for a bar that does not exist yet
        return getattr(callback, f"{name}_progress_bar")
    return None


class _TextInTqdm:
    """Replaces the function of one bar that formats its line."""

    def __init__(self, bar: Any, text: Callable[[], str]) -> None:
        self._bar, format_line = bar, bar.format_meter

        def format_with_text(**fields: Any) -> str:
            shown, postfix = text(), fields.get("postfix")
            if shown and isinstance(postfix, str | None):
                fields["postfix"] = f"{shown}, {postfix}" if postfix else shown
            line: str = format_line(**fields)
            return line

        bar.format_meter = format_with_text

    def refresh(self) -> None:
        """Draw the line again; do nothing if the bar is closed."""
        with self._bar.get_lock():  # or the bar could be closed after tqdm looks whether it is
            self._bar.refresh(nolock=True)

    def is_in(self, bar: object) -> bool:
        """Return whether this is the text of ``bar``, as `find_bar` returned it."""
        return bar is self._bar

    def remove(self) -> None:
        """Leave the bar as it was."""
        vars(self._bar).pop("format_meter", None)


class _TextInRich:
    """Replaces the display's last column, which shows metrics, by one that shows text and metrics."""

    def __init__(self, progress: Progress, task: TaskID, text: Callable[[], str]) -> None:
        self._progress, self._task = progress, task
        *others, metrics = progress.columns
        assert isinstance(metrics, ProgressColumn), "Lightning adds its column of metrics after those of a subclass"
        self._metrics = metrics
        progress.columns = (*others, _TextAndMetrics(metrics, task, text))

    def refresh(self) -> None:
        self._progress.refresh()

    def is_in(self, bar: object) -> bool:
        return bar == (self._progress, self._task)

    def remove(self) -> None:
        self._progress.columns = (*self._progress.columns[:-1], self._metrics)


class _TextAndMetrics(ProgressColumn):
    """One column, so that a narrow terminal wraps both in as few lines as possible."""

    def __init__(self, metrics: ProgressColumn, task: TaskID, text: Callable[[], str]) -> None:
        super().__init__(metrics.get_table_column())
        self._metrics, self._task, self._text = metrics, task, text

    def render(self, task: Task) -> Text:
        metrics, shown = self._metrics(task), self._text() if task.id == self._task else ""
        return Text.assemble(shown, " " if shown else "", metrics if isinstance(metrics, Text) else "")


TextInBar = _TextInTqdm | _TextInRich


def add_text(bar: Any, text: Callable[[], str]) -> TextInBar:
    """Show ``text()`` in a bar that `find_bar` returned, in front of its metrics."""
    return _TextInRich(bar[0], bar[1], text) if isinstance(bar, tuple) else _TextInTqdm(bar, text)
