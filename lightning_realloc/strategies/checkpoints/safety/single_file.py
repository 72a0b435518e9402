"""Write, read and remove the single file of a module without calls, through failures that may pass.

Lightning writes to another disk first and moves the file from there, which copies it: a kill could leave half of it.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load

from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    checkpoint_files_in,
    is_complete,
    name_read_errors,
)
from lightning_realloc.strategies.checkpoints.folders import (
    partial_path,
    point_links_elsewhere,
    sync_files,
    sync_folder,
)

log = logging.getLogger(__name__)


class SingleFile:
    """A checkpoint in one file, through Lightning's ``CheckpointIO``; the default one's work is done here.

    Args:
        path: Path or address.
        checkpoint_io: Plugin of the strategy.
    """

    def __init__(self, path: AnyPath, checkpoint_io: CheckpointIO) -> None:
        self.path, self._io = path, checkpoint_io
        self.is_default = type(checkpoint_io) is TorchCheckpointIO
        """Whether the file is the one that torch writes, and not of a plugin of the user's."""

    def write(self, checkpoint: Mapping[str, Any], storage_options: object) -> None:
        """Write the file as a whole: after a failure or a kill, an earlier one at the path is unchanged.

        Raises:
            ConfigError: for ``storage_options``, which the default plugin has no use for.
        """
        if not self.is_default:
            given = dict(checkpoint)
            retried(lambda: self._io.save_checkpoint(given, str(self.path), storage_options=storage_options), self.path)
            return
        if storage_options is not None:
            raise ConfigError("storage_options needs a CheckpointIO plugin that knows them; leave it out, or give one")
        stream = io.BytesIO()
        torch.save(checkpoint, stream)
        if isinstance(self.path, RemotePath):
            self.path.write_bytes(stream.getvalue())
        else:
            _write_on_disk(self.path, stream.getbuffer())

    def read(self, *, weights_only: bool) -> dict[str, Any]:
        """Return the content.

        Raises:
            CheckpointError: if it is missing or cannot be read, naming the newest complete file next to it.
        """
        try:
            with name_read_errors(
                self.path, if_refused="if you trust it, use ReallocStrategy(load_weights_only=False)"
            ):
                if not self.path.exists():
                    raise CheckpointError(f"there is no checkpoint {self.path}")
                return retried(lambda: self._content(weights_only=weights_only), self.path)
        except CheckpointError as error:
            others = (one for one in checkpoint_files_in(self.path.parent) if one.name != self.path.name)
            newest = next(filter(is_complete, others), None)
            found = "there is no complete checkpoint" if newest is None else f"{newest} is the newest complete one"
            raise CheckpointError(
                f"{error}; {found} next to it: correct ckpt_path, or leave it out to start from the beginning"
            ) from error

    def _content(self, *, weights_only: bool) -> dict[str, Any]:
        content: dict[str, Any]
        if self.is_default and isinstance(self.path, RemotePath):  # the plugin takes a failing store for a missing file
            file = io.BytesIO(self.path.read_bytes())
            content = _load(file, map_location=lambda storage, _: storage, weights_only=weights_only)
        else:
            content = self._io.load_checkpoint(str(self.path), weights_only=weights_only)
        return content

    def remove(self) -> bool:
        """Remove the file, and point links to it elsewhere; return False, with a warning, if that fails."""
        try:
            if isinstance(self.path, Path):
                point_links_elsewhere(self.path, checkpoint_files_in(self.path.parent))
            if not self.is_default:
                self._io.remove_checkpoint(str(self.path))
            elif self.path.is_file() or self.path.is_symlink():
                self.path.unlink()
        except Exception as error:  # stores and plugins raise errors of any class
            log.warning("%s was not removed: %s: %s", self.path, type(error).__name__, error)
            return False
        return True


def _write_on_disk(path: Path, content: memoryview) -> None:
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        partial.write_bytes(content)
        sync_files([partial])
        os.replace(partial, path)

    try:
        retried(write, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
