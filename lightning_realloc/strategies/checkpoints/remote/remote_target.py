"""Write a checkpoint to an object store, which can write one file in one step but cannot rename a folder.

Every save has a folder of its own below the checkpoint's path, ``save-<id>``. ``realloc.json`` next to it names that
folder, and is written last, in one request: until then the earlier checkpoint at the path is the valid one.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import RemotePath, files_below
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    CONTENT,
    ROLES_FILE,
    file_records,
    is_checkpoint,
    write_description,
)
from lightning_realloc.strategies.checkpoints.remote.remote_files import RemoteFiles
from lightning_realloc.strategies.checkpoints.stored_metadata import METADATA_FILE

log = logging.getLogger(__name__)

_SAVE = re.compile(r"save-[0-9a-f]{12}/.+")
"""Name below a checkpoint's path of a file that a save wrote."""


class RemoteTarget:
    """Destination of one save in an object store.

    Args:
        token: Hexadecimal digits that no other save has, the same on all ranks.
    """

    def __init__(self, folder: RemotePath, token: str) -> None:
        self._folder = folder
        self._small_files: dict[str, dict[str, Any]] = {}
        self.files = RemoteFiles()
        """Writer of this rank's shards."""
        self.content = folder / f"save-{token[:12]}"
        """Folder for the shards of all ranks."""

    @contextmanager
    def small_files(self) -> Iterator[Path]:
        """Give a local folder to write to, whose files are sent to the store afterwards. For the first rank.

        Raises:
            CheckpointError: for a path that holds files of something else.
        """
        others = [name for name in files_below(self._folder) if name != ROLES_FILE and not _SAVE.fullmatch(name)]
        if others and not is_checkpoint(self._folder):
            raise CheckpointError(
                f"{self._folder} holds {others[0]} but no checkpoint, and writing one would replace it; choose another "
                f"path"
            )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            yield folder
            files = files_below(folder)
            self._small_files = file_records(folder, (folder / one for one in files))
            for one in files:
                (self.content / one).write_bytes((folder / one).read_bytes())

    def shard_records(self, rank: int) -> dict[str, dict[str, Any]]:
        """Return name -> size and checksum of the shards that this rank has written."""
        return dict(self.files.records)

    def complete(self, description: Mapping[str, Any], records: Mapping[str, Any]) -> None:
        """Make this save the checkpoint, and remove earlier ones at its path. For the first rank."""
        inside = self.content.name
        metadata = {METADATA_FILE: self.files.records[METADATA_FILE]}
        files = {f"{inside}/{name}": record for name, record in {**records, **self._small_files, **metadata}.items()}
        write_description(self._folder, {**description, CONTENT: inside}, files)
        try:
            remove_saves(self._folder, keep=inside)
        except Exception as error:  # stores raise errors of any class
            log.warning("%s is complete, but an earlier save was not removed: %s", self._folder, error)

    def discard(self) -> None:
        """Remove the files of this save. For the first rank, when no rank writes any more."""
        with suppress(Exception):  # the store may have failed for good; the next save to this path removes them
            self.content.remove_below(self.content.files())


def remove_saves(folder: RemotePath, *, keep: str) -> None:
    """Remove the files of all saves at a path but one."""
    stale = (name for name in files_below(folder) if _SAVE.fullmatch(name) and not name.startswith(f"{keep}/"))
    folder.remove_below([folder / name for name in stale])


def unfinished_saves(folder: RemotePath) -> list[RemotePath]:
    """Return the folders of saves to a checkpoint's path that its ``realloc.json`` does not name; none elsewhere."""
    try:
        saves = [one for one in folder.iterdir() if _SAVE.fullmatch(f"{one.name}/-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not saves or not is_checkpoint(folder):
        return saves
    description = json.loads((folder / ROLES_FILE).read_bytes())
    return [one for one in saves if one.name != description.get(CONTENT)]


def remove_remote_checkpoint(folder: RemotePath) -> bool:
    """Remove a checkpoint, ``realloc.json`` first, so that a half-removed one is no checkpoint.

    Returns False if the store failed; the rest of a half-removed one is removed another time.

    Keeps, with a warning, anything that is not a checkpoint.
    """
    try:
        found = files_below(folder)
        if ROLES_FILE in found:
            (folder / ROLES_FILE).unlink()
        elif not all(map(_SAVE.fullmatch, found)):
            log.warning("%s is not a checkpoint of several models, and is not removed", folder)
            return True
        folder.remove_below([folder / name for name in found if name != ROLES_FILE])
    except Exception as error:  # stores raise errors of any class
        log.warning("%s was not removed: %s: %s", folder, type(error).__name__, error)
        return False
    return True
