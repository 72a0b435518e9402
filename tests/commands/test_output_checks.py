"""Each command checks the folders that it writes to, and no others."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.callbacks import PredictionWriter
from lightning_realloc.commands.output_checks import check_outputs
from lightning_realloc.errors import ConfigError


def _trainer(logs: Path, checkpoints: Path | str, predictions: Path) -> L.Trainer:
    callbacks = [ModelCheckpoint(checkpoints), PredictionWriter(predictions)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, default_root_dir=logs, **quiet)


@pytest.mark.parametrize(
    ("place", "commands"),
    [("logs", {"fit", "validate", "test", "predict"}), ("checkpoints", {"fit"}), ("predictions", {"fit", "predict"})],
)
def test_a_folder_is_checked_by_commands_that_write_to_it(tmp_path: Path, place: str, commands: set[str]) -> None:
    (tmp_path / "file").touch()
    places = {name: tmp_path / name for name in ("logs", "checkpoints", "predictions")}
    places[place] = tmp_path / "file" / "below"
    places["predictions"] /= "rows.jsonl"
    trainer = _trainer(**places)
    for command in ("fit", "validate", "test", "predict"):
        if command in commands:
            with pytest.raises(ConfigError, match="cannot be written: Not a directory at"):
                check_outputs(trainer, command, ckpt_path=None)
        else:
            check_outputs(trainer, command, ckpt_path=None)
