"""Save, load and export the roles of a running strategy.

This module collects the parts of a checkpoint from Lightning and from the pool of models. `checkpoints.checkpoint`
defines the folder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.callbacks.ema import evaluated_averages
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.checkpoints import hf_folder
from lightning_realloc.strategies.checkpoints.checkpoint import (
    RANDOM_STATES,
    TrainedModels,
    read_checkpoint,
    require_finite_weights,
    run_on_first_rank,
    unsharded_state,
    write_checkpoint,
)
from lightning_realloc.strategies.checkpoints.gather import gather_weights
from lightning_realloc.strategies.checkpoints.rng_state import random_state
from lightning_realloc.strategies.pool.model_pool import ModelPool

_log = logging.getLogger(__name__)

STALL_WARNING_S = 60.0
"""Seconds of waiting for other ranks after which a rank warns. Ranks may be a whole training call apart."""


class RunningStrategy(Protocol):
    """The members of a strategy that `RoleCheckpoints` uses."""

    optimizers: list[torch.optim.Optimizer]

    @property
    def lightning_module(self) -> Any:
        """The algorithm."""

    @property
    def pool(self) -> ModelPool:
        """The replicas of every role."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""

    def optimizers_by_role(self) -> dict[str, torch.optim.Optimizer]:
        """Return role -> optimizer."""

    def bring_back(self) -> None:
        """Return everything that the plan offloads to the device."""


class RoleCheckpoints:
    """Saves, resumes and exports the models of a pool.

    Args:
        strategy: The running strategy.
        save_frozen_roles: Also write roles that are never trained into checkpoints.
        load_weights_only: Refuse checkpoints that hold more than plain data, which could run code.
    """

    def __init__(self, strategy: RunningStrategy, *, save_frozen_roles: bool, load_weights_only: bool) -> None:
        self._strategy = strategy
        self.save_frozen_roles = save_frozen_roles
        self._load_weights_only = load_weights_only

    def module_state(self) -> dict[str, Any]:
        """Return the part of the module's state that rank 0 writes; see `unsharded_state`."""
        return unsharded_state(self._strategy.lightning_module, self._strategy.pool)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write a checkpoint folder. Collective over all ranks.

        Raises:
            ConfigError: if ``storage_options`` is given.
        """
        if storage_options is not None:
            raise ConfigError(
                "storage_options cannot be used, since no CheckpointIO writes a folder of shards; leave it out"
            )
        strategy = self._strategy
        strategy.bring_back()
        with warn_if_stalled("save_checkpoint", strategy.global_rank):
            checkpoint[RANDOM_STATES] = self._gather_random_states()
        folder, models = Path(strategy.broadcast(str(filepath))), self._trained_models()
        if "optimizer_states" in checkpoint and strategy.pool.dataflow.trained_roles and not models.optimizers:
            rank_zero_warn(
                f"no run can be resumed from {folder}: it holds only weights, since trainer.fit has not trained the "
                f"current ones; to resume later, save after fit, before evaluating another model or with ckpt_path="
            )
        write_checkpoint(folder, checkpoint, models, include_frozen=self.save_frozen_roles)

    def load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint into the sharded roles, in place. It may have another layout and number of ranks.

        Raises:
            CheckpointError: if it is not a checkpoint of this strategy, or is one of other models.
        """
        strategy = self._strategy
        # Lightning drops the argument of fit(weights_only=...) for strategies that restore after setup.
        weights_only = self._load_weights_only if weights_only is None else weights_only
        strategy.bring_back()
        folder = Path(strategy.broadcast(str(checkpoint_path)))
        trainer = strategy.lightning_module.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        averaged = frozenset[str]()
        if not is_fitting:
            strategy.optimizers = []  # their state belongs to the replaced weights
            averaged = evaluated_averages(trainer.callbacks, strategy.pool.dataflow.trained_roles)
        return read_checkpoint(
            folder,
            self._trained_models(),
            weights_only=weights_only,
            device=strategy.root_device,
            resuming=is_fitting,
            averages_of=averaged,
        )

    def save_huggingface(self, role: str, folder: str | Path, *, dtype: str | None, merge: bool) -> None:
        """See `ReallocStrategy.save_huggingface`."""
        strategy, models, parsed = self._strategy, self._trained_models(), hf_folder.parse_dtype(dtype)
        pool = strategy.pool
        names = None if merge else pool.saved_parameters(role, include_frozen=False)
        with warn_if_stalled("save_huggingface", strategy.global_rank):
            strategy.bring_back()
            if role in pool.changing_roles:
                require_finite_weights(pool, role, strategy.global_rank, Path(folder))
            weights = self.full_weights(role, names)
        run_on_first_rank(
            lambda: hf_folder.write_running_model(
                pool.home(role).model, weights, models.tokenizer, Path(folder), role=role, dtype=parsed, merge=merge
            ),
            models,
        )

    def check_huggingface(self, role: str, *, dtype: str | None) -> None:
        """Raise the errors that `save_huggingface` would raise before it gathers anything."""
        hf_folder.parse_dtype(dtype)
        hf_folder.import_model_class(hf_folder.class_path(self._strategy.pool.home(role).model), role)

    def full_weights(self, role: str, names: Set[str] | None = None) -> dict[str, Tensor]:
        """Return a role's full weights on rank 0, {} elsewhere; ``names=None`` means all. Collective over all ranks."""
        strategy = self._strategy
        strategy.bring_back()
        home = strategy.pool.home(role)
        return gather_weights(home, strategy.global_rank, strategy.world_size, strategy.root_device, names=names)

    def full_state(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        state, pool = self.module_state(), self._strategy.pool
        for role in (role for role in pool.roles if role not in pool.released):
            state |= {f"{role}.{name}": tensor.cpu() for name, tensor in self.full_weights(role).items()}
        return state

    def _trained_models(self) -> TrainedModels:
        strategy = self._strategy
        module = strategy.lightning_module
        try:
            tokenizer = module.tokenizer
        except (AttributeError, ConfigError):  # models that are given as modules may have no tokenizer
            tokenizer = None
        return TrainedModels(
            pool=strategy.pool,
            algorithm=type(module).__name__,
            optimizers=strategy.optimizers_by_role(),
            tokenizer=tokenizer,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            broadcast=strategy.broadcast,
        )

    def _gather_random_states(self) -> list[Any]:
        own, world_size = random_state(self._strategy.root_device), self._strategy.world_size
        states: list[Any] = [own] * world_size
        if world_size > 1:
            dist.all_gather_object(states, own)
        return states


@contextmanager
def warn_if_stalled(name: str, rank: int) -> Iterator[None]:
    """Log a warning if a collective inside takes longer than `STALL_WARNING_S`, since some ranks may never join it."""
    message = (
        "rank %d has waited in %s for %g s until all ranks call it. If some never call it, for example under "
        "rank_zero_only or `if trainer.is_global_zero`, it waits forever: call it on every rank"
    )
    timer = threading.Timer(STALL_WARNING_S, _log.warning, (message, rank, name, STALL_WARNING_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
