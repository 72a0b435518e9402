"""Verify checkpoints without loading them: every file's size and checksum, the format, and the list of tensors.

A single file, of a module without calls, is a zip archive with checksums of its own.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_realloc.errors import CheckpointError
from lightning_realloc.realloc.plan import format_bytes
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.strategies.checkpoints.adapter_files import ADAPTER_CONFIG_FILE
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    MODELS_FOLDER,
    DamagedCheckpoint,
    check_files,
    content_folder,
    has_checksums,
    is_checkpoint,
    name_read_errors,
    read_description,
)
from lightning_realloc.strategies.checkpoints.folders import is_partial
from lightning_realloc.strategies.checkpoints.safety.last_pointer import pointed_checkpoint
from lightning_realloc.strategies.checkpoints.sharded_state import weight_key
from lightning_realloc.strategies.checkpoints.stored_metadata import require_listed, stored_tensors

_CHECKPOINTS = "checkpoints"
"""Folder for checkpoints in that of a command's run."""
_LIGHTNING_KEYS = {"pytorch-lightning_version", "state_dict"}


def verify_checkpoints(paths: Sequence[AnyPath], write: Callable[[str], object]) -> bool:
    """Write one line for each checkpoint, and return whether all are intact.

    Args:
        paths: Checkpoints, or folders with checkpoints, such as those of runs.
    """
    are_intact = True
    for path in [found for given in paths for found in _checkpoints_at(given)]:
        if is_partial(path):
            write(
                f"{path}: not a checkpoint: a save that was killed left it, and the next one to this path removes it\n"
            )
            are_intact &= path not in paths
            continue
        try:
            write(f"{path}: intact, {verify_checkpoint(path)}\n")
        except CheckpointError as error:
            verdict = "damaged" if isinstance(error, DamagedCheckpoint) and path.exists() else "not verified"
            write(f"{path}: {verdict}: {' '.join(str(error).split())}\n")
            are_intact = False
    return are_intact


def _checkpoints_at(path: AnyPath) -> list[AnyPath]:
    """Return the checkpoints in a folder that is not one itself, or in its folder ``checkpoints``."""
    for folder in (path, path / _CHECKPOINTS):
        if not folder.is_dir() or is_checkpoint(path):
            break
        inside = [entry for entry in folder.iterdir() if is_checkpoint(entry) or entry.suffix in (".ckpt", ".partial")]
        if inside:
            return sorted(inside)
    return [path]


def verify_checkpoint(path: AnyPath) -> str:
    """Return a summary of an intact checkpoint.

    Raises:
        CheckpointError: if it is damaged, incomplete or without checksums, naming the first such file and the cause.
    """
    if isinstance(path, Path) and path.is_file():
        return _verify_file(path)
    path = pointed_checkpoint(path)
    description = read_description(path)
    if not has_checksums(description):
        raise CheckpointError(f"{path} has no checksums, since an earlier version wrote it; it cannot be verified")
    check_files(path, description)
    content = content_folder(path, description)
    require_listed(content, description)
    stored = stored_tensors(content)
    for role, entry in description["roles"].items():
        if entry["saved"] and not (content / MODELS_FOLDER / role / ADAPTER_CONFIG_FILE).is_file():
            for name in entry["parameters"]:
                if weight_key(role, name) not in stored:
                    raise DamagedCheckpoint(f"{path} lacks the weight {name} of {role}")
    size = sum(record["bytes"] for record in description["files"].values())
    return f"{description['algorithm']}, {len(description['files']) + 1} files, {format_bytes(size)}"


def _verify_file(path: Path) -> str:
    with name_read_errors(path), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise DamagedCheckpoint(f"{path} has a wrong checksum at {damaged}")
        content = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        if not isinstance(content, dict) or not content.keys() >= _LIGHTNING_KEYS:
            raise CheckpointError(
                f"{path} was not written by Lightning: it holds a {type(content).__name__} without the keys "
                f"{', '.join(sorted(_LIGHTNING_KEYS))}"
            )
    return "a single file of a module without calls"
