"""Describe a checkpoint folder in ``realloc.json``, with size and checksum of every file, and verify it.

Checksums find damage: a flipped bit, a lost page, a truncated file. They do not authenticate the author. Therefore
nothing that is read from a checkpoint runs code.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.messages.objects import gather_objects

log = logging.getLogger(__name__)

ROLES_FILE = "realloc.json"
META_FILE = "meta.pt"
MODELS_FOLDER = "huggingface"
FORMAT = 1
"""Version of the checkpoint format."""

_FILES, _CHECKSUM = "files", "checksum"
_ROLE_KEYS = {"class", "saved", "parameters", "tied"}
_RECORD_KEYS = {"bytes", "crc32"}
_READ_BYTES = 1 << 20
"""Bytes of a file read at a time: few enough to stay in the processor's cache between the copy and the checksum."""
_REFUSED_CLASS = re.compile(r"GLOBAL (\S+)")
"""Class name in the error of torch's ``weights_only`` loader."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or differs from the file that was written."""


# ---- errors
@contextmanager
def name_read_errors(
    file: Path, *, if_refused: str = "use a checkpoint from a source that you trust"
) -> Iterator[None]:
    """Convert errors from reading a file into a CheckpointError that names the file and the cause.

    Args:
        file: File that is read inside.
        if_refused: Advice in the error if the file needs classes other than plain data.

    Raises:
        CheckpointError: for any exception inside.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refused = _REFUSED_CLASS.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused:
            raise CheckpointError(
                f"{file} holds {refused[1]}, which is not plain data and could run code; {if_refused}"
            ) from error
        cause = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{file} cannot be read: {type(error).__name__}: {cause}") from error


@contextmanager
def raise_on_all_ranks(folder: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Raise one rank's CheckpointError on every rank. Collective over all ranks if there are several.

    For a damaged file, the error also names the newest intact checkpoint next to ``folder``.

    Raises:
        CheckpointError: on every rank, the one of the lowest rank that failed.
    """
    problem: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        problem = error
    problems = [problem] if world_size == 1 else gather_objects(problem)
    first = next((one for one in problems if one is not None), None)
    if isinstance(first, DamagedCheckpoint):
        intact = newest_intact(folder, rank=rank, world_size=world_size)
        way_out = "there is no intact checkpoint" if intact is None else f"{intact} is the newest intact checkpoint"
        raise CheckpointError(f"{first}; {way_out} next to it") from problem
    if first is not None:
        raise first


# ---- the description
def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of this package."""
    return (folder / ROLES_FILE).is_file()


def write_description(folder: Path, description: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write ``realloc.json``: ``description``, the records of all ``files``, and a checksum of both."""
    content = {**description, _FILES: files}
    content[_CHECKSUM] = _text_checksum(content)
    (folder / ROLES_FILE).write_text(json.dumps(content, indent=1))


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of ``realloc.json``, checked.

    Raises:
        CheckpointError: if the path is not a checkpoint folder (names its kind), or the description is damaged.
    """
    file = folder / ROLES_FILE
    if not file.is_file():
        _refuse_other(folder)
    with name_read_errors(file):
        description: dict[str, Any] = json.loads(file.read_text())
    if not isinstance(description, dict):
        raise DamagedCheckpoint(f"{file} holds a {type(description).__name__}, which describes no checkpoint")
    checksum = description.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _text_checksum(description):
        raise DamagedCheckpoint(
            f"{file} is not as it was written: its text has the checksum {_text_checksum(description)} and not "
            f"{checksum} (to edit it on purpose, remove the entry {_CHECKSUM!r})"
        )
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description.get('format')!r}, but this version reads {FORMAT}; "
            f"read it with the version of lightning-realloc that wrote it"
        )
    roles: Any = description.get("roles")
    if "algorithm" not in description or not all(isinstance(one, dict) for one in (roles, description.get(_FILES, {}))):
        raise DamagedCheckpoint(f"{file} lacks the algorithm, its roles or the list of files")
    for role, entry in roles.items():
        if not isinstance(entry, dict) or not entry.keys() >= _ROLE_KEYS:
            raise DamagedCheckpoint(f"{file} does not describe {role!r} by {', '.join(sorted(_ROLE_KEYS))}")
    for name, record in description.get(_FILES, {}).items():
        if not isinstance(record, dict) or not record.keys() >= _RECORD_KEYS:
            raise DamagedCheckpoint(f"{file} does not describe {name} by {', '.join(sorted(_RECORD_KEYS))}")
    return description


def _refuse_other(folder: Path) -> None:
    if (folder / MODELS_FOLDER).is_dir():
        raise DamagedCheckpoint(f"{folder / ROLES_FILE} is missing")
    if (folder / "config.json").is_file():
        hint = "it is a Hugging Face model: give it as a model's path (actor=...) instead"
    elif (folder / META_FILE).is_file():
        hint = "another strategy wrote it: use that strategy"
    else:
        kind = "a file" if folder.is_file() else "a folder without it" if folder.is_dir() else "missing"
        hint = f"it is {kind}: give the folder that ModelCheckpoint or trainer.save_checkpoint wrote"
    raise CheckpointError(
        f"a checkpoint of several models is a folder with {ROLES_FILE}; {folder} cannot be read, {hint}"
    )


def _text_checksum(content: Mapping[str, Any]) -> str:
    return _hex(zlib.crc32(json.dumps(content).encode()))


# ---- the other files
def file_records(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return path below ``folder`` -> size and checksum.

    Raises:
        CheckpointError: for a file that cannot be read.
    """
    return {file.relative_to(folder).as_posix(): _record(file) for file in files}


def check_files(folder: Path, description: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> None:
    """Verify this rank's share of a checkpoint's files.

    Each file is read by one rank: the one that wrote it, if the number of ranks is the same.

    Raises:
        CheckpointError: if a file is missing or has another size or checksum.
    """
    records: Mapping[str, Mapping[str, Any]] | None = description.get(_FILES)
    if records is None:
        if rank == 0:
            log.warning("%s has no checksums, since an earlier version wrote it; damage cannot be detected", folder)
        return
    for name in list(records)[rank::world_size]:
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        size = file.stat().st_size
        if size != records[name]["bytes"]:
            raise DamagedCheckpoint(f"{file} has {size} bytes, but {records[name]['bytes']} were written")
        checksum = _record(file)["crc32"]
        if checksum != records[name]["crc32"]:
            raise DamagedCheckpoint(
                f"{file} is not as it was written: its checksum is {checksum}, but was {records[name]['crc32']}"
            )


def newest_intact(folder: Path, *, rank: int = 0, world_size: int = 1) -> Path | None:
    """Return the newest undamaged checkpoint next to ``folder``; None if there is none. Collective."""
    siblings = _siblings(folder)
    if world_size > 1:
        siblings = gather_objects(siblings)[0]
    for sibling in siblings:
        is_intact = False
        try:
            description = read_description(sibling)
            check_files(sibling, description, rank=rank, world_size=world_size)
            is_intact = _FILES in description
        except CheckpointError as error:
            log.info("%s is damaged, too: %s", sibling, error)
        if is_intact if world_size == 1 else all(gather_objects(is_intact)):
            return sibling
    return None


def _siblings(folder: Path) -> list[Path]:
    """Return the checkpoints next to a path, newest first."""
    try:
        found = [path for path in folder.parent.iterdir() if path.name != folder.name and is_checkpoint(path)]
        return sorted(found, key=lambda path: (path / ROLES_FILE).stat().st_mtime, reverse=True)
    except OSError:
        return []


def _record(file: Path) -> dict[str, Any]:
    # crc32 is the fastest checksum of the standard library (several GB/s). The load reads the file again.
    checksum, size, buffer = 0, 0, memoryview(bytearray(_READ_BYTES))
    with name_read_errors(file), file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return {"bytes": size, "crc32": _hex(checksum)}


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
