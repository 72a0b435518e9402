"""Callback that logs tables of sampled prompts, responses and rewards.

Ranks exchange the first samples together with the iteration's metadata; the first rank writes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lightning_realloc.callbacks.phase import realloc_strategy
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import local_path

_TABLE_NAME = "rollouts"
"""Name of the table in loggers and of its file."""
_MAX_CELL_CHARACTERS = 1000
"""Maximum length of a cell in TensorBoard, which shows whole tables at once; longer cells are cut."""

Row = Mapping[str, object]


class RolloutTable(Callback):
    """Write prompts, responses and rewards of an iteration to every logger that supports tables or text.

    A ``CSVLogger`` gets ``rollouts.csv`` next to its metrics, a ``TensorBoardLogger`` a text, a ``WandbLogger`` a
    table. The samples are those with the lowest ids, so responses to the same prompt follow each other.

    Args:
        every_n_steps: Iterations between tables.
        num_samples: Rows per table.
        path: CSV file to write in addition to loggers; a resumed run appends to it. None writes to loggers only.

    Example:
        >>> from lightning_realloc import RolloutTable
        >>> table = RolloutTable(every_n_steps=20)  # Trainer(strategy="realloc", callbacks=[table])
    """

    def __init__(self, *, every_n_steps: int = 50, num_samples: int = 8, path: str | Path | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_samples", num_samples)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1; remove the callback for no table")
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.path = None if path is None else local_path(path, "RolloutTable(path=...)")
        self._began_at = 0
        self._headers: dict[Path, list[str]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that samples are available and that a logger or file can show them."""
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "num_shown") or not hasattr(pl_module, "sample_rows"):
            raise ConfigError(
                f"RolloutTable shows samples of this package's algorithms under strategy='realloc'; this is "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__}, remove the callback"
            )
        if self.path is None and not any(_shows_tables(logger) for logger in trainer.loggers):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
            raise ConfigError(
                f"RolloutTable writes to CSVLogger, TensorBoardLogger and WandbLogger, but the loggers are: {names}; "
                f"add one, or give path='rollouts.csv'"
            )
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                local_path(logger.save_dir, "RolloutTable next to a CSVLogger")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start new files, unless the run is resumed."""
        self._began_at, self._headers = trainer.global_step, {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Request samples if the iteration is due."""
        strategy: Any = trainer.strategy
        is_due = (trainer.global_step + 1) % self.every_n_steps == 0
        strategy.num_shown, strategy.shown = (self.num_samples if is_due else 0), ()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write the requested samples, possibly one iteration later."""
        if not trainer.is_global_zero:
            return
        for samples in realloc_strategy(trainer).shown:
            rows = pl_module.sample_rows(samples)  # type: ignore[operator]
            if rows:  # empty if all responses wait for the next iteration
                step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as loggers count the metrics of an iteration
                self._write([{"step": step, **row} for row in rows], trainer, step)

    def _write(self, rows: Sequence[Row], trainer: Trainer, step: int) -> None:
        if self.path is not None:
            self._append(self.path, rows)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                self._append(Path(logger.log_dir) / f"{_TABLE_NAME}.csv", rows)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(_TABLE_NAME, markdown(rows), step)
            elif isinstance(logger, WandbLogger):
                cells = [[_text(value) for value in row.values()] for row in rows]
                logger.log_text(_TABLE_NAME, columns=list(rows[0]), data=cells, step=step)

    def _append(self, path: Path, rows: Sequence[Row]) -> None:
        """Append rows below the file's header; columns that it lacks are dropped."""
        appends = path in self._headers or (self._began_at > 0 and path.is_file())
        if appends and path not in self._headers:
            with path.open(newline="", encoding="utf-8") as file:
                self._headers[path] = next(csv.reader(file), list(rows[0]))
        header = self._headers.setdefault(path, list(rows[0]))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if appends else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header, extrasaction="ignore")
            if not appends:
                writer.writeheader()
            writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def markdown(rows: Sequence[Row]) -> str:
    """Return rows with the same columns as a Markdown table; long cells are cut."""
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
    return text if len(text) <= _MAX_CELL_CHARACTERS else text[: _MAX_CELL_CHARACTERS - 1] + "…"
