"""Check a run's output folders before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import write_problem
from lightning_realloc.remote_path import expand_home
from lightning_realloc.trainers import trainer_callbacks


def check_outputs(trainer: Trainer, command: str, *, ckpt_path: str | None) -> None:
    """Check the folders of loggers and callbacks on the first rank, which writes to them.

    Args:
        trainer: Trainer of the run.
        command: Method of the Trainer that runs. Evaluation writes a log alone, ``predict`` a file as well.
        ckpt_path: Checkpoint that it continues from, ``"last"`` or another word of Lightning; None: from the start.

    Raises:
        ConfigError: for a folder that cannot be written to, or one whose checkpoints another run would overwrite.
    """
    if not trainer.is_global_zero:
        return
    for folder in _folders(trainer, command):
        if (problem := write_problem(folder)) is not None:
            raise ConfigError(problem)
    is_requeued = trainer._checkpoint_connector._hpc_resume_path is not None  # Slurm's jobs continue by themselves
    if command == "fit" and not is_requeued:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                _refuse_used(callback, ckpt_path)


def _folders(trainer: Trainer, command: str) -> Iterator[str]:
    """Return the folders that the run writes to."""
    logs = [logger.save_dir for logger in trainer.loggers]
    outputs: list[Any] = logs or [trainer.default_root_dir]
    for callback in trainer_callbacks(trainer):
        if command == "fit":
            outputs.append(getattr(callback, "dirpath", None))
        if command in ("fit", "predict") and isinstance(file := getattr(callback, "path", None), Path):
            outputs.append(file.parent)
    for folder in dict.fromkeys(outputs):
        if isinstance(folder, str | Path):
            yield str(folder)


def _refuse_used(callback: ModelCheckpoint, ckpt_path: str | None) -> None:
    """Raise ConfigError if the run would overwrite checkpoints of a run that it does not continue.

    With Lightning's version counter, it writes ``last-v1.ckpt`` instead. One-line runs switch that off, so that the
    path to continue from stays the same.
    """
    if not callback.save_last or callback.dirpath is None or callback._enable_version_counter:
        return
    folder, start = Path(callback.dirpath), None if ckpt_path is None else expand_home(Path(ckpt_path))
    continues = start is not None and (not start.exists() or start.resolve().parent == folder.resolve())
    last = folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    numbered = sorted(folder.glob(f"*{callback.FILE_EXTENSION}"), key=lambda path: path.lstat().st_mtime)
    found = last if last.exists() else next(reversed(numbered), None)
    if found is not None and not continues:
        shown = os.path.relpath(found)
        raise ConfigError(
            f"{shown} belongs to an earlier run, and would be overwritten; add --ckpt_path {shown} to continue that "
            f"run, or give this one another folder (--output)"
        )
