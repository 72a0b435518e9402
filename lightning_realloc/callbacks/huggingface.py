"""Callback that writes a role as a Hugging Face model during training, and uploads it to the hub."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.callbacks.ema import EMA
from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_output import require_writable
from lightning_realloc.remote_path import AnyPath, as_path, expand_home
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.strategies.checkpoints.checkpoint_files import run_on_first_rank
from lightning_realloc.strategies.checkpoints.model_card import CARD_FILE, make_model_card
from lightning_realloc.trainers import trainer_callbacks

_DEFAULT_ROLE = "actor"


class SaveHuggingFace(Callback):
    """Write folders for ``from_pretrained``: ``dirpath`` at the end of training, ``dirpath/step-…`` before.

    Args:
        dirpath: Output folder, or an address such as ``s3://bucket/x``; every rank takes part, the first one writes.
            No role may be loaded from it. Before the first step, it must be possible to write there.
        role: Role to write; by default the only trained role, or else the actor.
        every_n_steps: Iterations between writes; None writes at the end only.
        every_n_epochs: Epochs between writes; None writes at the end only.
        at_end: Whether to write when training ends.
        dtype: Data type of the weights, such as ``"bfloat16"`` or ``torch.bfloat16``; by default as trained.
        merge: For a role with adapters: whether to write the merged model; by default the adapters, as PEFT does.
        averaged: Whether to write the averages of an :class:`EMA` instead of the weights.
        model_card: Whether to write a ``README.md`` with the base model and the settings of the run. A ``README.md``
            from elsewhere is kept.
        push_to_hub: Repository of the Hugging Face hub for the final files, ``"user/model"``; it is created before
            training. None uploads nothing.
        hub_private: Whether a new repository is private.

    Example:
        >>> from lightning_realloc import SaveHuggingFace
        >>> save = SaveHuggingFace("models/policy", every_n_steps=100, dtype="bfloat16")
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        role: str | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = True,
        dtype: str | torch.dtype | None = None,
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
            raise ConfigError(f"push_to_hub={push_to_hub!r} uploads the files written at the end; set at_end=True")
        self.dirpath = as_path(dirpath)
        if push_to_hub is not None and not isinstance(self.dirpath, Path):
            raise ConfigError(
                f"push_to_hub={push_to_hub!r} uploads files from a disk, and {str(dirpath)!r} is an address; give "
                f"dirpath= a folder, or use a second SaveHuggingFace"
            )
        self.role = role
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end
        self.dtype = dtype
        self.merge = merge
        self.averaged = averaged
        self.model_card = model_card
        self.push_to_hub = push_to_hub
        self.hub_private = hub_private

    @property
    def state_key(self) -> str:
        """One key per folder, so that several callbacks can be used."""
        return self._generate_state_key(dirpath=str(self.dirpath), role=self.role or _DEFAULT_ROLE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the model can be written."""
        if self.averaged and not any(isinstance(callback, EMA) for callback in trainer_callbacks(trainer)):
            raise ConfigError("SaveHuggingFace(averaged=True) writes an EMA's averages; add EMA() to the callbacks")
        if not hasattr(trainer.strategy, "save_huggingface"):
            raise ConfigError(
                f"SaveHuggingFace needs Trainer(strategy='realloc'); this Trainer has {type(trainer.strategy).__name__}"
            )
        if stage == "fit":
            self._refuse_source(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before the first step that the role, the folder and the repository can be written."""
        run_view(trainer).check_huggingface(self._role_of(trainer), dtype=self.dtype)
        run_on_first_rank(lambda: require_writable(self.dirpath, prefix="SaveHuggingFace: "))
        if (hub := self.push_to_hub) is not None:
            run_on_first_rank(
                lambda: huggingface_hub.HfApi().create_repo(hub, private=self.hub_private, exist_ok=True),
                problem=f"cannot write to {hub!r} on the hub; name it 'user/model' and log in with `hf auth login`, or "
                f"leave push_to_hub out",
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write after every ``every_n_steps`` iterations."""
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._write_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after every ``every_n_epochs`` epochs."""
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._write_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final weights, and upload them if a repository is given."""
        if not self.at_end:
            return
        hub, folder = self.push_to_hub, self.dirpath
        before = file_stamps(folder) if isinstance(folder, Path) else {}
        self._write(trainer, pl_module, folder)
        if hub is None or not isinstance(folder, Path):
            return

        def upload() -> None:
            changed = {name for name, stamp in file_stamps(folder).items() if before.get(name) != stamp}
            files, message = sorted(changed | {CARD_FILE}), f"Step {trainer.global_step}"
            huggingface_hub.HfApi().upload_folder(
                repo_id=hub, folder_path=folder, allow_patterns=files, commit_message=message
            )

        run_on_first_rank(
            upload, problem=f"the model is in {folder}, but not on the hub; try `hf upload {hub} {folder}`"
        )

    def _role_of(self, trainer: Trainer) -> str:
        """Return the role to write.

        Raises:
            ConfigError: for an unknown role, or if several roles are trained and none is an actor.
        """
        flow = run_view(trainer).dataflow
        if flow is None:
            return self.role or _DEFAULT_ROLE
        roles, trained = flow.roles, flow.trained_roles
        role = self.role or (trained[0] if len(trained) == 1 else _DEFAULT_ROLE)
        if role not in roles:
            given = "none is given" if self.role is None else f"role={self.role!r} is none of them"
            raise ConfigError(
                f"SaveHuggingFace writes one model of {', '.join(roles)}, and {given}; name it, as in "
                f"SaveHuggingFace({str(self.dirpath)!r}, role={(trained or roles)[0]!r})"
            )
        return role

    def _refuse_source(self, module: Any) -> None:
        """Raise ConfigError if this callback would overwrite a model or adapters that a role is loaded from."""
        for role in getattr(module, "roles", tuple)():  # a plain LightningModule names none
            for source in (role.source, role.peft):
                if isinstance(source, str | Path) and self._overwrites(Path(source)):
                    raise ConfigError(
                        f"SaveHuggingFace({str(self.dirpath)!r}) would overwrite {str(source)!r}, the source of role "
                        f"{role.name!r}, and a resumed run would load the trained weights from there; give another "
                        f"dirpath"
                    )

    def _overwrites(self, folder: Path) -> bool:
        if not isinstance(self.dirpath, Path):  # models are loaded from folders and from the hub alone
            return False
        mine, theirs = self.dirpath.resolve(), expand_home(folder).resolve()
        at_steps = self.every_n_steps is not None or self.every_n_epochs is not None
        is_of_step = theirs.parent == mine and theirs.name.startswith("step-")
        return (self.at_end and theirs == mine) or (at_steps and is_of_step)

    def _write_step(self, trainer: Trainer, module: LightningModule) -> None:
        folder = self.dirpath / f"step-{trainer.global_step}"
        with run_view(trainer).failed_saves.tolerated(folder, trainer, is_checkpoint=False):
            self._write(trainer, module, folder)

    def _write(self, trainer: Trainer, module: LightningModule, folder: AnyPath) -> None:
        run, role = run_view(trainer), self._role_of(trainer)
        with run.averages.in_place_of_weights(role) if self.averaged else nullcontext(True) as has_weights:
            if not any(gather_objects(has_weights)):
                raise ConfigError(
                    f"there is no average of {role}'s weights to write; add the callback EMA(), and train for an "
                    f"iteration before the first folder is written"
                )
            run.save_huggingface(role, folder, dtype=self.dtype, merge=self.merge)
        if self.model_card:
            problem = f"no {CARD_FILE} in {folder}"
            run_on_first_rank(lambda: self._describe(trainer, module, folder), problem=problem)

    def _describe(self, trainer: Trainer, module: LightningModule, folder: AnyPath) -> None:
        named = self.dirpath.absolute() if isinstance(self.dirpath, Path) else self.dirpath
        title, is_adapter = named.name, (folder / "adapter_config.json").exists()
        make_model_card(trainer, module, self._role_of(trainer), title=title, is_adapter=is_adapter).write(folder)


def file_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of a folder's files by name; they change when a file is written."""
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    return {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}
