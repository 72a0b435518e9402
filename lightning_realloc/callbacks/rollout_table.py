"""Callback that logs tables of sampled prompts, responses and rewards.

Ranks exchange the first samples together with the iteration's metadata; the first rank writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.samples import IMAGES, Samples, answer_inputs, column_images, prompt_images
from lightning_realloc.callbacks.loggers.logged_table import Row, Table
from lightning_realloc.callbacks.loggers.sample_thumbnails import row_images
from lightning_realloc.callbacks.loggers.writers import WRITERS, LoggerOutput, logger_writer
from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.environments.columns import CONVERSATION, LAST_IMAGES
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_output import require_writable
from lightning_realloc.remote_path import as_path

_TABLE_NAME = "rollouts"
"""Name of the table in loggers and of its files."""


_OF_CONVERSATIONS = ("step", "reward", "score", "finish_reason", IMAGES)
"""Columns of the table that files of conversations have, too."""


class RolloutTable(Callback):
    """Write prompts, responses and rewards of an iteration to every logger that supports tables or text.

    A ``CSVLogger`` gets ``rollouts.csv`` next to its metrics, a ``TensorBoardLogger`` a text, a ``WandbLogger`` and a
    `TrackioLogger` a table, an ``MLFlowLogger`` an artifact ``rollouts/step_0000049.csv`` for each table. The samples
    are those with the lowest ids, so responses to the same prompt follow each other. A logger that cannot be written
    is named in a warning, and training goes on.

    Conversations with environments of messages are texts in the table. Next to a CSV file, ``rollouts.jsonl`` has
    them as data, which reports show as turns. Of images there are thumbnails in ``rollouts_images``, which the table
    names and reports show.

    Args:
        every_n_steps: Iterations between tables; the first iteration of a run has one, too.
        num_samples: Rows per table.
        path: CSV file to write in addition to loggers, or its address; a resumed run appends to it. None writes to
            loggers only.

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
        self.path = None if path is None else as_path(path)
        self._begins_run = True
        self._output = LoggerOutput()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that samples are available and that a logger or file can show them."""
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "num_shown") or not hasattr(pl_module, "sample_rows"):
            raise ConfigError(
                f"RolloutTable shows samples of this package's algorithms under strategy='realloc'; this is "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__}, remove the callback"
            )
        if self.path is None and not any(map(logger_writer, trainer.loggers)):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
            raise ConfigError(
                f"RolloutTable writes to {', '.join(WRITERS)}, but the loggers are: {names}; add one, or give "
                f"path='rollouts.csv'"
            )
        if self.path is not None:
            require_writable(self.path.parent, prefix="RolloutTable's path: ", error=ConfigError)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start new files, unless the run is resumed."""
        self._begins_run = trainer.global_step == 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Request samples if the iteration is due."""
        run = run_view(trainer)
        is_due = trainer.global_step == 0 or (trainer.global_step + 1) % self.every_n_steps == 0
        run.num_shown, run.shown = (self.num_samples if is_due else 0), ()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write the requested samples, possibly one iteration later."""
        if not trainer.is_global_zero:
            return
        sample_rows: Any = pl_module.sample_rows
        shown = run_view(trainer).shown
        rows = [row for samples in shown for row in sample_rows(samples)]
        if rows:  # empty if all responses wait for the next iteration
            images = row_images([groups for samples in shown for groups in _shown_images(samples)])
            if images is not None:
                rows = [{**row, IMAGES: names} for row, names in zip(rows, images.names, strict=True)]
            talks = [talk for samples in shown for talk in _conversations(samples)]
            self._write(trainer, rows, talks, {} if images is None else images.files)

    def _write(
        self, trainer: Trainer, rows: Sequence[Row], conversations: Sequence[Row], files: Mapping[str, bytes]
    ) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as loggers count the metrics of an iteration
        rows = [{"step": step, **row} for row in rows]
        talks = [
            {**{name: row.get(name) for name in _OF_CONVERSATIONS}, **talk}
            for row, talk in zip(rows, conversations, strict=bool(conversations))
        ]
        table = Table(_TABLE_NAME, tuple(rows), step, self._begins_run, tuple(talks), files)
        self._begins_run = False
        if self.path is not None:
            self._output.attempt(str(self.path), _TABLE_NAME, table.append_to, self.path)
        self._output.write_table(trainer.loggers, table)


def _shown_images(samples: Samples) -> list[list[object]]:
    """Return the images of each sample's prompt, and of each answer of its environment that shows some."""
    of_data = samples.data.get(IMAGES, (None,) * len(samples))
    last = column_images(samples, LAST_IMAGES)
    given = zip(prompt_images(samples), of_data, answer_inputs(samples), last, strict=True)
    shown = ([own or images, *(one.input.images for one in answers), end] for own, images, answers, end in given)
    return [[images for images in row if images is not None] for row in shown]


def _conversations(samples: Samples) -> Sequence[Row]:
    return json_values(samples.ragged(CONVERSATION)) if CONVERSATION in samples else ()
