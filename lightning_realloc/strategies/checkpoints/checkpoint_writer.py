"""Write a checkpoint of several models: at once, or in the background while training goes on.

The first rank writes the small files, and every rank its regions of tensors. Once all parts are written, the first
rank adds the description, which makes the checkpoint valid: in a local folder next to the path, which then moves there
(`folders`), or in an object store, where it is the last file (`remote`). If a part cannot be written, all parts are
removed and earlier checkpoints stay.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_realloc.errors import CheckpointError, UnwrittenCheckpoint
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.objects import broadcast_object, gather_objects, gather_on_first
from lightning_realloc.strategies.checkpoints import hf_folder
from lightning_realloc.strategies.checkpoints.background import BackgroundSave
from lightning_realloc.strategies.checkpoints.checkpoint import TrainedModels
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    FORMAT,
    META_FILE,
    MODELS_FOLDER,
    run_on_first_rank,
)
from lightning_realloc.strategies.checkpoints.folders import LocalTarget, writer_name
from lightning_realloc.strategies.checkpoints.safety.write_errors import name_write_errors
from lightning_realloc.strategies.checkpoints.sharded_state import (
    non_finite_parameters,
    optimizer_state,
    weights_state,
)
from lightning_realloc.strategies.checkpoints.sharded_tensors import (
    ShardedTensor,
    ShardWriter,
    State,
    WrittenRegion,
)
from lightning_realloc.strategies.checkpoints.waiting_samples import results_file
from lightning_realloc.strategies.pool.model_pool import ModelPool

if TYPE_CHECKING:
    from lightning_realloc.strategies.checkpoints.remote.remote_target import RemoteTarget

VISIBLE_WITHIN_S = 30.0
"""Seconds within which a file has to be seen by other nodes; NFS may remember for as long that it was missing."""
_POLL_S = 0.1
"""Seconds between two looks for such a file."""


def write_checkpoint(
    folder: AnyPath,
    meta: dict[str, Any],
    models: TrainedModels,
    *,
    include_frozen: bool,
    results: bytes | None = None,
    background: BackgroundSave | None = None,
) -> None:
    """Write a checkpoint folder. Collective over all ranks.

    An earlier checkpoint at ``folder`` is replaced only once the new one is complete.

    Args:
        meta: Lightning's part, written to ``meta.pt``.
        include_frozen: Whether to write roles that are never trained.
        results: This rank's results of batches that wait to be trained on; None if none wait.
        background: Writes copies of the tensors after this function has returned. None writes them here.

    Raises:
        CheckpointError: on every rank, if trained weights are not finite, or ``folder`` holds something else. An
            earlier checkpoint at ``folder`` then stays unchanged.
        UnwrittenCheckpoint: the same, if a rank cannot write.
    """
    for role in models.pool.changing_roles:
        require_finite_weights(models.pool, role, folder)
    roles = [role for role in models.pool.roles if include_frozen or role in models.pool.changing_roles]
    token, writer = broadcast_object((uuid.uuid4().hex, writer_name()), 0)
    target = _target(folder, token, writer)
    state = _state(meta, models, roles, include_frozen=include_frozen)
    save = _Save(folder, target, models.facts.rank, state, results)
    run_on_first_rank(lambda: save.begin(meta, models, roles))
    try:
        with _raising_as_unwritten(), models.raising_together(folder), name_write_errors(folder):
            _wait_for_file(target.content, META_FILE, models.facts.rank)
        with _raising_as_unwritten():
            save.shards.plan_on_all_ranks()
        if background is not None:
            with models.raising_together(folder):
                save.copy_to_host()
            background.start(save, token=token, rank=models.facts.rank, world_size=models.facts.world_size)
            return
        with models.raising_together(folder):
            part = save.write()
        parts = gather_on_first(part)
        run_on_first_rank(lambda: save.complete(parts))
    except CheckpointError:  # on all ranks, so none of them is still writing
        if models.facts.rank == 0:
            save.discard()
        raise


@contextmanager
def _raising_as_unwritten() -> Iterator[None]:
    """Raise any CheckpointError inside as an UnwrittenCheckpoint."""
    try:
        yield
    except CheckpointError as error:
        raise UnwrittenCheckpoint(str(error)) from error


def require_finite_weights(pool: ModelPool, role: str, folder: AnyPath) -> None:
    """Require that a trained role's weights are finite. Collective over all ranks.

    Raises:
        CheckpointError: on every rank, naming the first parameter with NaN or infinity.
    """
    home = pool.home(role)
    names = pool.saved_parameters(role, include_frozen=False)
    bad = {name for found in gather_objects(non_finite_parameters(home, names)) for name in found}
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
        state |= weights_state(home, models.pool.saved_parameters(role, include_frozen=include_frozen))
        if "optimizer_states" in meta and role in models.optimizers:
            state |= optimizer_state(home, models.optimizers[role])
    return state


class Part(NamedTuple):
    """Description of the part of a checkpoint that one rank wrote."""

    regions: list[WrittenRegion]
    """File and position of every region."""
    files: dict[str, dict[str, Any]]
    """File name -> size and checksum."""


def _target(folder: AnyPath, token: str, writer: str) -> LocalTarget | RemoteTarget:
    if not isinstance(folder, RemotePath):
        return LocalTarget(folder, writer)
    from lightning_realloc.strategies.checkpoints.remote.remote_target import RemoteTarget

    return RemoteTarget(folder, token)


class _Save:
    """One rank's part of a checkpoint that is being written. Errors are CheckpointErrors that name the disk."""

    def __init__(
        self, folder: AnyPath, target: LocalTarget | RemoteTarget, rank: int, state: State, results: bytes | None
    ) -> None:
        self._folder = folder
        self._target = target
        self._rank = rank
        self._results = results
        self._needed_bytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.values())
        self._description: dict[str, Any] = {}
        self.shards = ShardWriter(state, target.content, files=target.files)

    def begin(self, meta: dict[str, Any], models: TrainedModels, roles: list[str]) -> None:
        """Write all files but those with tensors, and describe the models. For the first rank."""
        try:
            with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
                retried(lambda: self._write_small_files(meta, models, roles), self._folder)
        except CheckpointError:
            self.discard()
            raise
        self._description = {
            "format": FORMAT,
            "algorithm": models.algorithm,
            "world_size": models.facts.world_size,
            "plan": models.pool.plan.to_mapping(),
            "roles": {role: _describe_role(models, role, saved=role in roles) for role in models.pool.roles},
        }

    def _write_small_files(self, meta: dict[str, Any], models: TrainedModels, roles: list[str]) -> None:
        with self._target.small_files() as partial:
            with (partial / META_FILE).open("wb") as stream:
                torch.save(meta, stream)
            for role in roles:
                tokenizer = models.tokenizer if role in models.pool.changing_roles else None
                hf_folder.write_configs(models.pool.home(role).model, tokenizer, partial / MODELS_FOLDER / role)

    def copy_to_host(self) -> None:
        """Copy this rank's tensors, so that `write` needs neither models nor other ranks."""
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            self.shards.copy_to_host()

    def write(self) -> Part:
        """Write this rank's tensors."""
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            part = retried(self._write_part, self._folder)
        self.shards.release_copies()
        return part

    def _write_part(self) -> Part:
        # Also after a failed fsync, files are written anew: the system may have dropped what it could not write.
        regions = self.shards.write()
        if self._results is not None:
            self.shards.write_file(results_file(self._rank), self._results)
        return Part(regions, self._target.shard_records(self._rank))

    def complete(self, parts: list[Part]) -> None:
        """Describe all ranks' parts, which makes the checkpoint valid. For the first rank."""
        with name_write_errors(self._folder, needed_bytes=self._needed_bytes):
            retried(lambda: self.shards.complete([part.regions for part in parts]), self._folder)
            records = {name: record for part in parts for name, record in part.files.items()}
            self._target.complete(self._description, records)

    def discard(self) -> None:
        """Remove what was written. For the first rank, when no rank writes any more."""
        self._target.discard()


def _describe_role(models: TrainedModels, role: str, *, saved: bool) -> dict[str, Any]:
    home, is_trained = models.pool.home(role), role in models.pool.dataflow.trained_roles
    card = models.card_of(role)
    return {
        "model_card": asdict(card) if is_trained else None,
        "source": card.base,
        "class": hf_folder.class_path(home.model),
        "layout": str(home.layout),
        "saved": saved,
        "parameters": {param.name: list(param.shape) for param in home.model_layout.model.params},
        "tied": {alias: owner for alias, owner in home.model_layout.model.aliases},
    }


def _wait_for_file(folder: AnyPath, name: str, rank: int) -> None:
    """Wait at most `VISIBLE_WITHIN_S` until a file that another rank has written can be seen."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} ({socket.gethostname()}) does not see {folder}, to which the first rank writes; save to "
                f"a file system that all nodes share, or to an object store such as s3://"
            )
        with suppress(OSError):
            next(folder.parent.iterdir(), None)  # refreshes what a client of NFS remembers
        time.sleep(_POLL_S)
