"""Save, load and export the models of a running algorithm, in Lightning's checkpoint hooks.

`RoleCheckpoints` collects the parts of a checkpoint from Lightning and from the pool of models.
`checkpoints.checkpoint` defines the folder.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.remote_output import require_writable
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.runtime.messages.objects import broadcast_object, gather_on_first
from lightning_realloc.strategies.checkpoints import hf_folder
from lightning_realloc.strategies.checkpoints.background import BackgroundSave
from lightning_realloc.strategies.checkpoints.checkpoint import (
    RANDOM_STATES,
    TrainedModels,
    random_state,
    read_checkpoint,
    unsharded_state,
)
from lightning_realloc.strategies.checkpoints.checkpoint_files import read_description, run_on_first_rank
from lightning_realloc.strategies.checkpoints.checkpoint_writer import require_finite_weights, write_checkpoint
from lightning_realloc.strategies.checkpoints.folders import finish_replacement, remove_checkpoint
from lightning_realloc.strategies.checkpoints.gather import gather_weights
from lightning_realloc.strategies.checkpoints.model_card import make_model_card
from lightning_realloc.strategies.checkpoints.optimizer_settings import follow_given_rates, stored_settings
from lightning_realloc.strategies.checkpoints.safety.failed_saves import FailedSaves
from lightning_realloc.strategies.checkpoints.safety.last_pointer import LatestSave, point_to, pointed_checkpoint
from lightning_realloc.strategies.checkpoints.safety.leftovers import Leftovers
from lightning_realloc.strategies.checkpoints.safety.write_errors import name_write_errors
from lightning_realloc.strategies.checkpoints.waiting_samples import WAITING_BATCHES, encode_results, read_waiting
from lightning_realloc.strategies.exchange.waiting_batches import WaitingBatches
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers
from lightning_realloc.strategies.placed_roles import PlacedRoles

_log = logging.getLogger(__name__)

STALL_WARNING_S = 60.0
"""Seconds of waiting for other ranks after which a rank warns. Ranks may be a whole training call apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Settings of saves; `ReallocStrategy` documents them."""

    save_frozen_roles: bool
    in_background: bool
    """``async_checkpoints``."""


class RoleCheckpoints:
    """Saves, resumes and exports the models of a pool; `ReallocStrategy` documents the settings."""

    def __init__(
        self, placed: PlacedRoles, optimizers: LightningOptimizers, failed_saves: FailedSaves, options: SaveOptions
    ) -> None:
        self._placed = placed
        self._optimizers = optimizers
        self._save_frozen_roles = options.save_frozen_roles
        self._in_background = options.in_background
        self._background = BackgroundSave()
        self._latest = LatestSave()
        self._failed = failed_saves
        self._leftovers = Leftovers(failed_saves)

    def module_state(self) -> dict[str, Any]:
        """Return the part of the module's state that rank 0 writes; see `unsharded_state`. Collective."""
        if self._ended_early():
            return {}
        self._placed.pool.sync_biases()
        return unsharded_state(self._placed.module, self._placed.pool)

    def _ended_early(self) -> bool:
        """Return whether the run failed before its models were set up, so that there is nothing to save."""
        if self._placed.module is None:
            return True
        if self._placed.module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        try:
            _ = self._placed.runner
        except ConfigError:  # there is none yet
            return True
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the settings of an optimizer's groups; tensors are written with their roles."""
        return stored_settings(optimizer)

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object) -> None:
        """Write a checkpoint folder. Collective over all ranks.

        Raises:
            CheckpointError: if it cannot be written, or the one before could not be written in the background.
            ConfigError: if ``storage_options`` is given.
        """
        if storage_options is not None:
            raise ConfigError(
                "storage_options cannot be used, since no CheckpointIO writes a folder of shards; leave it out"
            )
        if self._ended_early():
            _log.warning("no checkpoint %s: the run failed before its models were set up", filepath)
            return
        self._placed.bring_back()
        with self._placed.runner.collective("save_checkpoint", kind="save"):
            self._save(checkpoint, filepath)

    def _save(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        placed = self._placed
        with warn_if_stalled("save_checkpoint", placed.facts.rank):
            checkpoint[RANDOM_STATES] = gather_on_first(random_state(placed.facts.device))
            if waiting := placed.runner.waiting():
                checkpoint[WAITING_BATCHES] = list(map(dict, waiting.batches))
        folder = as_path(broadcast_object(str(filepath), 0))
        if not self._writes_in_background:
            self.finish_saving()  # so that `last` points to no checkpoint that turns out to be missing
        same = self._latest.same_as(folder, checkpoint, placed.module.trainer)
        if (same := broadcast_object(None if same is None else str(same), 0)) is not None:
            with self._failed.tolerated(folder, placed.module.trainer):
                self._point(folder, as_path(same))
            return
        models = self._trained_models()
        if "optimizer_states" in checkpoint and placed.pool.dataflow.trained_roles and not models.optimizers:
            rank_zero_warn(
                f"no run can be resumed from {folder}: it holds only weights, since trainer.fit has not trained the "
                f"current ones; to resume later, save after fit, before evaluating another model or with ckpt_path="
            )
        self.finish_saving()
        self._latest.forget()
        self._failed.keep(folder)
        with self._failed.tolerated(folder, placed.module.trainer):
            write_checkpoint(
                folder,
                checkpoint,
                models,
                include_frozen=self._save_frozen_roles,
                results=encode_results(waiting),
                background=self._background if self._writes_in_background else None,
            )
            self._latest.remember(folder, checkpoint)
        if placed.facts.rank == 0 and self._latest.path is not None:
            self._background.after_completion(self._remove_replaced)
            self._background.after_completion(lambda: self._leftovers.remove_next_to(folder))

    @property
    def _writes_in_background(self) -> bool:
        # A save after fit, or because of an exception, may be the last thing that the process does.
        state = self._placed.module.trainer.state
        return self._in_background and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def _point(self, last: AnyPath, checkpoint: AnyPath) -> None:
        """Point ``last`` to a checkpoint that holds the same state. Collective over all ranks."""
        if not self._writes_in_background:
            run_on_first_rank(lambda: point_to(last, checkpoint))
        elif self._placed.facts.rank == 0:
            self._background.after_completion(lambda: point_to(last, checkpoint))

    def check_callbacks(self) -> None:
        """Refuse callbacks whose checkpoints cannot be written. Collective over all ranks.

        Raises:
            ConfigError: for a callback that links to checkpoints before they are written.
            CheckpointError: on every rank, for a folder that cannot be written to.
        """
        callbacks = self._placed.module.trainer.checkpoint_callbacks
        if self._in_background and any(getattr(callback, "save_last", None) == "link" for callback in callbacks):
            raise ConfigError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that async_checkpoints=True is still "
                "writing; use save_last=True, or leave async_checkpoints out"
            )
        folders = [path for callback in callbacks if (path := getattr(callback, "dirpath", None)) is not None]

        def check() -> None:
            for folder in folders:
                require_writable(as_path(folder), prefix="ModelCheckpoint: ")

        run_on_first_rank(check)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background; see `BackgroundSave.finish`. Collective."""
        if self._background.has_begun:
            latest, trainer = self._latest, self._placed.module.trainer
            with self._failed.tolerated(latest.path, trainer, step=latest.step):
                try:
                    self._background.finish()
                except CheckpointError:
                    latest.forget()
                    raise

    def close(self) -> None:
        """Wait for the checkpoint that is written in the background, after a failure."""
        self._background.close()

    def remove(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once the one that replaces it is complete; see `remove_checkpoint`."""
        if self._placed.facts.rank == 0:
            self._failed.postpone_removal(as_path(filepath))
            self._background.after_completion(self._remove_replaced)

    def _remove_replaced(self) -> None:
        self._failed.remove_replaced(remove_checkpoint)

    def load(self, checkpoint_path: str | Path, *, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint into the sharded roles, in place. It may have another layout and number of ranks.

        Raises:
            CheckpointError: if it is not a checkpoint of this strategy, or is one of other models.
        """
        placed, trainer = self._placed, self._placed.module.trainer
        placed.bring_back()
        self.finish_saving()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        found = as_path(checkpoint_path)

        def find() -> None:
            nonlocal found
            if is_fitting and isinstance(found, Path):
                found = finish_replacement(found)
            found = pointed_checkpoint(found)

        run_on_first_rank(find)
        folder = as_path(broadcast_object(str(found), 0))
        averaged = frozenset[str]()
        if not is_fitting:
            self._optimizers.forget()  # their state belongs to the replaced weights
            averaged = placed.policies.evaluated_averages(placed.pool.dataflow.trained_roles)
        checkpoint = read_checkpoint(
            folder,
            self._trained_models(),
            weights_only=weights_only,
            resuming=is_fitting,
            averages_of=averaged,
        )
        if is_fitting:
            follow_given_rates(checkpoint, [config.scheduler.optimizer for config in self._optimizers.schedules])
            placed.runner.restore(self._read_waiting(folder, checkpoint))
        return checkpoint

    def _read_waiting(self, folder: AnyPath, checkpoint: Mapping[str, Any]) -> WaitingBatches:
        """Return the batches that wait in a checkpoint. Collective."""
        facts, models = self._placed.facts, self._trained_models()
        with models.raising_together(folder):
            plan = self._placed.pool.plan
            return read_waiting(folder, read_description(folder), checkpoint, plan=plan, facts=facts)

    def save_huggingface(
        self, role: str, folder: str | Path | RemotePath, *, dtype: str | torch.dtype | None, merge: bool
    ) -> None:
        """See `ReallocStrategy.save_huggingface`."""
        placed, models, parsed = self._placed, self._trained_models(), hf_folder.parse_dtype(dtype)
        pool, place = placed.pool, as_path(folder)
        names = None if merge else pool.saved_parameters(role, include_frozen=False)
        name = "save_huggingface"
        with placed.runner.collective(name, kind="save"), warn_if_stalled(name, placed.facts.rank):
            placed.bring_back()
            if role in pool.changing_roles:
                require_finite_weights(pool, role, place)
            weights = self.full_weights(role, names)
            pool.sync_biases()

        def write() -> None:
            with name_write_errors(place):
                model = pool.home(role).model
                hf_folder.write_running_model(
                    model, weights, models.tokenizer, place, role=role, dtype=parsed, merge=merge
                )

        run_on_first_rank(write)

    def check_huggingface(self, role: str, *, dtype: str | torch.dtype | None) -> None:
        """Raise the errors that `save_huggingface` would raise before it gathers anything."""
        hf_folder.parse_dtype(dtype)
        hf_folder.import_model_class(hf_folder.class_path(self._placed.pool.home(role).model), role)

    def full_weights(self, role: str, names: Set[str] | None = None) -> dict[str, Tensor]:
        """Return a role's full weights on rank 0, {} elsewhere; ``names=None`` means all. Collective over all ranks."""
        self._placed.bring_back()
        return gather_weights(self._placed.pool.home(role), self._placed.facts, names=names)

    def check_release(self, role: str) -> None:
        """Raise ConfigError where a role's weights are needed after its last call."""
        if self._save_frozen_roles:
            raise ConfigError(
                f"save_frozen_roles=True writes the weights of {role!r} into checkpoints, and they are to leave memory "
                f"once its last call has run; leave save_frozen_roles out, or keep the role"
            )

    def full_state(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        state = self.module_state()
        for role in self._kept_roles():
            state |= {f"{role}.{name}": tensor.cpu() for name, tensor in self.full_weights(role).items()}
        return state

    def full_bytes(self) -> int:
        """Return about how many bytes the tensors of `full_state` have: all of a role count as its first one here."""
        total = 0
        for role in self._kept_roles():
            replica = self._placed.pool.home(role)
            first = next(replica.model.parameters(), None)
            elements = sum(math.prod(param.shape) for param in replica.model_layout.model.params)
            total += elements * (4 if first is None else first.element_size())
        return total

    def _kept_roles(self) -> list[str]:
        return [role for role in self._placed.pool.roles if role not in self._placed.pool.released]

    def _trained_models(self) -> TrainedModels:
        module = self._placed.module
        try:
            tokenizer = module.tokenizer
        except (AttributeError, ConfigError):  # models that are given as modules may have no tokenizer
            tokenizer = None
        return TrainedModels(
            pool=self._placed.pool,
            algorithm=type(module).__name__,
            optimizers=self._optimizers.by_role(),
            tokenizer=tokenizer,
            facts=self._placed.facts,
            card_of=lambda role: make_model_card(module.trainer, module, role, title=role, is_adapter=False),
        )


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
