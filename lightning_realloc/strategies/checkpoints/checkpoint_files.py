"""Describe a checkpoint folder in ``realloc.json``, with size and checksum of every file, and verify it.

Checksums find damage: a flipped bit, a lost page, a truncated file. They do not authenticate the author. Therefore
nothing that is read from a checkpoint runs code.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_realloc.errors import CheckpointError, describe_error
from lightning_realloc.remote_path import AnyPath, RemotePath, files_below
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.objects import broadcast_object, gather_objects

log = logging.getLogger(__name__)

ROLES_FILE = "realloc.json"
META_FILE = "meta.pt"
MODELS_FOLDER = "huggingface"
FILE_SUFFIX = ".ckpt"
"""End of the names of single-file checkpoints, which Lightning writes for modules without calls."""
FORMAT = 1
"""Version of the checkpoint format."""

CONTENT = "content"
"""Key of ``realloc.json`` for the folder of all other files, below the checkpoint's; without it they lie next to it."""
_FILES, _CHECKSUM = "files", "checksum"
_ROLE_TYPES: Mapping[str, type] = {"class": str, "saved": bool, "parameters": dict, "tied": dict}
_RECORD_TYPES: Mapping[str, type] = {"bytes": int, "crc32": str}
_READ_BYTES = 1 << 20
"""Bytes of a file read at a time: few enough to stay in the processor's cache between the copy and the checksum."""
_READERS = 4
"""Files of a checkpoint that a rank verifies at the same time."""
_REFUSED_CLASS = re.compile(r"GLOBAL (\S+)")
"""Class name in the error of torch's ``weights_only`` loader."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or differs from the file that was written."""


# ---- errors
@contextmanager
def name_read_errors(
    file: AnyPath, *, if_refused: str = "use a checkpoint from a source that you trust"
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
        raise DamagedCheckpoint(f"{file} cannot be read: {describe_error(error)}") from error


@contextmanager
def raise_on_all_ranks(folder: AnyPath, *, rank: int = 0, world_size: int = 1) -> Iterator[None]:
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


def run_on_first_rank(action: Callable[[], object], *, problem: str = "the first rank failed") -> None:
    """Run an action on the first rank while the others wait. Collective over all ranks.

    Raises:
        CheckpointError: on every rank, if it fails: its own, or one that adds another error to the ``problem``.
    """
    failed: CheckpointError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            failed = error
        except Exception as error:
            failed = CheckpointError(f"{problem} ({type(error).__name__}: {error})")
            failed.__cause__ = error
    failed = broadcast_object(failed, 0)
    if failed is not None:
        raise failed


# ---- the description
def is_checkpoint(folder: AnyPath) -> bool:
    """Return whether a folder is a checkpoint of this package."""
    return (folder / ROLES_FILE).is_file()


def content_folder(folder: AnyPath, description: Mapping[str, Any]) -> AnyPath:
    """Return the folder with all files but ``realloc.json``; in an object store it is one below the checkpoint's."""
    name: str = description.get(CONTENT, "")
    return folder / name


def write_description(folder: AnyPath, description: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write ``realloc.json``: ``description``, the records of all ``files``, and a checksum of both."""
    content = {**description, _FILES: files}
    content[_CHECKSUM] = _text_checksum(content)
    (folder / ROLES_FILE).write_bytes(json.dumps(content, indent=1).encode())


def read_description(folder: AnyPath) -> dict[str, Any]:
    """Return the content of ``realloc.json``, checked.

    Raises:
        CheckpointError: if the path is not a checkpoint folder (names its kind), or the description is damaged.
    """
    file = folder / ROLES_FILE
    with name_read_errors(file):
        text = retried(lambda: file.read_text("utf-8") if file.is_file() else None, file)
        if text is None:
            _refuse_other(folder)
        description: dict[str, Any] = json.loads(text, object_pairs_hook=_unique_keys)
    if not isinstance(description, dict):
        raise DamagedCheckpoint(f"{file} holds a {type(description).__name__}, which describes no checkpoint")
    checksum = description.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _text_checksum(description):
        raise DamagedCheckpoint(
            f"{file} is not as it was written: its text has the checksum {_text_checksum(description)}, not {checksum}"
        )
    if description.get("format") != FORMAT:
        raise DamagedCheckpoint(
            f"{file} has format {description.get('format')!r}, but this version reads {FORMAT}; "
            f"read it with the version of lightning-realloc that wrote it"
        )
    _require_content(file, description)
    return description


def _require_content(file: AnyPath, description: Mapping[str, Any]) -> None:
    """Require all entries that reading a checkpoint uses, in their types; an error names the first other one."""
    roles, files = description.get("roles"), description.get(_FILES, {})
    if not isinstance(description.get("algorithm"), str) or not isinstance(roles, dict) or not isinstance(files, dict):
        raise DamagedCheckpoint(f"{file} lacks the algorithm, its roles or the list of files")
    content = description.get(CONTENT, "")
    if not isinstance(content, str) or "/" in content or content == "..":
        raise DamagedCheckpoint(f"{file} names the folder {content!r}, but its files lie in one inside the checkpoint")
    for role, entry in roles.items():
        if not _has_types(entry, _ROLE_TYPES) or not all(map(_is_shape, entry["parameters"].values())):
            raise DamagedCheckpoint(f"{file} does not describe {role!r} by {', '.join(sorted(_ROLE_TYPES))}")
    for name, record in files.items():
        if not _has_types(record, _RECORD_TYPES):
            raise DamagedCheckpoint(f"{file} does not describe {name} by {', '.join(sorted(_RECORD_TYPES))}")
        if name.startswith("/") or ".." in name.split("/"):
            raise DamagedCheckpoint(f"{file} names {name!r}, but the files of a checkpoint lie in its own folder")


def _has_types(entry: object, types: Mapping[str, type]) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in types.items())


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(extent, int) and extent >= 0 for extent in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _refuse_other(folder: AnyPath) -> NoReturn:
    if (folder / MODELS_FOLDER).is_dir():
        raise DamagedCheckpoint(f"{folder / ROLES_FILE} is {_kind(folder / ROLES_FILE)}")
    if (folder / "config.json").is_file():
        hint = "it is a Hugging Face model: give it as a model's path (actor=...) instead"
    elif (folder / META_FILE).is_file():
        hint = "another strategy wrote it: use that strategy"
    else:
        kind = "a file" if folder.is_file() else "a folder without it" if folder.is_dir() else "missing"
        if isinstance(folder, RemotePath) and kind == "a folder without it":
            raise DamagedCheckpoint(f"{folder} is no checkpoint: it lacks {ROLES_FILE}, which a save writes last")
        hint = f"it is {kind}: give the folder that ModelCheckpoint or trainer.save_checkpoint wrote"
    error = CheckpointError if folder.exists() else DamagedCheckpoint  # of a missing one, the others are named
    raise error(f"a checkpoint of several models is a folder with {ROLES_FILE}; {folder} cannot be read, {hint}")


def _text_checksum(content: Mapping[str, Any]) -> str:
    return _hex(zlib.crc32(json.dumps(content).encode()))


# ---- the other files
def file_records(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return path below ``folder`` -> size and checksum. Raises CheckpointError for a file that cannot be read."""
    return {file.relative_to(folder).as_posix(): _record(file) for file in files}


def has_checksums(description: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint lists its files; earlier versions did not."""
    return _FILES in description


def check_files(folder: AnyPath, description: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> None:
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
    if rank == 0:
        _check_other_files(folder, records, content=description.get(CONTENT, ""))
    mine = {name: records[name] for name in list(records)[rank::world_size]}
    for name, record in mine.items():
        _check_size(folder / name, record)
    with ThreadPoolExecutor(_READERS) as readers:
        checksums = readers.map(lambda name: _record(folder / name)["crc32"], mine)
        for (name, record), checksum in zip(mine.items(), checksums, strict=True):
            if checksum != record["crc32"]:
                raise DamagedCheckpoint(
                    f"{folder / name} is not as it was written: its checksum is {checksum}, but was {record['crc32']}"
                )


def _check_other_files(folder: AnyPath, records: Mapping[str, object], *, content: str) -> None:
    """Warn about files that were not written with a checkpoint; refuse those that an export would read or copy."""
    with name_read_errors(folder):
        found = files_below(folder)
    names = [name for name, path in found.items() if name not in records and not path.name.startswith(".")]
    others = [name for name in names if name != ROLES_FILE]
    models = f"{content}/{MODELS_FOLDER}/".lstrip("/")
    for name in others:
        if name.startswith(models):
            raise DamagedCheckpoint(f"{folder / name} was not written with the checkpoint; remove it")
    if others:
        log.warning("%s holds files that were not written with it, and are ignored: %s", folder, ", ".join(others))


def _check_size(file: AnyPath, record: Mapping[str, Any]) -> None:
    """Require a regular file of the recorded size."""
    with name_read_errors(file):
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is {_kind(file)}")
        size = file.stat().st_size if isinstance(file, Path) else file.num_bytes()
    if size != record["bytes"]:
        raise DamagedCheckpoint(f"{file} has {size} bytes, but {record['bytes']} were written")


def _kind(path: AnyPath) -> str:
    """Return a description of a path that is no regular file."""
    if path.is_dir():
        return "a folder"
    if path.exists():
        return "no regular file"
    return "a link to nothing" if path.is_symlink() else "missing"


def is_complete(path: AnyPath) -> bool:
    """Return whether a folder has all files of a checkpoint, in their sizes, or a file the end that torch writes last.

    Contents are not read.
    """
    try:
        with name_read_errors(path):
            if path.is_file():
                return retried(lambda: _is_archive(path), path)
        description = read_description(path)
        for name, record in description.get(_FILES, {}).items():
            _check_size(path / name, record)
    except CheckpointError:
        return False
    return True


def _is_archive(path: AnyPath) -> bool:
    with path.open("rb") as file:
        return zipfile.is_zipfile(file)


def newest_intact(folder: AnyPath, *, rank: int = 0, world_size: int = 1) -> AnyPath | None:
    """Return the newest undamaged checkpoint next to ``folder``; None if there is none. Collective."""
    others = siblings(folder)
    if world_size > 1:
        others = gather_objects(others)[0]
    for sibling in others:
        is_intact = False
        try:
            description = read_description(sibling)
            check_files(sibling, description, rank=rank, world_size=world_size)
            is_intact = has_checksums(description)
        except CheckpointError as error:
            log.info("%s is damaged, too: %s", sibling, error)
        if is_intact if world_size == 1 else all(gather_objects(is_intact)):
            return sibling
    return None


def checkpoints_in(folder: AnyPath) -> list[AnyPath]:
    """Return the checkpoints in a folder, newest first; none if it cannot be read."""
    return _newest_first(folder, lambda path: age_s(path / ROLES_FILE))


def checkpoint_files_in(folder: AnyPath) -> list[AnyPath]:
    """Return the single-file checkpoints in a folder, newest first; none if it cannot be read."""
    return _newest_first(folder, lambda path: age_s(path) if path.suffix == FILE_SUFFIX and path.is_file() else None)


def _newest_first(folder: AnyPath, age_of: Callable[[AnyPath], float | None]) -> list[AnyPath]:
    try:
        ages = {path: age for path in folder.iterdir() if (age := age_of(path)) is not None}
    except (OSError, CheckpointError):
        return []
    return sorted(ages, key=ages.__getitem__, reverse=True)


def newest_complete(found: Iterable[Iterable[AnyPath]]) -> AnyPath | None:
    """Return the newest complete checkpoint of those found in several folders; None if there is none."""
    complete = (next(filter(is_complete, paths), None) for paths in found)
    return max((path for path in complete if path is not None), key=lambda path: age_s(path) or 0.0, default=None)


def siblings(folder: AnyPath) -> list[AnyPath]:
    """Return the other checkpoints next to ``folder``, newest first, without links to any."""
    return [path for path in checkpoints_in(folder.parent) if path.name != folder.name and not path.is_symlink()]


def age_s(path: AnyPath) -> float | None:
    """Return when a path was written, in seconds since the epoch; None if it is missing."""
    try:
        if isinstance(path, Path):
            return path.stat().st_mtime
        return (path if path.is_file() else path / ROLES_FILE).modified_s()
    except (OSError, CheckpointError):
        return None


def _record(file: AnyPath) -> dict[str, Any]:
    with name_read_errors(file):
        return retried(lambda: _read_record(file), file)


def _read_record(file: AnyPath) -> dict[str, Any]:
    # crc32 is the fastest checksum of the standard library (several GB/s). The load reads the file again.
    checksum, size, buffer = 0, 0, memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return {"bytes": size, "crc32": _hex(checksum)}


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
