"""Writes a role as a Hugging Face model while it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.errors import ConfigError


class SaveHuggingFace(Callback):
    """Writes folders that ``from_pretrained`` reads: ``dirpath`` itself at the end, ``dirpath/step-…`` on the way.

    Args:
        dirpath: Where to; every rank takes part, the first one writes.
        role: Which model.
        every_n_steps: Also after every so many iterations.
        every_n_epochs: Also after every so many epochs.
        at_end: Whether to write when training ends.
        dtype: ``"bfloat16"`` and the like; by default the weights as they are trained.
        merge: Of a role with adapters, whether to write the merged model; by default the adapters, as PEFT does.
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        role: str = "actor",
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = True,
        dtype: str | None = None,
        merge: bool = False,
    ) -> None:
        for name, every in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if every is not None and every < 1:
                raise ConfigError(f"{name}={every} must be at least 1; use None for never")
        self.dirpath = Path(dirpath)
        self.role = role
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end
        self.dtype = dtype
        self.merge = merge

    @property
    def state_key(self) -> str:
        """One per folder, so that several may be used."""
        return self._generate_state_key(dirpath=str(self.dirpath), role=self.role)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not be written at the end, before the beginning."""
        if not hasattr(trainer.strategy, "save_huggingface"):
            raise ConfigError(
                f"SaveHuggingFace needs Trainer(strategy='realloc'); this Trainer has {type(trainer.strategy).__name__}"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a role that cannot be written, before the first step."""
        trainer.strategy.check_huggingface(self.role, dtype=self.dtype)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Write after every ``every_n_steps`` iterations."""
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._write(trainer, self.dirpath / f"step-{trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after every ``every_n_epochs`` epochs."""
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._write(trainer, self.dirpath / f"step-{trainer.global_step}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final weights."""
        if self.at_end:
            self._write(trainer, self.dirpath)

    def _write(self, trainer: Trainer, folder: Path) -> None:
        strategy: Any = trainer.strategy
        strategy.save_huggingface(self.role, folder, dtype=self.dtype, merge=self.merge)
