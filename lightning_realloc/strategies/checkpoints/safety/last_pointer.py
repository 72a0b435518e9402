"""Make ``last`` a pointer to the checkpoint that holds the same state, in place of a second one; follow pointers.

On a disk, the pointer is a symbolic link. In an object store, and on a disk without links, it is a folder whose
``realloc.json`` names the other checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.errors import CheckpointError
from lightning_realloc.output_files import write_text
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.retries.attempts import retried
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    ROLES_FILE,
    checkpoints_in,
    is_checkpoint,
    is_complete,
    name_read_errors,
)
from lightning_realloc.strategies.checkpoints.folders import partial_path, remove, replace_folder, sync_files
from lightning_realloc.strategies.checkpoints.safety.write_errors import name_write_errors

log = logging.getLogger(__name__)

_FORMAT = "pointer"
"""Format in ``realloc.json``. Earlier versions refuse it, and name it."""
_TARGET = "checkpoint"
"""Key of the name of the checkpoint, which lies next to the pointer."""


# ---- the state that a checkpoint holds
class _Save(NamedTuple):
    path: AnyPath
    step: int
    state: tuple[object, ...]


class LatestSave:
    """The latest checkpoint of a run, for ``last`` of the same state."""

    def __init__(self) -> None:
        self._save: _Save | None = None

    def remember(self, path: AnyPath, checkpoint: Mapping[str, Any]) -> None:
        """Remember a checkpoint, and the part of its state by which states differ."""
        self._save = _Save(path, int(checkpoint["global_step"]), _state(checkpoint))

    @property
    def path(self) -> AnyPath | None:
        """Path of the latest checkpoint; None without one."""
        return None if self._save is None else self._save.path

    @property
    def step(self) -> int | None:
        """Iterations done before the latest checkpoint; None without one."""
        return None if self._save is None else self._save.step

    def forget(self) -> None:
        """Forget the latest checkpoint: it could not be written."""
        self._save = None

    def same_as(self, path: AnyPath, checkpoint: Mapping[str, Any], trainer: Trainer) -> AnyPath | None:
        """Return the checkpoint that ``path``, the ``last`` of a ModelCheckpoint, may point to; None without one."""
        if self._save is None or self._save.state != _state(checkpoint):
            return None
        other = self._save.path
        is_next_to_it = other.parent == path.parent and other != path
        return other if is_next_to_it and any(_is_last(path, one) for one in trainer.checkpoint_callbacks) else None


def _state(checkpoint: Mapping[str, Any]) -> tuple[object, ...]:
    """Return values that differ between two states of a run: progress of all loops, and the parts that are saved."""
    return (*(str(checkpoint.get(key)) for key in ("global_step", "epoch", "loops")), "optimizer_states" in checkpoint)


def _is_last(path: AnyPath, callback: object) -> bool:
    if not isinstance(callback, ModelCheckpoint) or not callback.save_last or callback.dirpath is None:
        return False
    pattern = re.sub(r"\\{.*?\\}", ".*", re.escape(callback.CHECKPOINT_NAME_LAST))
    return path.parent == as_path(callback.dirpath) and re.match(pattern, path.name) is not None


# ---- pointers
def point_to(last: AnyPath, checkpoint: AnyPath) -> None:
    """Make ``last`` a pointer to a checkpoint next to it, and remove an earlier checkpoint there. For the first rank.

    Raises:
        UnwrittenCheckpoint: if it cannot be written. An earlier one stays.
        CheckpointError: for a path that holds files of something else.
    """
    with name_write_errors(last):
        is_folder = last.is_dir() and not last.is_symlink()
        if is_folder and not is_checkpoint(last) and any(True for _ in last.iterdir()):
            raise CheckpointError(f"{last} is a folder but no checkpoint, and would be replaced; choose another path")
        if isinstance(last, RemotePath):
            _point_in_store(last, checkpoint.name)
        else:
            _point_on_disk(last, checkpoint.name)


def repeat_file(last: AnyPath, checkpoint: AnyPath) -> bool:
    """Make ``last`` a link to a single-file checkpoint next to it or, in a store, a copy that the store makes itself.

    Returns:
        Whether it was done; otherwise the file has to be written again.
    """
    try:
        if isinstance(last, RemotePath) and isinstance(checkpoint, RemotePath):
            last.copy_from(checkpoint)
        elif isinstance(last, Path):
            link = partial_path(last)
            link.unlink(missing_ok=True)
            link.symlink_to(checkpoint.name)
            os.replace(link, last)
    except Exception as error:  # stores raise errors of any class, and some neither copy nor link
        log.info("%s is written again, since it cannot be repeated: %s", last, error)
        return False
    return True


def _point_on_disk(last: Path, name: str) -> None:
    pointer = partial_path(last)
    remove(pointer)
    last.parent.mkdir(parents=True, exist_ok=True)
    try:
        pointer.symlink_to(name)
    except OSError:  # a disk without links
        if last.is_dir() and not last.is_symlink() and {one.name for one in last.iterdir()} == {ROLES_FILE}:
            write_text(last / ROLES_FILE, _content(name).decode())  # in one step, without two renames
            sync_files([last / ROLES_FILE])
            return
        pointer.mkdir()
        retried(lambda: (pointer / ROLES_FILE).write_bytes(_content(name)), pointer)
        sync_files([pointer / ROLES_FILE])
    replace_folder(pointer, last)


def _point_in_store(last: RemotePath, name: str) -> None:
    (last / ROLES_FILE).write_bytes(_content(name))
    try:
        last.remove_below([file for file in last.files() if file != last / ROLES_FILE])  # of an earlier checkpoint
    except Exception as error:  # stores raise errors of any class
        log.warning("%s is complete, but files of an earlier save were not removed: %s", last, error)


def _content(name: str) -> bytes:
    return json.dumps({"format": _FORMAT, _TARGET: name}).encode()


def name_last(path: AnyPath, checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
    """Tell ModelCheckpoints in a checkpoint that was read from their ``last`` that it is theirs.

    The checkpoint to which ``last`` points was written before, and knows of none: they would write another ``last``.
    """
    for callback in trainer.checkpoint_callbacks:
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if _is_last(path, callback) and isinstance(state, dict) and "last_model_path" in state:
            state["last_model_path"] = str(path)


def pointed_checkpoint(path: AnyPath) -> AnyPath:
    """Return the checkpoint that a pointer names, and any other path as it is.

    If a kill came after the named checkpoint was removed, that is the newest complete one next to the pointer.

    Raises:
        CheckpointError: if the pointer cannot be read, or there is no complete checkpoint next to it.
    """
    file = path / ROLES_FILE
    with name_read_errors(file):
        content = retried(lambda: file.read_bytes() if file.is_file() else None, file)
    try:
        name = json.loads(content)[_TARGET] if content is not None and f'"{_FORMAT}"'.encode() in content else None
    except (ValueError, LookupError, TypeError):  # a damaged description, which its reader names
        name = None
    if not isinstance(name, str) or name != os.path.basename(name) or name in ("", "."):
        return path
    if is_checkpoint(path.parent / name):
        return path.parent / name
    newest = next(filter(is_complete, checkpoints_in(path.parent)), None)
    if newest is None:
        raise CheckpointError(f"{path} points to {name}, which is missing, and no complete checkpoint lies next to it")
    log.warning("%s points to %s, which is missing; %s is the newest complete one next to it", path, name, newest)
    return newest
