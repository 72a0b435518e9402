"""What does a policy answer while it learns? A table of a few samples with their rewards, now and then.

Ranks tell each other the first samples with everything else that all of them are to know; the first rank writes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lightning_realloc.errors import ConfigError

_KEY = "rollouts"
"""What loggers and files call the table."""
_MOST_LETTERS = 1000
"""Of a cell in TensorBoard, which shows whole tables at once."""

Row = Mapping[str, object]


class RolloutTable(Callback):
    """Writes prompts, responses and rewards of an iteration to every logger that can show them.

    A ``CSVLogger`` gets ``rollouts.csv`` beside its metrics, a ``TensorBoardLogger`` a text, a ``WandbLogger`` a table.
    The samples are those with the lowest ids: responses to the same prompt follow each other.

    Args:
        every_n_steps: Iterations from one table to the next.
        num_samples: Rows of a table.
        path: A CSV file, with or without loggers; a run that is resumed appends to it.
    """

    def __init__(self, *, every_n_steps: int = 50, num_samples: int = 8, path: str | Path | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_samples", num_samples)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1; leave the callback out for no table")
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.path = None if path is None else Path(path)
        self._began_at = 0
        self._headers: dict[Path, list[str]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse runs whose samples cannot be had, or shown."""
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "num_shown") or not hasattr(pl_module, "sample_rows"):
            raise ConfigError(
                f"RolloutTable shows samples of this package's algorithms under strategy='realloc'; this is "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__}, leave the callback out"
            )
        if self.path is None and not any(_shows_tables(logger) for logger in trainer.loggers):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
            raise ConfigError(
                f"RolloutTable writes to CSVLogger, TensorBoardLogger and WandbLogger, and the loggers are: {names}; "
                f"add one, or give path='rollouts.csv'"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin files anew, unless the run is resumed."""
        self._began_at, self._headers = trainer.global_step, {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Ask for samples of the iterations that are shown."""
        strategy: Any = trainer.strategy
        is_due = (trainer.global_step + 1) % self.every_n_steps == 0
        strategy.num_shown, strategy.shown = (self.num_samples if is_due else 0), ()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Show what was asked for, perhaps one iteration ago."""
        if not trainer.is_global_zero:
            return
        for samples in trainer.strategy.shown:  # type: ignore[attr-defined]
            rows = pl_module.sample_rows(samples)  # type: ignore[operator]
            if rows:  # none where all responses wait for the next iteration
                self._write([{"step": trainer.global_step, **row} for row in rows], trainer)

    def _write(self, rows: Sequence[Row], trainer: Trainer) -> None:
        if self.path is not None:
            self._append(self.path, rows)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                self._append(Path(logger.log_dir) / f"{_KEY}.csv", rows)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(_KEY, markdown(rows), trainer.global_step)
            elif isinstance(logger, WandbLogger):
                cells = [[_text(value) for value in row.values()] for row in rows]
                logger.log_text(_KEY, columns=list(rows[0]), data=cells, step=trainer.global_step)

    def _append(self, path: Path, rows: Sequence[Row]) -> None:
        """Write rows under the header that the file has; what later rows have besides is left out."""
        goes_on = path in self._headers or (self._began_at > 0 and path.is_file())
        if goes_on and path not in self._headers:
            with path.open(newline="", encoding="utf-8") as file:
                self._headers[path] = next(csv.reader(file), list(rows[0]))
        header = self._headers.setdefault(path, list(rows[0]))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if goes_on else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header, extrasaction="ignore")
            if not goes_on:
                writer.writeheader()
            writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of rows with the same columns, a row per line, long cells cut."""
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([_cell(row[name]) for name in header] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shows_tables(logger: Logger) -> bool:
    return isinstance(logger, CSVLogger | TensorBoardLogger | WandbLogger)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _cell(value: object) -> str:
    text = " ⏎ ".join(_text(value).splitlines()).replace("|", "\\|")
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"
