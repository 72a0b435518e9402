"""Replace and remove checkpoint folders, so that a kill at any moment leaves a complete checkpoint behind.

A checkpoint is written to ``<folder>.<writer>.partial`` and then exchanged with the earlier one, in one step where the
file system can do so. Elsewhere it takes two renames; `finish_replacement` completes them if a kill came in between.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import AnyPath, RemotePath, files_below
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.transfer.shared_memory import host_identity
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    ROLES_FILE,
    age_s,
    file_records,
    is_checkpoint,
    is_complete,
    siblings,
    write_description,
)
from lightning_realloc.strategies.checkpoints.sharded_tensors import SHARD_SUFFIX, files_of

log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_TOKEN = uuid.uuid4().hex[:8]
"""Part of this process's name as a writer: the system may give its number to another process later."""
_PARTIAL_END = re.compile(r"\.(?:([^.]+-\d+-[0-9a-f]+)\.)?partial\Z")
"""End of a partial folder's name with its `writer_name`, which has no dots: else ``a.b`` could be ``a`` of a writer."""
ABANDONED_AFTER_S = 3600.0
"""Seconds without a change after which another host's partial folder is removed. Fewer: a slow save is taken for one
that was killed."""
MOVED_AFTER_S = 60.0
"""Seconds without a change after which another host's complete checkpoint is not about to be moved by its writer.
More: a run that is soon restarted on another host resumes from the checkpoint before."""
_PREVIOUS = ".being-replaced"
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Error numbers of file systems that have no fsync, as some in user space."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of Linux' ``renameat2``: paths are relative to the working directory; swap both entries."""


# ---- names
def writer_name() -> str:
    """Return a name that no other process has."""
    return f"{_process_space()}-{os.getpid()}-{_TOKEN}"


def _process_space() -> str:
    """Return a name of the processes that `os.kill` finds here. Containers may share a host's name, but not those."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return f"{socket.gethostname().partition('.')[0]}-{zlib.crc32((host_identity() + namespace).encode()):08x}"


def partial_path(folder: Path, writer: str | None = None) -> Path:
    """Return the path at which ``writer``, by default this process, writes a checkpoint before it moves to ``folder``.

    Two runs that save to one path then mix no files: each checkpoint there is of one of them.
    """
    return folder.with_name(f"{folder.name}.{writer or writer_name()}{_PARTIAL}")


def _partial_paths(folder: Path) -> dict[Path, str]:
    """Return the partial folders next to a checkpoint's path -> their writers; "" for those of earlier versions."""
    try:
        found = list(folder.parent.iterdir())
    except OSError:  # there is no such folder yet
        return {}
    ends = {path: path.name.removeprefix(folder.name) for path in found if path.name.startswith(folder.name)}
    return {path: match[1] or "" for path, end in ends.items() if (match := _PARTIAL_END.fullmatch(end))}


def _is_abandoned(partial: Path, writer: str, *, after_s: float) -> bool:
    """Return whether no process writes to a partial folder any more, as far as this host can tell.

    ``after_s`` is the number of seconds without a change that says so of a process that this host does not know.
    """
    if writer in ("", writer_name()):
        return True
    space, _, number = writer.rpartition("-")[0].rpartition("-")
    if space == _process_space() and not _is_running(int(number)):
        return True
    try:
        files: list[Path] = [] if partial.is_symlink() else list(partial.rglob("*"))
        return max(path.lstat().st_mtime for path in [partial, *files]) + after_s < time.time()
    except FileNotFoundError:  # its writer is at work
        return False


def abandoned_partials(folder: Path) -> list[Path]:
    """Return the partial paths of all checkpoints in a folder to which no process writes any more.

    A complete folder that was not yet moved to its path is kept: a run may resume from it.
    """
    found = [(path, end) for path in folder.iterdir() if (end := _PARTIAL_END.search(path.name)) and end[1]]
    left = [(path, end) for path, end in found if _is_abandoned(path, end[1], after_s=ABANDONED_AFTER_S)]
    return [path for path, end in left if not _is_needed(path, path.with_name(path.name[: end.start()]))]


def _is_needed(partial: Path, target: Path) -> bool:
    """Return whether a partial folder is the only checkpoint of its path."""
    if partial.is_symlink() or not partial.is_dir() or os.path.lexists(target):
        return False
    return is_complete(partial)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere, os.kill ends the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        pass
    return True


def is_partial(path: AnyPath) -> bool:
    """Return whether a path is a folder that a save left before it was complete."""
    return path.suffix == _PARTIAL and path.is_dir() and not is_checkpoint(path)


def previous_path(folder: Path) -> Path:
    """Return the path of the earlier checkpoint between two renames.

    ``last.ckpt`` becomes ``last.being-replaced.ckpt``, which Lightning's ``ckpt_path="last"`` finds, too.
    """
    return folder.with_name(f"{folder.stem}{_PREVIOUS}{folder.suffix}")


def _target_path(path: Path) -> Path:
    """Return the path whose `previous_path` is ``path``; ``path`` itself if there is none."""
    if path.suffix == _PREVIOUS:
        return path.with_suffix("")
    return path.with_name(path.stem.removesuffix(_PREVIOUS) + path.suffix)


# ---- writing
class LocalTarget:
    """Destination of one save in a local folder, or one that all nodes share.

    Args:
        writer: `writer_name` of the first rank.
    """

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder = folder
        self.files = None
        self.content = partial_path(folder, writer)
        """Folder for the shards of all ranks."""

    @contextmanager
    def small_files(self) -> Iterator[Path]:
        """Give an empty folder to write to. For the first rank.

        Raises:
            CheckpointError: for a path that holds files of something else.
        """
        folder = self._folder
        if folder.is_dir() and not folder.is_symlink() and any(folder.iterdir()) and not is_checkpoint(folder):
            raise CheckpointError(
                f"{folder} is a folder but not a checkpoint, and writing one would replace it; choose another path"
            )
        yield make_partial(folder)

    def shard_records(self, rank: int) -> dict[str, dict[str, Any]]:
        """Force the shards that this rank has written to the disk, and return name -> size and checksum of each."""
        files = files_of(self.content, rank)
        with ThreadPoolExecutor(1) as disk:  # the checksums take no time of their own next to a disk
            synced = disk.submit(sync_files, files)
            records = file_records(self.content, files)
            synced.result()
        return records

    def complete(self, description: Mapping[str, Any], records: Mapping[str, Any]) -> None:
        """Describe the checkpoint and move it to its path. For the first rank.

        Args:
            description: Content of ``realloc.json``.
            records: Name -> size and checksum of the shards of all ranks.
        """
        partial = self.content
        others = [partial / name for name, path in files_below(partial).items() if path.suffix != SHARD_SUFFIX]
        sync_files(others)
        files = {**records, **file_records(partial, others)}

        def describe() -> None:
            write_description(partial, description, files)
            sync_files([partial / ROLES_FILE])

        retried(describe, partial)
        replace_folder(partial, self._folder)

    def discard(self) -> None:
        """Remove the incomplete folder. For the first rank, when no rank writes any more."""
        with suppress(OSError):  # the disk may be read-only by now
            remove(self.content)


# ---- replacing
def make_partial(folder: Path) -> Path:
    """Make the empty folder in which a checkpoint is written, and remove what a kill left of earlier ones."""
    partial = partial_path(folder)
    for left, writer in _partial_paths(folder).items():
        if _is_abandoned(left, writer, after_s=ABANDONED_AFTER_S):
            remove(left)
    if os.path.lexists(folder):
        _remove_previous(folder)
    partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Move a complete checkpoint, whose files are on the disk, to its path, and remove the earlier one.

    After a kill, ``folder`` is either of them, or `finish_replacement` makes it one.
    """
    for below, _, _ in os.walk(partial):
        sync_folder(Path(below))
    if not os.path.lexists(folder):
        _rename(partial, folder)
    elif not _exchange(partial, folder):
        _rename(folder, previous_path(folder))
        try:
            _rename(partial, folder)
        except OSError:
            with suppress(OSError):  # else `finish_replacement` does so
                os.rename(previous_path(folder), folder)
            raise
    sync_folder(folder.parent)
    try:
        remove(partial)  # after an exchange, the earlier checkpoint
        _remove_previous(folder)
    except OSError as error:
        log.warning("%s is complete, but the earlier checkpoint was not removed: %s", folder, error)


def _remove_previous(folder: Path) -> None:
    """Remove the earlier checkpoint after two renames, under a name that Lightning does not find meanwhile."""
    if os.path.lexists(previous_path(folder)):
        os.rename(previous_path(folder), partial_path(folder))
        remove(partial_path(folder))


def _rename(source: Path, target: Path) -> None:
    retried(lambda: os.rename(source, target), target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step; return False, with both unchanged, where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library without it
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return int(done) == 0  # if anything else is wrong, the renames instead raise it


def finish_replacement(path: Path) -> Path:
    """Complete a replacement that a kill interrupted, and return the path to read instead of ``path``.

    Takes the newest of several complete ones, but none that a running process may be about to move. Only for the run
    that will write to this path next: another one could be between its two renames.
    """
    folder = _target_path(path)
    if os.path.lexists(folder):
        return path
    partials = sorted(_partial_paths(folder).items(), key=lambda one: age_s(one[0] / ROLES_FILE) or 0.0, reverse=True)
    abandoned = (left for left, writer in partials if _is_abandoned(left, writer, after_s=MOVED_AFTER_S))
    for left in (*abandoned, previous_path(folder)):
        if is_complete(left):
            try:
                os.rename(left, folder)
            except OSError:  # a folder that is only readable
                return left
            sync_folder(folder.parent)
            log.warning("%s was complete, but not yet moved, when its run was killed; it is now %s", left, folder)
            return folder
    return path


# ---- removing
def remove(path: Path) -> None:
    """Remove a file, link or folder, if there is one. A half-removed folder is no checkpoint."""
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):
            (path / ROLES_FILE).unlink()
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_checkpoint(path: AnyPath) -> bool:
    """Remove a checkpoint, or a link to one; return False if the disk or store failed.

    Keeps, with a warning, anything that is not a checkpoint, and a complete checkpoint if all newer ones next to it are
    incomplete: it is the one to resume from.
    """
    if isinstance(path, RemotePath):
        from lightning_realloc.strategies.checkpoints.remote.remote_target import remove_remote_checkpoint

        return remove_remote_checkpoint(path)
    try:
        if path.is_symlink():
            path.unlink()
        elif is_checkpoint(path):
            _remove_folder(path)
        elif os.path.lexists(path):
            log.warning("%s is not a checkpoint of several models, and is not removed", path)
    except OSError as error:
        log.warning("%s was not removed: %s", path, error)
        return False
    return True


def _remove_folder(path: Path) -> None:
    """Remove a checkpoint, unless it is the one to resume from."""
    age = age_s(path / ROLES_FILE) or 0.0
    newer = [other for other in siblings(path) if (age_s(other / ROLES_FILE) or 0.0) >= age]
    if newer and is_complete(path) and not any(map(is_complete, newer)):
        log.warning("%s is not removed, since %s is newer but incomplete", path, newer[0])
        return
    point_links_elsewhere(path, siblings(path))
    partial = partial_path(path)
    remove(partial)
    os.rename(path, partial)
    remove(partial)


def point_links_elsewhere(path: Path, found: Iterable[AnyPath]) -> None:
    """Point links to a checkpoint, such as ``last.ckpt``, at the newest other one: a kill may follow its removal.

    Args:
        found: The checkpoints next to it, newest first.
    """
    links = [entry for entry in path.parent.iterdir() if entry.is_symlink() and entry.resolve() == path.resolve()]
    real = (one for one in found if one.name != path.name and not one.is_symlink()) if links else ()
    others = [one.name for one in real if is_complete(one)]
    for link in links if others else ():
        changed = partial_path(link)
        changed.unlink(missing_ok=True)
        changed.symlink_to(others[0])
        os.replace(changed, link)


# ---- durability
def sync_files(files: Iterable[Path]) -> None:
    """Force the contents of files to the disk, where the file system can."""
    for file in files:
        with file.open("rb+") as stream:
            try:
                os.fsync(stream.fileno())
            except OSError as error:
                if error.errno not in _CANNOT_SYNC:
                    raise


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    with suppress(OSError):  # Windows cannot open folders, and some file systems cannot sync them
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
