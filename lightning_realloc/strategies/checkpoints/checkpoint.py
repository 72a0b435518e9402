"""Read a checkpoint of several models into any layout and any number of ranks, and list the format's parts.

A checkpoint is a folder:

- ``realloc.json``: every role's parameters, layout and class; the plan; the number of ranks; size and checksum of all
  other files (see ``checkpoint_files``). Readable by people.
- ``meta.pt``: Lightning's loops, callbacks, schedules and optimizer settings, and the random states of all ranks.
- ``*.distcp``: every rank's regions of weights and optimizer state (see ``sharded_tensors``), and its results of
  batches that wait to be trained on (see ``waiting_samples``).
- ``huggingface/<role>/``: config and tokenizer, so that ``lightning-realloc export`` needs only the folder.

In an object store, all but ``realloc.json`` lie in a folder below that one (see ``remote.remote_target``).

Frozen roles, and the base of a role with adapters, are not stored by default: a resumed run loads them from their
source again. `checkpoint_writer` writes the folder.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import socket
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.adapter_layers import adapter_config
from lightning_realloc.runtime.parallel.shards import reshard
from lightning_realloc.strategies.checkpoints import sharded_tensors
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    META_FILE,
    DamagedCheckpoint,
    check_files,
    content_folder,
    has_checksums,
    is_checkpoint,
    name_read_errors,
    raise_on_all_ranks,
    read_description,
)
from lightning_realloc.strategies.checkpoints.model_card import ModelCard
from lightning_realloc.strategies.checkpoints.optimizer_settings import restore_settings, settings_by_role
from lightning_realloc.strategies.checkpoints.sharded_state import (
    optimizer_key,
    prepare_optimizer_state,
    weight_key,
    weights_state,
)
from lightning_realloc.strategies.checkpoints.sharded_tensors import ShardedTensor
from lightning_realloc.strategies.checkpoints.stored_metadata import StoredTensor, require_listed, stored_tensors
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.pool_options import RunFacts
from lightning_realloc.strategies.pool.weight_averages import AVERAGE

log = logging.getLogger(__name__)

RANDOM_STATES = "realloc_random_states"
"""Key of ``meta.pt`` for the random states of all ranks."""
UNKNOWN = "a model"
"""Source of a role in checkpoints of earlier versions, which do not name it."""
_SHOWN_RANKS = 4
"""Ranks that an error about missing files names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModels:
    """Models, optimizers and ranks that a checkpoint is written from or read into."""

    pool: ModelPool
    """Models of all roles."""
    algorithm: str
    """Class name of the algorithm."""
    optimizers: Mapping[str, torch.optim.Optimizer]
    """Role -> optimizer; {} if ``fit`` has not trained these weights."""
    tokenizer: Any
    """Tokenizer that is saved with the trained roles; None if there is none."""
    facts: RunFacts
    """This rank among those of the run."""
    card_of: Callable[[str], ModelCard]
    """Trained role -> its model card, which exports of a checkpoint write."""

    def raising_together(self, folder: AnyPath) -> AbstractContextManager[None]:
        """Raise one rank's CheckpointError about a checkpoint on every rank; see `raise_on_all_ranks`."""
        return raise_on_all_ranks(folder, rank=self.facts.rank, world_size=self.facts.world_size)


# ---- reading
def read_checkpoint(
    folder: AnyPath,
    models: TrainedModels,
    *,
    weights_only: bool,
    resuming: bool,
    averages_of: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Read a checkpoint into models and optimizers in place, and return Lightning's part. Collective.

    Args:
        weights_only: Refuse a ``meta.pt`` that holds more than plain data.
        resuming: Whether to read optimizers and random states, too.
        averages_of: Roles that are filled with the averages that an ``EMA`` kept, if the checkpoint has any.

    Raises:
        CheckpointError: on every rank. If the checkpoint is of other models, names the first difference. If it is
            damaged, names the file and the newest intact checkpoint next to it.
    """
    _require_on_all_ranks(folder, models)
    with models.raising_together(folder):
        description = read_description(folder)
        check_roles(description, models, folder, resuming=resuming)
        if resuming:
            _warn_of_other_models(description, models, folder)
        check_files(folder, description, rank=models.facts.rank, world_size=models.facts.world_size)
    content = content_folder(folder, description)
    with models.raising_together(folder):
        meta = read_meta(content, weights_only=weights_only)
        if has_checksums(description):
            require_listed(content, description)
        stored = stored_tensors(content)
    adapted = {role for role in models.pool.roles if adapter_config(models.pool.home(role).model) is not None}
    state: dict[str, ShardedTensor] = {}
    for role, entry in description["roles"].items():
        if entry["saved"] and role in models.pool.roles:
            weights = weights_state(models.pool.home(role))
            weights = {key: tensor for key, tensor in weights.items() if key in stored or role not in adapted}
            state |= weights if role not in averages_of else _weights_from_averages(role, weights, stored, folder)
            models.pool.weights_changed(role)
    if resuming:
        with models.raising_together(folder), name_read_errors(content / META_FILE):
            settings = _optimizer_settings(folder, meta, models)
        for role, optimizer in models.optimizers.items():
            restore_settings(optimizer, settings[role]["param_groups"], role)
            state |= prepare_optimizer_state(models.pool.home(role), optimizer, stored)
    with models.raising_together(folder):
        sharded_tensors.load(state, content)
    for role in models.pool.roles:
        reshard(models.pool.home(role).model)
    if resuming:
        _restore_random_state(meta, models)
    return meta


def _weights_from_averages(
    role: str, weights: dict[str, ShardedTensor], stored: Mapping[str, StoredTensor], folder: AnyPath
) -> dict[str, ShardedTensor]:
    """Return a role's weights by the stored name that is read into each: its average, or itself without one."""
    start = weight_key(role, "")
    averages = {key: optimizer_key(role, key.removeprefix(start), AVERAGE) for key in weights}
    if not any(average in stored for average in averages.values()):
        log.warning("%s holds no averages of %r; evaluating its weights instead", folder, role)
    return {average if (average := averages[key]) in stored else key: tensor for key, tensor in weights.items()}


def _require_on_all_ranks(path: AnyPath, models: TrainedModels) -> None:
    """Require that a path that one rank has exists on all of them. Collective over all ranks if there are several.

    Raises:
        CheckpointError: on every rank, naming the ranks and hosts that lack it.
    """
    if models.facts.world_size == 1:
        return
    with models.raising_together(path), name_read_errors(path):
        exists = path.exists()
    ranks = gather_objects((exists, socket.gethostname()))
    missing = [(number, host) for number, (has_it, host) in enumerate(ranks) if not has_it]
    if 0 < len(missing) < len(ranks):
        shown = ", ".join(f"rank {number} ({host})" for number, host in missing[:_SHOWN_RANKS])
        others = f" and {len(missing) - _SHOWN_RANKS} more ranks" if len(missing) > _SHOWN_RANKS else ""
        raise CheckpointError(
            f"{path} is missing on {shown}{others}, though other ranks have it; every rank reads it, so put it on a "
            f"file system that all nodes share, or copy it to each node"
        )


def refuse_folder(path: AnyPath) -> None:
    """Raise CheckpointError for a folder as the checkpoint of a module without calls."""
    if path.is_dir():
        kind = "a checkpoint of several models" if is_checkpoint(path) else "a folder"
        raise CheckpointError(
            f"{path} is {kind}, but this LightningModule declares no calls and is read from a single file; give the "
            f"file that trainer.save_checkpoint wrote for it"
        )


def check_roles(description: Mapping[str, Any], models: TrainedModels, folder: AnyPath, *, resuming: bool) -> None:
    """Require a checkpoint of the same models.

    Raises:
        CheckpointError: if the algorithm, a role, a parameter or a shape differs; names the first difference.
    """
    if resuming and description["algorithm"] != models.algorithm:
        raise CheckpointError(
            f"{folder} was saved by {description['algorithm']} and cannot be resumed by {models.algorithm}; to start "
            f"from its weights, write them with 'lightning-realloc export' and give that folder as the model"
        )
    for role in models.pool.roles:
        if role not in description["roles"]:
            if role in models.pool.changing_roles:
                raise CheckpointError(f"{folder} has no role {role!r}, only {', '.join(description['roles'])}")
            continue
        ours = {p.name: list(p.shape) for p in models.pool.home(role).model_layout.model.params}
        _compare_parameters(role, ours, description["roles"][role]["parameters"], folder)


def _warn_of_other_models(description: Mapping[str, Any], models: TrainedModels, folder: AnyPath) -> None:
    """Warn of frozen roles that differ from those of the checkpoint, which does not hold their weights."""
    roles, changing = description["roles"], models.pool.changing_roles
    before = {role: entry.get("source", UNKNOWN) for role, entry in roles.items() if not entry["saved"]}
    read = {role for role, entry in roles.items() if entry["saved"]}
    now = {role: models.card_of(role).base for role in models.pool.roles if role not in {*changing, *read}}
    for change in changed_models(before, now):
        rank_zero_warn(f"{folder} was saved {change}; give the models of that run to go on as it did")


def changed_models(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> list[str]:
    """Return how a run that saved differs from one that resumes, by roles whose weights come from their sources.

    Args:
        before: Role -> name of its source; None for a module without a name, `UNKNOWN` in earlier checkpoints.
        now: The same of this run.
    """
    changes = [f"with {role}={before[role] or 'a module'}, which this run lacks" for role in before if role not in now]
    for role, source in now.items():
        if role not in before:
            changes.append(f"without {role}, which is {source or 'a module'} in this run")
        elif before[role] not in (UNKNOWN, source):
            changes.append(f"with {role}={before[role] or 'a module'}, which is {source or 'a module'} in this run")
    return changes


def _compare_parameters(
    role: str, ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]], folder: AnyPath
) -> None:
    way_out = "resume with the model that it was saved from"
    for name in [*ours, *theirs]:
        if name not in ours or name not in theirs:
            where = "only in the checkpoint" if name in theirs else "not in the checkpoint"
            raise CheckpointError(f"{folder} is of another model: {role} parameter {name} is {where}; {way_out}")
        if ours[name] != theirs[name]:
            raise CheckpointError(
                f"{folder} is of another model: {role} parameter {name} has shape {theirs[name]} there and "
                f"{ours[name]} here; {way_out}"
            )


class _Pickle:
    """The parts of a pickle module that ``torch.load`` uses; it finds public classes of this package by name.

    Their modules may have moved since the checkpoint was written.
    """

    load = staticmethod(pickle.load)

    class Unpickler(pickle.Unpickler):
        """Finds classes for ``torch.load``."""

        def find_class(self, module: str, name: str) -> Any:
            """Return the class of a name."""
            package = __name__.partition(".")[0]
            is_public = module.startswith(f"{package}.") and name in sys.modules[package].__all__
            return super().find_class(package if is_public else module, name)


def read_meta(folder: AnyPath, *, weights_only: bool) -> dict[str, Any]:
    """Return Lightning's part of a checkpoint.

    Raises:
        CheckpointError: if ``meta.pt`` cannot be read or, with ``weights_only``, holds more than plain data.
    """
    file = folder / META_FILE
    with name_read_errors(
        file, if_refused="if you trust this checkpoint, use ReallocStrategy(load_weights_only=False)"
    ):
        pickle_module: Any = None if weights_only else _Pickle

        def read() -> dict[str, Any]:
            source = file if isinstance(file, Path) else io.BytesIO(file.read_bytes())
            content: dict[str, Any] = torch.load(source, "cpu", pickle_module, weights_only=weights_only)
            return content

        meta = retried(read, file)
    if not isinstance(meta, dict):
        raise DamagedCheckpoint(f"{file} holds a {type(meta).__name__}, but Lightning's state is a dict")
    return meta


def _optimizer_settings(folder: AnyPath, meta: Mapping[str, Any], models: TrainedModels) -> dict[str, Any]:
    """Return role -> stored settings of its optimizer, after checking that they match the current optimizer."""
    settings = settings_by_role(meta)
    for role, optimizer in models.optimizers.items():
        if role not in settings:
            raise CheckpointError(
                f"{folder} holds no optimizer state for {role!r} (saved with save_weights_only?), so training cannot "
                f"resume from it; to start anew from its weights, write them with 'lightning-realloc export'"
            )
        theirs = (settings[role]["class"], len(settings[role]["param_groups"]))
        ours = (type(optimizer).__name__, len(optimizer.param_groups))
        if ours != theirs:
            raise CheckpointError(
                f"{role} was trained by {theirs[0]} with {theirs[1]} parameter groups in {folder}, but is by {ours[0]} "
                f"with {ours[1]} here; resume with the same optimizer"
            )
    return settings


def _restore_random_state(meta: Mapping[str, Any], models: TrainedModels) -> None:
    states = meta.get(RANDOM_STATES, ())
    if len(states) == models.facts.world_size:
        set_random_state(states[models.facts.rank], models.facts.device)
    elif models.facts.rank == 0:
        log.info("%d ranks saved random states and %d are running; not restored", len(states), models.facts.world_size)


def unsharded_state(module: nn.Module, pool: ModelPool) -> dict[str, Tensor]:
    """Return the part of a module's state that shards do not hold.

    It has all parameters outside of roles, and all persistent buffers except those of frozen roles.
    """
    roles = tuple(f"{role}." for role in pool.roles)
    frozen = tuple(f"{role}." for role in pool.roles if role not in pool.changing_roles)
    state: dict[str, Tensor] = {}
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False):
            if not (dot + name).startswith(roles):
                state[dot + name] = parameter.detach().cpu()
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and not (dot + name).startswith(frozen):
                state[dot + name] = buffer.detach().cpu()
    return state


# ---- random states
def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and the device, as plain tensors and numbers.

    The package's own draws are keyed by seed, sample and iteration, and depend on no earlier draw. The states are kept
    for draws of users, in reward functions and callbacks.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
