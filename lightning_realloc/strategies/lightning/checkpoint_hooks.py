"""Lightning's checkpoint hooks: one file for a module without calls, a folder of shards for an algorithm's roles.

What is in the folder is decided in ``checkpoint``; here its parts are collected from the running strategy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.callbacks.ema import evaluated_averages
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.checkpoints import checkpoint as checkpoints
from lightning_realloc.strategies.checkpoints import hf_folder as huggingface
from lightning_realloc.strategies.checkpoints.gather import gather_weights
from lightning_realloc.strategies.checkpoints.rng_state import random_state
from lightning_realloc.strategies.lightning.process import ProcessStrategy
from lightning_realloc.strategies.lightning.stall_warning import warn_if_stalled
from lightning_realloc.strategies.pool.model_pool import ModelPool


class CheckpointStrategy(ProcessStrategy):
    """Saves, resumes and exports what a pool of models holds.

    Args:
        save_frozen_roles: Also write roles that are never trained into checkpoints.
        load_weights_only: Refuse checkpoints that hold more than plain data, which could run code.
        settings: Of :class:`ProcessStrategy`.
    """

    def __init__(self, *, save_frozen_roles: bool, load_weights_only: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._save_frozen_roles = save_frozen_roles
        self._load_weights_only = load_weights_only

    @property
    @abstractmethod
    def pool(self) -> ModelPool:
        """The replicas of every role."""

    @abstractmethod
    def bring_back(self) -> None:
        """Have everything that the plan offloads on the device until the next call begins."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are read into sharded models."""
        return self.dataflow is not None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers itself."""
        return self.dataflow is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what rank 0 writes: everything, or, where roles are sharded, everything but their parameters."""
        assert self.lightning_module is not None
        if self.dataflow is None:
            return self.lightning_module.state_dict()
        return checkpoints.other_state(self.lightning_module, self.pool)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state; of sharded roles only the groups' settings, tensors are written apart."""
        raw = getattr(optimizer, "_optimizer", optimizer)
        return raw.state_dict() if self.dataflow is None else checkpoints.optimizer_settings(raw)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: one file, or a folder of shards where roles are sharded. Collective over all ranks."""
        if self.dataflow is None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError("storage_options cannot be used: a folder of shards is not written by a CheckpointIO")
        self.bring_back()
        with warn_if_stalled("save_checkpoint", self.global_rank):
            checkpoint[checkpoints.RANDOM_STATES] = self._gather_random_states()
        folder, models = Path(self.broadcast(str(filepath))), self._trained_models()
        if "optimizer_states" in checkpoint and self.pool.dataflow.trained_roles and not models.optimizers:
            rank_zero_warn(
                f"no run can go on from {folder}: it holds weights alone, since trainer.fit has not trained those that "
                f"are here now; to go on later, save after fit, and before another model or ckpt_path= is evaluated"
            )
        checkpoints.save(folder, checkpoint, models, include_frozen=self._save_frozen_roles)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; sharded roles are filled in place, whatever layout and world they were written under.

        Raises:
            CheckpointError: for something that is not a checkpoint of this strategy, or is one of other models.
        """
        # Lightning drops the argument of fit(weights_only=...) for strategies that restore after their setup.
        weights_only = self._load_weights_only if weights_only is None else weights_only
        if self.dataflow is None:
            checkpoints.refuse_folder(Path(checkpoint_path))
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self.bring_back()
        folder = Path(self.broadcast(str(checkpoint_path)))
        if not self._fitting:
            self.optimizers = []  # their state is of the weights that go
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[union-attr]
        averaged = frozenset() if self._fitting else evaluated_averages(callbacks, self.dataflow.trained_roles)
        return checkpoints.load(
            folder, self._trained_models(), weights_only=weights_only, device=self.root_device, resuming=self._fitting,
            averages_of=averaged,
        )  # fmt: skip

    def save_huggingface(self, role: str, folder: str | Path, *, dtype: str | None = None, merge: bool = False) -> None:
        """Write a role's current weights as a folder that ``from_pretrained`` reads. Collective over all ranks.

        Of a role with adapters it is the folder that PEFT reads, or, with ``merge``, the merged model.

        Raises:
            CheckpointError: on every rank, for what has no Hugging Face form or cannot be written, and for trained
                weights that are not finite.
        """
        models, parsed = self._trained_models(), huggingface.parse_dtype(dtype)
        names = None if merge else self.pool.saved_parameters(role, include_frozen=False)
        with warn_if_stalled("save_huggingface", self.global_rank):
            self.bring_back()
            if role in self.pool.changing_roles:
                checkpoints.refuse_not_finite(self.pool, role, self.global_rank, Path(folder))
            weights = self.full_weights(role, names)
        checkpoints.on_first_rank(
            lambda: huggingface.write_running_model(
                self.pool.home(role).model,
                weights,
                models.tokenizer,
                Path(folder),
                role=role,
                dtype=parsed,
                merge=merge,
            ),
            models,
        )

    def check_huggingface(self, role: str, *, dtype: str | None = None) -> None:
        """Raise what :meth:`save_huggingface` would raise before it gathers anything."""
        huggingface.parse_dtype(dtype)
        huggingface.import_model_class(huggingface.class_path(self.pool.home(role).model), role)

    def _trained_models(self) -> checkpoints.TrainedModels:
        module: Any = self.lightning_module
        try:
            tokenizer = module.tokenizer
        except (AttributeError, ConfigError):  # models that were handed over as modules may come without one
            tokenizer = None
        optimizers = {str(optimizer.param_groups[0].get("name")): optimizer for optimizer in self.optimizers}
        return checkpoints.TrainedModels(
            pool=self.pool,
            algorithm=type(module).__name__,
            optimizers=optimizers,
            tokenizer=tokenizer,
            rank=self.global_rank,
            world_size=self.world_size,
            broadcast=self.broadcast,
        )

    @property
    def _fitting(self) -> bool:
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING  # type: ignore[union-attr]

    def _gather_random_states(self) -> list[Any]:
        states: list[Any] = [random_state(self.root_device)]
        if self.world_size > 1:
            states = [None] * self.world_size
            dist.all_gather_object(states, random_state(self.root_device))
        return states

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what is not sharded; sharded roles were filled by ``load_checkpoint``."""
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict and self.dataflow is None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizers of a module without calls; those of roles were filled by ``load_checkpoint``."""
        if self.dataflow is None:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)

    def full_weights(self, role: str, names: Set[str] | None = None) -> dict[str, Tensor]:
        """Return a role's full weights, all or some, on rank 0, {} elsewhere. Collective over all ranks."""
        self.bring_back()
        return gather_weights(self.pool.home(role), self.global_rank, self.world_size, self.root_device, names=names)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        assert self.lightning_module is not None
        if self.dataflow is None:
            return self.lightning_module.state_dict()
        state = self.lightning_module_state_dict()
        for role in (role for role in self.pool.roles if role not in self.pool.released):
            state |= {f"{role}.{name}": tensor.cpu() for name, tensor in self.full_weights(role).items()}
        return state
