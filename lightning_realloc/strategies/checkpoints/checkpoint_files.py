"""Describe a checkpoint folder in ``realloc.json``, with size and checksum of every file, and verify it.

Checksums find damage: a flipped bit, a lost page, a file cut short. They do not show who wrote a file; nothing that
is read from a checkpoint runs code for that reason.
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

_FILES, _CHECKSUM = "files", "checksum"
_ROLE_KEYS = {"class", "saved", "parameters", "tied"}
_RECORD_KEYS = {"bytes", "crc32"}
_READ_BYTES = 1 << 20
"""Of a file at a time: small enough to stay in the processor's cache between the copy and the checksum."""
_REFUSED_CLASS = re.compile(r"GLOBAL (\S+)")
"""The name in the message of torch's ``weights_only`` loader."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint that is missing, or is not what was written."""


# ---- errors
@contextmanager
def reading(file: Path, *, if_refused: str = "use a checkpoint from a source that you trust") -> Iterator[None]:
    """Turn whatever reading a file raises into an error that names the file and the cause.

    Args:
        if_refused: The way out where the file asks for more than plain data.

    Raises:
        CheckpointError: for what is raised inside.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refused = _REFUSED_CLASS.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused:
            raise CheckpointError(
                f"{file} holds {refused[1]}, which is no plain data and could run code; {if_refused}"
            ) from error
        cause = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{file} cannot be read: {type(error).__name__}: {cause}") from error


@contextmanager
def agreed(folder: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Raise on every rank what one of them raises inside; damage with the newest whole checkpoint next to ``folder``.

    Collective over all ranks, where there are several.

    Raises:
        CheckpointError: on every rank, the one of the lowest rank.
    """
    problem: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        problem = error
    problems = [problem] if world_size == 1 else gather_objects(problem)
    first = next((one for one in problems if one is not None), None)
    if isinstance(first, DamagedCheckpoint):
        whole = newest_whole(folder, rank=rank, world_size=world_size)
        way_out = "no whole checkpoint lies" if whole is None else f"{whole} is the newest whole checkpoint"
        raise CheckpointError(f"{first}; {way_out} next to it") from problem
    if first is not None:
        raise first


# ---- the description
def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one of ours."""
    return (folder / ROLES_FILE).is_file()


def write_description(folder: Path, description: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write ``realloc.json``: ``description``, the records of all ``files``, and a checksum of both."""
    content = {**description, _FILES: files}
    content[_CHECKSUM] = _text_checksum(content)
    (folder / ROLES_FILE).write_text(json.dumps(content, indent=1))


def read_description(folder: Path) -> dict[str, Any]:
    """Return what ``realloc.json`` says.

    Raises:
        CheckpointError: for a path that is no checkpoint folder, with what it is instead, or a damaged description.
    """
    file = folder / ROLES_FILE
    if not file.is_file():
        _refuse_other(folder)
    with reading(file):
        description: dict[str, Any] = json.loads(file.read_text())
    if not isinstance(description, dict):
        raise DamagedCheckpoint(f"{file} holds a {type(description).__name__}, and describes no checkpoint")
    checksum = description.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _text_checksum(description):
        raise DamagedCheckpoint(
            f"{file} is not as it was written: its text has the checksum {_text_checksum(description)} and not "
            f"{checksum} (to edit it on purpose, remove the entry {_CHECKSUM!r})"
        )
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description.get('format')!r}, this version reads {FORMAT}; "
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
        hint = "it was written by another strategy: use the one that wrote it"
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
    """Verify this rank's share of a checkpoint's files: each file is read by one rank, its writer where it is here.

    Raises:
        CheckpointError: for a file that is missing, has another size, or another checksum.
    """
    records: Mapping[str, Mapping[str, Any]] | None = description.get(_FILES)
    if records is None:
        if rank == 0:
            log.warning("%s has no checksums, an earlier version wrote it: damaged weights would not be seen", folder)
        return
    for name in list(records)[rank::world_size]:
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        size = file.stat().st_size
        if size != records[name]["bytes"]:
            raise DamagedCheckpoint(f"{file} has {size} bytes, and {records[name]['bytes']} were written")
        checksum = _record(file)["crc32"]
        if checksum != records[name]["crc32"]:
            raise DamagedCheckpoint(
                f"{file} is not as it was written: its checksum is {checksum}, and was {records[name]['crc32']}"
            )


def newest_whole(folder: Path, *, rank: int = 0, world_size: int = 1) -> Path | None:
    """Return the newest checkpoint next to ``folder`` whose files are all as they were written. Collective."""
    siblings = _siblings(folder)
    if world_size > 1:
        siblings = gather_objects(siblings)[0]
    for sibling in siblings:
        is_whole = False
        try:
            description = read_description(sibling)
            check_files(sibling, description, rank=rank, world_size=world_size)
            is_whole = _FILES in description
        except CheckpointError as error:
            log.info("%s is not whole either: %s", sibling, error)
        if is_whole if world_size == 1 else all(gather_objects(is_whole)):
            return sibling
    return None


def _siblings(folder: Path) -> list[Path]:
    """Return the checkpoints next to a path, the newest first."""
    try:
        found = [path for path in folder.parent.iterdir() if path.name != folder.name and is_checkpoint(path)]
        return sorted(found, key=lambda path: (path / ROLES_FILE).stat().st_mtime, reverse=True)
    except OSError:
        return []


def _record(file: Path) -> dict[str, Any]:
    # Of the standard library's checksums crc32 is the fastest, several GB/s, and the file is read again by the load.
    checksum, size, buffer = 0, 0, memoryview(bytearray(_READ_BYTES))
    with reading(file), file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return {"bytes": size, "crc32": _hex(checksum)}


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
