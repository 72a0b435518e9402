"""Check a run's output folders before it starts: they can be written to, and no earlier checkpoint is overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.callbacks.phase import trainer_callbacks
from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import write_problem


def check_outputs(trainer: Trainer, *, fits: bool, ckpt_path: str | None) -> None:
    """Check the folders of loggers and callbacks on the first rank, which writes to them.

    Args:
        trainer: Trainer of the run.
        fits: Whether the run trains.
        ckpt_path: Checkpoint that it continues from, ``"last"`` or another word of Lightning; None: from the start.

    Raises:
        ConfigError: for a folder that cannot be written to, or one whose ``last.ckpt`` another run would overwrite.
    """
    if not trainer.is_global_zero:
        return
    for folder in _folders(trainer):
        if (problem := write_problem(folder)) is not None:
            raise ConfigError(problem)
    if fits and trainer._checkpoint_connector._hpc_resume_path is None:  # Slurm's requeued jobs continue by themselves
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                _refuse_used(callback, ckpt_path)


def _folders(trainer: Trainer) -> Iterator[str]:
    """Return the local folders that the run writes to."""
    logs = [logger.save_dir for logger in trainer.loggers]
    outputs = [getattr(callback, "dirpath", None) for callback in trainer_callbacks(trainer)]
    files = [getattr(callback, "path", None) for callback in trainer_callbacks(trainer)]
    outputs += [file.parent for file in files if isinstance(file, Path)]
    for folder in dict.fromkeys([*(logs or [trainer.default_root_dir]), *outputs]):
        if isinstance(folder, str | Path) and "://" not in str(folder):
            yield str(folder)


def _refuse_used(callback: ModelCheckpoint, ckpt_path: str | None) -> None:
    """Raise ConfigError if the run would overwrite the ``last.ckpt`` of a run that it does not continue.

    With Lightning's version counter, it writes ``last-v1.ckpt`` instead. One-line runs switch that off, so that the
    path to continue from stays the same.
    """
    if not callback.save_last or callback.dirpath is None or callback._enable_version_counter:
        return
    folder = Path(callback.dirpath)
    continues = ckpt_path is not None and (
        not os.path.exists(ckpt_path) or Path(ckpt_path).resolve().parent == folder.resolve()
    )
    last = folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    if last.exists() and not continues:
        shown = os.path.relpath(last)
        raise ConfigError(
            f"{shown} belongs to an earlier run, and would be overwritten; add --ckpt_path {shown} to continue that "
            f"run, or give this one another folder (--output)"
        )
