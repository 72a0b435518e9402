"""Writes what ``predict`` made of every row as one JSONL file, whatever the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError


class PredictionWriter(Callback):
    """Writes one JSON object per response, in the order of the data's rows.

    An object holds ``prompt``, ``response``, ``reward`` (``score`` of PPO) and ``reward/<function>`` where there are
    several, ``finish_reason``, lengths in tokens, and every other column of the data; ``prompt_id`` counts the prompts
    from 0, which several responses share. Until all rows are there the file is called ``<path>.part``.

    Args:
        path: Where to; an earlier file is replaced. The first rank writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    @property
    def state_key(self) -> str:
        """One per file, so that several may be used."""
        return self._generate_state_key(path=str(self.path))

    @property
    def _part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not be written, before anything is generated."""
        if stage != "predict":
            return
        if not hasattr(pl_module, "sample_rows"):
            raise ConfigError(
                f"PredictionWriter writes what an algorithm of this package predicts; {type(pl_module).__name__} has "
                f"no sample_rows(), give it one or leave the callback out"
            )
        if self.path.is_dir():
            raise ConfigError(f"path={str(self.path)!r} is a folder; name a file in it, such as predictions.jsonl")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the file."""
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("w", encoding="utf-8")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Write a batch's rows."""
        if self._file is None:
            return
        assert isinstance(outputs, Samples), "predict_step returns the samples with what was made of them"
        for row in pl_module.sample_rows(outputs.sorted_by_id()):  # type: ignore[operator]
            # Data may hold dates and the like, which JSON does not know.
            self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the file its name."""
        if self._file is not None:
            self._close()
            self._part.replace(self.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave behind what was made until then."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
