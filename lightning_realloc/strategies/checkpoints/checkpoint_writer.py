"""Write a checkpoint of several models: at once, or in the background while training goes on.

The first rank writes the small files into a folder next to the checkpoint's path, and every rank its regions of
tensors. Once all parts are written, the first rank adds the description and moves the folder to its path. If a part
cannot be written, the folder is removed and earlier checkpoints stay.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.storage import WriteResult

from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.strategies.checkpoints import hf_folder
from lightning_realloc.strategies.checkpoints.background import BackgroundSave
from lightning_realloc.strategies.checkpoints.checkpoint import TrainedModels
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    FORMAT,
    META_FILE,
    MODELS_FOLDER,
    ROLES_FILE,
    file_records,
    is_checkpoint,
    raise_on_all_ranks,
    write_description,
)
from lightning_realloc.strategies.checkpoints.folders import (
    make_partial,
    name_write_errors,
    partial_path,
    remove,
    replace_folder,
    sync_files,
)
from lightning_realloc.strategies.checkpoints.sharded_state import (
    non_finite_parameters,
    optimizer_state,
    weights_state,
)
from lightning_realloc.strategies.checkpoints.sharded_tensors import (
    SHARD_SUFFIX,
    ShardedTensor,
    ShardWriter,
    State,
    files_of,
)
from lightning_realloc.strategies.pool.model_pool import ModelPool


def write_checkpoint(
    folder: Path,
    meta: dict[str, Any],
    models: TrainedModels,
    *,
    include_frozen: bool,
    background: BackgroundSave | None = None,
) -> None:
    """Write a checkpoint folder. Collective over all ranks.

    An earlier checkpoint at ``folder`` is replaced only once the new one is complete.

    Args:
        folder: Path of the checkpoint.
        meta: Lightning's part, written to ``meta.pt``.
        models: Models and optimizers to write.
        include_frozen: Whether to write roles that are never trained.
        background: Writes copies of the tensors after this function has returned. None writes them here.

    Raises:
        CheckpointError: on every rank, if trained weights are not finite, ``folder`` holds something else, or a rank
            cannot write. An earlier checkpoint at ``folder`` then stays unchanged.
    """
    for role in models.pool.changing_roles:
        require_finite_weights(models.pool, role, models.rank, folder)
    roles = [role for role in models.pool.roles if include_frozen or role in models.pool.changing_roles]
    save = _Save(folder, models.rank, _state(meta, models, roles, include_frozen=include_frozen))
    models.run_on_first_rank(lambda: save.begin(meta, models, roles))
    try:
        save.shards.plan_on_all_ranks()
        if background is not None:
            with raise_on_all_ranks(folder, rank=models.rank, world_size=models.world_size):
                save.copy_to_host()
            token = models.broadcast(uuid.uuid4().hex)
            background.start(save, token=token, rank=models.rank, world_size=models.world_size)
            return
        with raise_on_all_ranks(folder, rank=models.rank, world_size=models.world_size):
            part = save.write()
        parts = gather_objects(part)
        models.run_on_first_rank(lambda: save.complete(parts))
    except CheckpointError:  # on all ranks, so none of them is still writing
        if models.rank == 0:
            save.discard()
        raise


def require_finite_weights(pool: ModelPool, role: str, rank: int, folder: Path) -> None:
    """Require that a trained role's weights are finite. Collective over all ranks.

    Raises:
        CheckpointError: on every rank, naming the first parameter with NaN or infinity.
    """
    home = pool.home(role)
    names = pool.saved_parameters(role, include_frozen=False)
    bad = {name for found in gather_objects(non_finite_parameters(home, rank, names)) for name in found}
    if bad:
        params = [param.name for param in home.model_layout.model.params]
        first = min(bad, key=params.index)
        raise CheckpointError(
            f"the weights of {role} are not finite, and {folder} is not written: {first} holds NaN or infinity "
            f"({len(bad)} of {len(params)} parameters do); resume from an earlier checkpoint with a lower learning "
            f"rate or gradient clipping"
        )


def _state(meta: dict[str, Any], models: TrainedModels, roles: list[str], *, include_frozen: bool) -> State:
    """Return this rank's shards of weights and of optimizer state."""
    state: dict[str, ShardedTensor] = {}
    for role in roles:
        home = models.pool.home(role)
        state |= weights_state(home, models.rank, models.pool.saved_parameters(role, include_frozen=include_frozen))
        if "optimizer_states" in meta and role in models.optimizers:
            state |= optimizer_state(home, models.optimizers[role], models.rank)
    return state


class Part(NamedTuple):
    """Description of the part of a checkpoint that one rank wrote."""

    regions: list[WriteResult]
    """File and position of every region."""
    files: dict[str, dict[str, Any]]
    """File name -> size and checksum."""


class _Save:
    """One rank's part of a checkpoint that is being written.

    Args:
        folder: Path of the checkpoint.
        rank: This rank.
        state: This rank's shards.
    """

    def __init__(self, folder: Path, rank: int, state: State) -> None:
        self._folder = folder
        self._partial = partial_path(folder)
        self._rank = rank
        self._needed_bytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.values())
        self._description: dict[str, Any] = {}
        self.shards = ShardWriter(state, self._partial)

    def begin(self, meta: dict[str, Any], models: TrainedModels, roles: list[str]) -> None:
        """Write all files but those with tensors, and describe the models. For the first rank."""
        folder, partial = self._folder, self._partial
        if folder.is_dir() and not folder.is_symlink() and any(folder.iterdir()) and not is_checkpoint(folder):
            raise CheckpointError(
                f"{folder} is a folder but not a checkpoint, and writing one would replace it; choose another path"
            )
        try:
            with name_write_errors(folder, needed_bytes=self._needed_bytes):
                make_partial(folder)
                with (partial / META_FILE).open("wb") as stream:
                    torch.save(meta, stream)
                for role in roles:
                    tokenizer = models.tokenizer if role in models.pool.changing_roles else None
                    hf_folder.write_configs(models.pool.home(role).model, tokenizer, partial / MODELS_FOLDER / role)
        except CheckpointError:
            self.discard()
            raise
        self._description = {
            "format": FORMAT,
            "algorithm": models.algorithm,
            "world_size": models.world_size,
            "plan": models.pool.plan.to_mapping(),
            "roles": {role: _describe_role(models, role, saved=role in roles) for role in models.pool.roles},
        }

    def copy_to_host(self) -> None:
        """Copy this rank's tensors, so that `write` needs neither models nor other ranks.

        Raises:
            CheckpointError: if memory does not suffice.
        """
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            self.shards.copy_to_host()

    def write(self) -> Part:
        """Write this rank's tensors.

        Raises:
            CheckpointError: if they cannot be written, naming the disk.
        """
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            regions, files = self.shards.write(), files_of(self._partial, self._rank)
            with ThreadPoolExecutor(1) as disk:  # the checksums take no time of their own next to a disk
                synced = disk.submit(sync_files, files)
                records = file_records(self._partial, files)
                synced.result()
            return Part(regions, records)

    def complete(self, parts: list[Part]) -> None:
        """Describe all ranks' parts and move the folder to its path. For the first rank.

        Raises:
            CheckpointError: if a file cannot be written, naming the disk.
        """
        partial = self._partial
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            self.shards.complete([part.regions for part in parts])
            shards = {name: record for part in parts for name, record in part.files.items()}
            others = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.suffix != SHARD_SUFFIX]
            sync_files(others)
            write_description(partial, self._description, {**shards, **file_records(partial, others)})
            sync_files([partial / ROLES_FILE])
            replace_folder(partial, self._folder)

    def discard(self) -> None:
        """Remove the incomplete folder. For the first rank, when no rank writes any more."""
        with suppress(OSError):  # the disk may be read-only by now
            remove(self._partial)


def _describe_role(models: TrainedModels, role: str, *, saved: bool) -> dict[str, Any]:
    home, is_trained = models.pool.home(role), role in models.pool.dataflow.trained_roles
    return {
        "model_card": asdict(models.card_of(role)) if is_trained else None,
        "class": hf_folder.class_path(home.model),
        "layout": str(home.layout),
        "saved": saved,
        "parameters": {param.name: list(param.shape) for param in home.model_layout.model.params},
        "tied": {alias: owner for alias, owner in home.model_layout.model.aliases},
    }
