"""Go on training after a save that could not be written, and keep the whole checkpoint before it.

Callbacks such as ModelCheckpoint do not learn of the failure: they remove the checkpoint that the missing one was to
replace. So removals wait until a later save is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.errors import UnwrittenCheckpoint, require_choice
from lightning_realloc.remote_path import AnyPath

SaveErrorAction = Literal["raise", "warn"]
FAILED_SAVES = "failed_saves"
"""Metric: the number of saves of this run that could not be written."""


class FailedSave(NamedTuple):
    """A checkpoint or model that could not be written."""

    step: int
    """Iterations done."""
    path: str
    """Its path or address."""
    error: str
    """Message of the error."""


class FailedSaves:
    """The saves of a run that failed, and the removals that wait for a complete one.

    Args:
        on_save_error: ``"raise"`` ends the run on the first one, ``"warn"`` goes on.

    Raises:
        ConfigError: for another value.
    """

    def __init__(self, on_save_error: SaveErrorAction) -> None:
        require_choice("on_save_error", on_save_error, ("raise", "warn"))
        self._raises = on_save_error == "raise"
        self._is_latest_missing = False
        self._removals: list[AnyPath] = []
        self.saves: list[FailedSave] = []
        """In their order."""

    @contextmanager
    def tolerated(
        self, path: object, trainer: Trainer, *, is_checkpoint: bool = True, step: int | None = None
    ) -> Iterator[None]:
        """Warn of an UnwrittenCheckpoint inside, which all ranks raise alike, or raise it, as the user chose.

        Args:
            path: The save's path or address.
            step: Iterations done before the save; None: those done now.
            is_checkpoint: Whether it is a checkpoint, before which earlier ones are not removed; otherwise a model.
        """
        try:
            yield
        except UnwrittenCheckpoint as error:
            self._is_latest_missing |= is_checkpoint
            if self._raises:
                raise
            step = trainer.global_step if step is None else step
            self.saves.append(FailedSave(step, str(path), str(error)))
            rank_zero_warn(
                f"{error}; training goes on, and {path} of step {step} is missing (failed saves of this "
                f"run: {len(self.saves)}; on_save_error='warn')"
            )
            metrics = {FAILED_SAVES: torch.tensor(float(len(self.saves)))}
            trainer._logger_connector.log_metrics(metrics)  # at once: the step's own are logged already
            return
        self._is_latest_missing &= not is_checkpoint

    # ---- removals, on the first rank
    def postpone_removal(self, path: AnyPath) -> None:
        """Have a checkpoint removed by `remove_replaced`."""
        self._removals.append(path)

    def keep(self, path: AnyPath) -> None:
        """Take back the removal of a path that is written again."""
        self._removals = [one for one in self._removals if one != path]

    def remove_replaced(self, remove: Callable[[AnyPath], bool]) -> None:
        """Remove the checkpoints that later ones have replaced, unless the latest save failed.

        Args:
            remove: Removes one, and returns False if it could not, but may after a later save.
        """
        if not self._is_latest_missing:
            waiting, self._removals = self._removals, []
            self._removals += [path for path in waiting if not remove(path)]
