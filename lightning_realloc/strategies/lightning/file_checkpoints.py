"""Save and load checkpoints in Lightning's hooks: a module without calls in one file, roles in a way of their own."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.optim import Optimizer

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import AnyPath, RetriedStore, as_path, is_remote
from lightning_realloc.strategies.checkpoints.checkpoint import refuse_folder
from lightning_realloc.strategies.checkpoints.checkpoint_files import run_on_first_rank
from lightning_realloc.strategies.checkpoints.safety.failed_saves import FailedSaves
from lightning_realloc.strategies.checkpoints.safety.last_pointer import LatestSave, name_last, repeat_file
from lightning_realloc.strategies.checkpoints.safety.leftovers import Leftovers
from lightning_realloc.strategies.checkpoints.safety.single_file import SingleFile
from lightning_realloc.strategies.checkpoints.safety.write_errors import name_write_errors


class CheckpointHooks(Protocol):
    """Checkpoints of an algorithm's roles; `RoleCheckpoints` documents the methods."""

    def module_state(self) -> dict[str, Any]: ...
    def full_state(self) -> dict[str, Any]: ...
    def full_bytes(self) -> int: ...
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]: ...
    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object) -> None: ...
    def remove(self, filepath: str | Path) -> None: ...
    def load(self, checkpoint_path: str | Path, *, weights_only: bool) -> dict[str, Any]: ...


class CheckpointedStrategy(ModelParallelStrategy):
    """Lightning's model-parallel strategy, which checkpoints whole models as its other strategies do: in one file."""

    failed_saves: FailedSaves
    """Saves of this run that could not be written."""
    _latest_file: LatestSave
    _load_weights_only: bool
    """Refuse checkpoints that hold more than plain data, which could run code."""
    on_checkpoint: Callable[[str], object] | None = None
    """Called on rank 0 with the path of each checkpoint that is saved, or being saved in the background."""
    last_checkpoint: str | None = None
    """Last complete checkpoint of the ranks, in a process that started them on Ray; None without one."""

    @property
    @abstractmethod
    def _roles(self) -> CheckpointHooks | None:
        """The checkpoints of roles; None for a module without calls."""

    def on_train_start(self) -> None:
        """Have callbacks that save checkpoints repeat their own calls of a store, such as listings."""
        super().on_train_start()
        module: Any = self.lightning_module
        for callback in module.trainer.checkpoint_callbacks:
            if is_remote(getattr(callback, "dirpath", None)) and hasattr(callback, "_fs"):
                callback._fs = RetriedStore(callback._fs)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are read into sharded models; otherwise before `setup` broadcasts them."""
        return self._roles is not None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers itself."""
        return self._roles is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state that rank 0 writes; parameters of sharded roles are not in it."""
        return Strategy.lightning_module_state_dict(self) if self._roles is None else self._roles.module_state()

    def full_state_bytes(self) -> int:
        """Return about how many bytes the tensors of `full_state_dict` have."""
        if self._roles is not None:
            return self._roles.full_bytes()
        assert self.model is not None
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        return Strategy.lightning_module_state_dict(self) if self._roles is None else self._roles.full_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state; for sharded roles only the groups' settings, tensors are written apart."""
        if self._roles is None:
            return Strategy.optimizer_state(self, optimizer)
        return self._roles.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint. Collective over all ranks."""
        if self._roles is None:
            run_on_first_rank(lambda: self._save_file(checkpoint, as_path(filepath), storage_options))
        else:
            self._roles.save(checkpoint, filepath, storage_options)
        if self.on_checkpoint is not None and self.global_rank == 0:
            self.on_checkpoint(str(filepath) if is_remote(filepath) else os.path.abspath(filepath))

    def _save_file(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: object) -> None:
        module: Any = self.lightning_module
        latest, trainer = self._latest_file, module.trainer
        file = SingleFile(path, self.checkpoint_io)
        other = latest.same_as(path, checkpoint, trainer) if file.is_default else None
        if other is not None and repeat_file(path, other):
            return
        latest.forget()
        self.failed_saves.keep(path)
        with self.failed_saves.tolerated(path, trainer), name_write_errors(path):
            file.write(checkpoint, storage_options)
            latest.remember(path, checkpoint)
            if isinstance(path, Path):
                Leftovers(self.failed_saves).remove_next_to(path)
        self._remove_replaced_files()

    def _remove_replaced_files(self) -> None:
        self.failed_saves.remove_replaced(lambda path: SingleFile(path, self.checkpoint_io).remove())

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint on rank 0, once the one that replaces it is complete; keep folders of other things."""
        if self._roles is None:
            if self.is_global_zero:
                self.failed_saves.postpone_removal(as_path(filepath))
                self._remove_replaced_files()
        else:
            self._roles.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; sharded roles are filled in place.

        Raises:
            CheckpointError: if it is not a checkpoint of this strategy, or is one of other models.
        """
        # Lightning drops the argument of fit(weights_only=...) for strategies that restore after setup.
        weights_only = self._load_weights_only if weights_only is None else weights_only
        path, module = as_path(checkpoint_path), self.lightning_module
        assert module is not None, "a Trainer has connected it"
        if self._roles is not None:
            checkpoint = self._roles.load(checkpoint_path, weights_only=weights_only)
            name_last(path, checkpoint, module.trainer)
            return checkpoint
        refuse_folder(path)
        read = SingleFile(path, self.checkpoint_io).read(weights_only=weights_only)
        name_last(path, read, module.trainer)
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state that is not sharded; `load_checkpoint` has filled sharded roles."""
        Strategy.load_model_state_dict(self, checkpoint, strict=strict and self._roles is None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizers of a module without calls; `load_checkpoint` has filled those of roles."""
        if self._roles is not None:
            return
        optimizers, states = self.optimizers, checkpoint["optimizer_states"]
        if len(optimizers) != len(states):
            raise CheckpointError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers() returned "
                f"{len(optimizers)}; resume with the optimizers of the run that saved it"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
