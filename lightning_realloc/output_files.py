"""Check that a folder can be written to, and write files as a whole or not at all. Standard library alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial as partial_function
from pathlib import Path

from lightning_realloc.remote_path import expand_home, is_remote
from lightning_realloc.retries.attempts import retried

PARTIAL = ".partial"
"""Folder of files that are being written, and suffix of such a file."""


def write_problem(folder: str | Path) -> str | None:
    """Return why files cannot be written to a folder, with the way out; None if they can.

    A folder that does not exist yet is not made: the nearest folder above it counts. Room on the disk is not checked.
    Addresses such as ``s3://bucket/run`` are not checked either.
    """
    if is_remote(folder):
        return None
    place = expand_home(Path(folder)).absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror} at {place}; give another folder"


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, so that a full disk or a kill leaves the earlier file or none.

    Raises:
        OSError: if it cannot be written.
    """
    path = expand_home(Path(path))
    if path.exists() and not path.is_file():  # such as /dev/stdout, which a rename would replace
        path.write_text(text, encoding="utf-8")
        return
    _write_whole(path, text.encode())


def append_text(path: Path, text: str, *, replaces: bool = False) -> None:
    """Append text to a file, or replace its content as a whole; its folder is made.

    Another attempt, after an error of a network disk, begins where the first one did, so that no text is there twice.

    Raises:
        OSError: if it cannot be written. The file is then as it was.
    """
    content = text.encode(errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    if replaces:
        _write_whole(path, content)
        return
    end = path.stat().st_size if path.exists() else 0

    def write() -> None:
        with path.open("ab") as file:
            file.truncate(end)
            file.write(content)

    try:
        retried(write, path)
    except OSError:
        with suppress(OSError):
            os.truncate(path, end)
        raise


def _write_whole(path: Path, content: bytes) -> None:
    target = path.resolve()  # a link stays a link
    partial = target.with_name(target.name + PARTIAL)

    def write() -> None:
        partial.write_bytes(content)
        os.replace(partial, target)

    try:
        retried(write, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def added_files(folder: Path, *, last: Collection[str] = (), replaces: str | None = None) -> Iterator[Path]:
    """Give an empty folder to write to, whose files move into ``folder`` once all are written.

    If writing fails, ``folder`` stays as it was. A kill while files move leaves it without the ``last`` ones, and never
    with new and old files together. The disk must have room for both.

    Args:
        folder: Folder to add the files to. Files of the same names are replaced, others stay.
        replaces: Pattern of earlier files that are removed unless a new one has their name; None removes none.
        last: Names of files that move after all others: those by which a reader knows that the folder is complete.
    """
    is_new = not folder.exists()
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        set_usual_modes(partial)
        new = sorted(partial.iterdir(), key=lambda file: file.name in last)
        earlier = () if replaces is None else folder.glob(replaces)
        stale = {file.name for file in earlier} - {file.name for file in new}
        for name in (*last, *stale):
            (folder / name).unlink(missing_ok=True)
        for file in new:
            retried(partial_function(os.replace, file, folder / file.name), folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it holds files now
                folder.rmdir()


def set_usual_modes(folder: Path) -> None:
    """Give files in a new folder the mode of other new files; safetensors writes files that only their owner reads."""
    mode = folder.stat().st_mode & 0o666  # as a folder of this process has it: reading its umask would change it
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with suppress(OSError):  # some file systems, such as CIFS, have modes of their own
                file.chmod(mode)
