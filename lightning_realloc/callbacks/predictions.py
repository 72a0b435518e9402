"""Callback that writes the predictions of all ranks to one JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.callbacks.loggers.logged_table import plain_text
from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import append_text
from lightning_realloc.remote_path import local_path
from lightning_realloc.retries.attempts import retried


class PredictionWriter(Callback):
    """Write one JSON object per response, in the order of the data's rows.

    An object holds ``prompt``, ``response``, ``reward`` (``score`` for PPO), ``finish_reason``, lengths in tokens, and
    every other column of the data. With several reward functions it also holds ``reward/<function>``. ``prompt_id``
    numbers the prompts from 0; responses to the same prompt share it. The file is called ``<path>.part`` until it is
    complete.

    Args:
        path: Output file; an existing file is replaced. The first rank writes.

    Example:
        >>> from lightning_realloc import PredictionWriter
        >>> writer = PredictionWriter("predictions.jsonl")  # Trainer(callbacks=[writer]).predict(...)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path, type(self).__name__)
        self._is_writing = False

    @property
    def state_key(self) -> str:
        """One key per file, so that several callbacks can be used."""
        return self._generate_state_key(path=str(self.path))

    @property
    def _part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before generation that predictions can be written."""
        if stage != "predict":
            return
        if not hasattr(pl_module, "sample_rows"):
            raise ConfigError(
                f"PredictionWriter writes the predictions of this package's algorithms; {type(pl_module).__name__} has "
                f"no sample_rows(), define it or remove the callback"
            )
        if self.path.is_dir():
            raise ConfigError(f"path={str(self.path)!r} is a folder; name a file in it, such as predictions.jsonl")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the temporary file."""
        if trainer.is_global_zero:
            append_text(self._part, "", replaces=True)
            self._is_writing = True

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Write a batch's rows."""
        if not self._is_writing:
            return
        assert isinstance(outputs, Samples), "predict_step returns samples"
        rows = pl_module.sample_rows(outputs.sorted_by_id())  # type: ignore[operator]
        # Data may hold dates and other types that JSON does not support.
        lines = [json.dumps(row, ensure_ascii=False, default=plain_text) + "\n" for row in rows]
        append_text(self._part, "".join(lines))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rename the complete file."""
        if self._is_writing:
            self._is_writing = False
            retried(lambda: self._part.replace(self.path), self.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the rows written so far in the temporary file."""
        self._is_writing = False
