"""Write files and folders of a run to an object store: through memory or a folder on this machine, and then as a whole.

Stores cannot append to a file and cannot rename a folder. Local paths need none of this.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from lightning_realloc.errors import CheckpointError, ConfigError, ReallocError, UnwrittenCheckpoint, describe_error
from lightning_realloc.output_files import PARTIAL, write_problem
from lightning_realloc.remote_path import AnyPath, RemotePath, files_below
from lightning_realloc.retries.attempts import TRIES

log = logging.getLogger(__name__)

UPLOAD_EVERY_S = 60.0
"""Seconds between two uploads of a file that grows. Fewer: readers see lines earlier; each upload is the whole file."""


def require_writable(folder: AnyPath, *, prefix: str = "", error: type[ReallocError] = CheckpointError) -> None:
    """Raise an error, whose text begins with ``prefix``, if files cannot be written to a folder or an address."""
    problem = folder.write_problem() if isinstance(folder, RemotePath) else write_problem(folder)
    if problem is not None:
        raise error(prefix + problem)


# ---- folders
@contextmanager
def uploaded_folder(folder: AnyPath, *, last: str, replaces: str) -> Iterator[Path]:
    """Give a folder to write to: ``folder`` itself or, for an address, one on this machine that is uploaded at the end.

    An earlier model stays until all new files are in the store, in a folder below, from which the store copies them.

    Args:
        folder: Folder or address.
        last: Name of the file by which a reader knows that the folder is complete. It is removed before any other file
            changes, and written last.
        replaces: Pattern of earlier files that are removed unless a new one has their name.

    Raises:
        CheckpointError: if the store fails. It says what is left there.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        _upload(Path(name), folder, last=last, replaces=replaces)


def _upload(source: Path, target: RemotePath, *, last: str, replaces: str) -> None:
    files = sorted(files_below(source).items(), key=lambda item: item[0] == last)
    staged = target / f"{PARTIAL}-{uuid.uuid4().hex[:12]}"
    left = "earlier files there are unchanged"
    removed: RemotePath | None = staged
    try:
        if has_earlier := (target / last).is_file():
            for name, file in files:
                (staged / name).upload(Path(str(file)))
            left, removed = f"no model is there until {staged} is copied to it", None
            (target / last).unlink()
        else:
            left, removed = "no model is left there", target
        earlier = [path for path in target.files() if path.parent == target]  # not those of folders below it
        new = dict(files)
        target.remove_below([path for path in earlier if fnmatch(path.name, replaces) and path.name not in new])
        for name, file in files:
            _put(target / name, Path(str(file)), staged / name if has_earlier else None)
    except Exception as error:  # stores raise errors of any class
        if removed is not None:
            with suppress(Exception):
                removed.remove_below([removed / name for name, _ in files])
        raise UnwrittenCheckpoint(
            f"{target} cannot be written: {describe_error(error)}; {left}, write it again or give another address"
        ) from error
    _remove_staged(target)


def _remove_staged(target: RemotePath) -> None:
    """Remove files of this upload, and of earlier ones that a kill has ended, from the folders that were copied."""
    try:
        target.remove_below([path for path in target.files() if f"{target}/{PARTIAL}-" in str(path)])
    except Exception as error:  # stores raise errors of any class
        log.warning("%s is complete, but files next to it were not removed: %s", target, describe_error(error))


def _put(place: RemotePath, file: Path, staged: RemotePath | None) -> None:
    """Write a file, as the store's own copy of a staged one if it can make that."""
    try:
        if staged is not None:
            place.copy_from(staged)
            return
    except NotImplementedError:  # some stores copy nothing
        pass
    place.upload(file)


@contextmanager
def local_copy(folder: AnyPath, *, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
    """Give a folder on this machine: ``folder`` itself or, for an address, a copy of its files with ``wanted`` names.

    Files keep the time of their last change.

    Raises:
        ConfigError: if the store fails.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent) / folder.name
        copy.mkdir()
        try:
            for name, path in files_below(folder).items():
                if wanted(name) and isinstance(path, RemotePath):
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    (copy / name).write_bytes(path.read_bytes())
                    os.utime(copy / name, (path.modified_s(), path.modified_s()))
        except Exception as error:  # stores raise errors of any class
            raise ConfigError(
                f"{folder} cannot be read: {describe_error(error)}; correct the address or its access keys"
            ) from error
        yield copy


# ---- files that grow
class UploadedText:
    """Text file in an object store that grows: it stays in memory, and is written as a whole every `UPLOAD_EVERY_S`.

    A store that fails gets one warning, and the next upload has all lines. Readers see an earlier file until then.

    Args:
        path: The file; lines are appended to an existing one.
        clock: Returns seconds.

    Raises:
        ConfigError: if an existing file cannot be read.
    """

    def __init__(self, path: RemotePath, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        try:
            self._content = bytearray(path.read_bytes() if path.is_file() else b"")
        except Exception as error:  # stores raise errors of any class
            raise ConfigError(
                f"{path} cannot be read: {describe_error(error)}; correct the address or its access keys"
            ) from error
        self._uploaded_at = clock()
        self._is_warned = False

    def write(self, text: str) -> None:
        """Append text."""
        self._content += text.encode()

    def flush(self) -> None:
        """Upload the file if `UPLOAD_EVERY_S` have passed since the last time."""
        if self._clock() - self._uploaded_at >= UPLOAD_EVERY_S:
            self._upload("its latest lines follow when the store answers", attempts=1)  # training waits for it

    def close(self) -> None:
        """Upload the file."""
        self._is_warned = False
        self._upload("its latest lines are lost")

    def _upload(self, consequence: str, *, attempts: int = TRIES) -> None:
        self._uploaded_at = self._clock()
        try:
            self._path.write_bytes(bytes(self._content), attempts=attempts)
            self._is_warned = False
        except Exception as error:  # stores raise errors of any class
            if not self._is_warned:
                log.warning("%s cannot be written (%s); %s", self._path, describe_error(error), consequence)
            self._is_warned = True
