"""Save and load checkpoints in Lightning's hooks; the checkpoint of a module without calls is one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import as_path
from lightning_realloc.strategies.checkpoints.checkpoint import refuse_folder


class CheckpointHooks(Protocol):
    """What Lightning's hooks ask for; `FileCheckpoints` answers for a module, `RoleCheckpoints` for roles."""

    def module_state(self) -> dict[str, Any]:
        """Return the part of the module's state that rank 0 writes."""

    def full_state(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the part of an optimizer's state that rank 0 writes."""

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object) -> None:
        """Write a checkpoint. Collective over all ranks."""

    def remove(self, filepath: str | Path) -> None:
        """Remove a checkpoint on rank 0."""

    def load(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint."""

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers that `load` has not filled."""


class FileCheckpoints:
    """Saves and resumes a module without calls, in one file."""

    def __init__(self, strategy: ParallelStrategy, *, load_weights_only: bool) -> None:
        self._strategy = strategy
        self._load_weights_only = load_weights_only

    def module_state(self) -> dict[str, Any]:
        """Return the module's state."""
        module = self._strategy.lightning_module
        assert module is not None, "Lightning connects the module before it saves"
        return module.state_dict()

    full_state = module_state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state."""
        return optimizer.state_dict()

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object) -> None:
        """Write a checkpoint on rank 0."""
        if self._strategy.is_global_zero:
            self._strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove(self, filepath: str | Path) -> None:
        """Remove a checkpoint on rank 0."""
        if self._strategy.is_global_zero:
            self._strategy.checkpoint_io.remove_checkpoint(filepath)

    def load(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: for a folder, since a module without calls has a checkpoint of one file.
        """
        path = as_path(checkpoint_path)
        refuse_folder(path)
        weights_only = self._load_weights_only if weights_only is None else weights_only
        return self._strategy.checkpoint_io.load_checkpoint(str(path), weights_only=weights_only)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers.

        Raises:
            CheckpointError: for another number of optimizers than the checkpoint holds.
        """
        optimizers, states = self._strategy.optimizers, checkpoint["optimizer_states"]
        if len(optimizers) != len(states):
            raise CheckpointError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers() returned "
                f"{len(optimizers)}; resume with the optimizers of the run that saved it"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
