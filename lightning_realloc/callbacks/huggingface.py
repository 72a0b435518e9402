"""Writes a role as a Hugging Face model while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.callbacks.ema import EMA, averaged_weights
from lightning_realloc.callbacks.hub import HubRepository, file_marks
from lightning_realloc.callbacks.model_card import CARD_FILE, card_of
from lightning_realloc.errors import CheckpointError, ConfigError

_USUAL_ROLE = "actor"


class SaveHuggingFace(Callback):
    """Writes folders that ``from_pretrained`` reads: ``dirpath`` itself at the end, ``dirpath/step-…`` on the way.

    Args:
        dirpath: Where to; every rank takes part, the first one writes.
        role: Which model; by default the actor, or what else is the only model that is trained.
        every_n_steps: Also after every so many iterations.
        every_n_epochs: Also after every so many epochs.
        at_end: Whether to write when training ends.
        dtype: ``"bfloat16"`` and the like; by default the weights as they are trained.
        merge: Of a role with adapters, whether to write the merged model; by default the adapters, as PEFT does.
        averaged: Whether to write the averages that an :class:`EMA` keeps in place of the weights.
        model_card: Whether to write a ``README.md`` that says what was trained from what and with which settings,
            unless the folder has one that is not ours.
        push_to_hub: A repository of the Hugging Face hub to which the files that are written at the end are uploaded,
            ``"user/model"``; it is made before training. None: nothing leaves this machine.
        hub_private: Whether a repository that is new is private.
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        role: str | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = True,
        dtype: str | None = None,
        merge: bool = False,
        averaged: bool = False,
        model_card: bool = True,
        push_to_hub: str | None = None,
        hub_private: bool = True,
    ) -> None:
        for name, every in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if every is not None and every < 1:
                raise ConfigError(f"{name}={every} must be at least 1; use None for never")
        if push_to_hub is not None and not at_end:
            raise ConfigError(f"push_to_hub={push_to_hub!r} uploads what is written at the end; set at_end=True")
        self.dirpath = Path(dirpath)
        self.role = role
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end
        self.dtype = dtype
        self.merge = merge
        self.averaged = averaged
        self.model_card = model_card
        self.hub = None if push_to_hub is None else HubRepository(name=push_to_hub, private=hub_private)

    @property
    def state_key(self) -> str:
        """One per folder, so that several may be used."""
        return self._generate_state_key(dirpath=str(self.dirpath), role=self.role or _USUAL_ROLE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not be written at the end, before the beginning."""
        if self.averaged and not any(isinstance(callback, EMA) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigError("SaveHuggingFace(averaged=True) writes what an EMA keeps; add EMA() to the callbacks")
        if not hasattr(trainer.strategy, "save_huggingface"):
            raise ConfigError(
                f"SaveHuggingFace needs Trainer(strategy='realloc'); this Trainer has {type(trainer.strategy).__name__}"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a role that cannot be written, and a repository that cannot be, before the first step."""
        trainer.strategy.check_huggingface(self._role_of(trainer), dtype=self.dtype)  # type: ignore[attr-defined]
        if self.hub is not None:
            way_out = "name it 'user/model' and log in with `hf auth login`, or leave push_to_hub out"
            _on_first_rank(trainer, self.hub.make, f"cannot write to {self.hub.name!r} on the hub; {way_out}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write after every ``every_n_steps`` iterations."""
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._write(trainer, pl_module, self.dirpath / f"step-{trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after every ``every_n_epochs`` epochs."""
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._write(trainer, pl_module, self.dirpath / f"step-{trainer.global_step}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final weights, and upload them where a repository was named."""
        if not self.at_end:
            return
        before = file_marks(self.dirpath)
        self._write(trainer, pl_module, self.dirpath)
        hub = self.hub
        if hub is not None:
            _on_first_rank(
                trainer,
                lambda: hub.upload(self.dirpath, self._own_files(before), message=f"Step {trainer.global_step}"),
                f"the model is in {self.dirpath}, but not on the hub; try `hf upload {hub.name} {self.dirpath}`",
            )

    def _role_of(self, trainer: Trainer) -> str:
        """Return which model is meant.

        Raises:
            ConfigError: for a role that the algorithm has not, and where several are trained and none is an actor.
        """
        flow = trainer.strategy.dataflow  # type: ignore[attr-defined]
        if flow is None:
            return self.role or _USUAL_ROLE
        roles, trained = flow.roles, flow.trained_roles
        role = self.role or (trained[0] if len(trained) == 1 else _USUAL_ROLE)
        if role not in roles:
            given = "none is given" if self.role is None else f"role={self.role!r} is none of them"
            raise ConfigError(
                f"SaveHuggingFace writes one model of {', '.join(roles)}, and {given}; name it, as in "
                f"SaveHuggingFace({str(self.dirpath)!r}, role={(trained or roles)[0]!r})"
            )
        return role

    def _write(self, trainer: Trainer, module: LightningModule, folder: Path) -> None:
        strategy: Any = trainer.strategy
        role = self._role_of(trainer)
        with averaged_weights(strategy, role) if self.averaged else nullcontext():
            strategy.save_huggingface(role, folder, dtype=self.dtype, merge=self.merge)
        if self.model_card:
            _on_first_rank(trainer, lambda: self._describe(trainer, module, folder), f"no {CARD_FILE} in {folder}")

    def _describe(self, trainer: Trainer, module: LightningModule, folder: Path) -> None:
        title, is_adapter = self.dirpath.absolute().name, (folder / "adapter_config.json").exists()
        card_of(trainer, module, self._role_of(trainer), title=title, is_adapter=is_adapter).write(folder)

    def _own_files(self, before: dict[str, tuple[int, int]]) -> list[str]:
        """Return what was written since, and the card: other files of the folder are nobody's business."""
        now = file_marks(self.dirpath)
        return sorted(name for name, mark in now.items() if before.get(name) != mark or name == CARD_FILE)


def _on_first_rank(trainer: Trainer, action: Callable[[], None], problem: str) -> None:
    """Do something on the first rank while the others wait; where it fails, all of them do. Collective."""
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            action()
        except Exception as raised:
            error = raised
    told = None if error is None else f"{problem} ({type(error).__name__}: {error})"
    told = trainer.strategy.broadcast(told)
    if told is not None:
        raise CheckpointError(told) from error
