"""Path of a file or folder in an object store, with the methods of `pathlib.Path` that checkpoints use.

Any address that fsspec opens will do, such as ``s3://bucket/run``. Its package (``s3fs``, ``gcsfs``) reads keys and
endpoints from its own environment variables and files.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from lightning_realloc.errors import CheckpointError, ConfigError, describe_error
from lightning_realloc.retries.attempts import TRIES, retried
from lightning_realloc.retries.causes import way_out

T = TypeVar("T")

HUB_TIMEOUT_S = 5.0
"""Seconds that the hub gets to answer about a name, without ``HF_HUB_ETAG_TIMEOUT``. More wait for slower hubs, and
report lost ones later."""
_SEPARATOR = "://"


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """File or folder in an object store.

    A store has no folders of its own: a folder exists while a file lies below it. Writing one file is atomic, and files
    cannot be renamed. Errors of the store are raised as they are, most of them as OSError, after the attempts of
    `retried`.
    """

    protocol: str
    """Name of the store for fsspec, such as ``s3``."""
    path: str
    """Path in the store, such as ``bucket/run/last.ckpt``, without a slash at the end."""

    @classmethod
    def parse(cls, address: str) -> RemotePath:
        """Return the path of an address such as ``s3://bucket/run``."""
        protocol, _, path = address.partition(_SEPARATOR)
        return cls(protocol, path.rstrip("/"))

    # ---- names
    def __str__(self) -> str:
        return f"{self.protocol}{_SEPARATOR}{self.path}"

    def __truediv__(self, name: str) -> RemotePath:
        return self if name in ("", ".") else RemotePath(self.protocol, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """End of the name from its last dot."""
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> RemotePath:
        """Folder that contains this path."""
        return RemotePath(self.protocol, self.path.rpartition("/")[0])

    # ---- queries
    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Return whether there is a file."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        """Return whether files lie below this path."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def num_bytes(self) -> int:
        """Return the size of the file.

        Raises:
            FileNotFoundError: if there is no file.
        """
        return int(self._call(lambda store, path: store.info(path))["size"])

    def modified_s(self) -> float:
        """Return when the file was written, in seconds since the epoch; 0.0 if the store does not record it."""
        try:
            written: float = self._call(lambda store, path: store.modified(path)).timestamp()
        except NotImplementedError:
            return 0.0
        return written

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders in this folder."""
        own = PurePosixPath(self._store()[1])
        found = map(PurePosixPath, self._call(lambda store, path: store.ls(path, detail=False)))
        return (self / one.name for one in found if one != own)  # some stores list the folder, too

    def files(self) -> list[RemotePath]:
        """Return all files below this folder, in order; none if it does not exist."""
        own = self._store()[1]
        found = self._call(_find_files)
        return [self / str(PurePosixPath(one).relative_to(own)) for one in sorted(found)]

    def _info(self) -> dict[str, Any] | None:
        # fsspec's own `exists` takes every error for a missing file.
        try:
            info: dict[str, Any] = self._call(lambda store, path: store.info(path))
        except FileNotFoundError:
            return None
        return info

    # ---- contents
    def open(self, mode: str, buffering: int = -1) -> io.BufferedRandom:
        """Open the file in the binary mode ``rb`` or ``wb``; the store buffers as it sees fit."""
        opened: io.BufferedRandom = self._call(lambda store, path: store.open(path, mode))
        return opened

    def read_bytes(self, *, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of the file, or a part of it, in one request."""
        content: bytes = self._call(lambda store, path: store.cat_file(path, start=start, end=end))
        return content

    def read_text(self, encoding: str) -> str:
        """Return the content of the file as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes, *, attempts: int = TRIES) -> None:
        """Write the file in one request, so that readers see the earlier content or the new one."""
        store, path = self._store()
        retried(lambda: store.pipe_file(path, content), self, tries=attempts)

    def upload(self, file: Path) -> None:
        """Write the content of a local file, which may be larger than memory."""
        self._call(lambda store, path: store.put_file(str(file), path))

    def copy_from(self, other: RemotePath) -> None:
        """Write the content of another file of this store, which the store copies by itself.

        Raises:
            NotImplementedError: if it cannot.
        """
        self._call(lambda store, path: store.cp_file(_open_store(other)[1], path))

    def unlink(self) -> None:
        """Remove the file; also if an attempt that seemed to fail has removed it.

        Raises:
            FileNotFoundError: if there was none.
        """
        store, path = self._store()
        attempts = itertools.count()

        def remove() -> None:
            with suppress(FileNotFoundError) if next(attempts) else nullcontext():
                store.rm_file(path)

        retried(remove, self)

    def write_problem(self) -> str | None:
        """Return why files cannot be written to this folder, with the way out; None if they can.

        Writes a file without content and removes it.
        """
        probe = self / f".probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except Exception as error:  # stores raise errors of any class
            advice = way_out(error) or "correct the address or its access keys"
            return f"{self} cannot be written: {describe_error(error)}; {advice}"
        return None

    def remove_below(self, files: Sequence[RemotePath]) -> None:
        """Remove files below this folder, in as few requests as the store can; missing ones count as removed."""
        from fsspec.spec import AbstractFileSystem

        names = [file.path.removeprefix(self.path) for file in files]
        if not names:
            return
        try:
            if type(self._store()[0]).rm is AbstractFileSystem.rm:  # one request for each file
                raise FileNotFoundError
            self._call(lambda store, path: store.rm([f"{path}{name}" for name in names]))
        except FileNotFoundError:  # or another attempt has removed some of them
            for file in files:
                with suppress(FileNotFoundError):
                    file.unlink()

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        """Return the result of an operation of the store on this path, see `retried`."""
        store, path = self._store()
        return retried(lambda: operation(store, path), self)

    def _store(self) -> tuple[Any, str]:
        """Return the file system, without what it remembers of earlier listings, and the path in it."""
        store, path = _open_store(self)
        store.invalidate_cache()
        return store, path


AnyPath = Path | RemotePath
"""Local path, or address in an object store."""
LocalPath = TypeVar("LocalPath", bound=str | Path)


class RetriedStore:
    """File system of fsspec whose operations are tried again, see `retried`; for code that calls it directly.

    Args:
        store: The file system, or another one of this class.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = store._store if isinstance(store, RetriedStore) else store

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy is made
            raise AttributeError(name)
        value = getattr(self._store, name)
        if not callable(value):
            return value
        place = f"{self._store.protocol}{_SEPARATOR}"
        return lambda *args, **options: retried(lambda: value(*args, **options), place)


def expand_home(path: LocalPath) -> LocalPath:
    """Return a local path with the home folder in place of ``~``; names that are no paths stay as they are."""
    return type(path)(os.path.expanduser(str(path)))


def as_path(address: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return a `RemotePath` for an address with a protocol, and otherwise a local path without ``~``."""
    if isinstance(address, RemotePath):
        return address
    return RemotePath.parse(str(address)) if is_remote(address) else expand_home(Path(address))


def files_below(folder: AnyPath) -> dict[str, AnyPath]:
    """Return the name below a folder of each file -> its path, in order."""
    if isinstance(folder, RemotePath):
        return {file.path.removeprefix(f"{folder.path}/"): file for file in folder.files()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def is_path(source: str | Path) -> bool:
    """Return whether a local path, present or missing, names a model or data, and not a name on the hub.

    A name on the hub has at most one slash. Training in one line writes to ``runs/``.
    """
    text = str(source)
    begins_as_one = text.startswith((".", "/", "~", "runs/"))
    return isinstance(source, Path) or begins_as_one or text.count("/") > 1 or os.path.exists(text)


def require_files(source: str | Path, *patterns: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Refuse what no loader will find, before it looks on the hub: loaders ask a lost one for about a minute.

    Refused are a missing path, a folder that lacks a file, and a name of which the cache holds nothing while the hub
    cannot be reached. Without a connection allowed (``HF_HUB_OFFLINE``), names are left to the loader, which is fast.

    Args:
        source: A path, or a name on the hub.
        patterns: Patterns of file names; a folder needs a file of each.
        kind: Content of the repository on the hub.

    Raises:
        FileNotFoundError: for what is missing, without the path.
    """
    if not is_path(source):
        _require_hub(str(source), kind)
    elif not os.path.exists(source):
        raise FileNotFoundError(f"there is no such folder or file in {Path.cwd()}")
    for pattern in patterns if os.path.isdir(source) else ():
        if not any(Path(source).glob(pattern)):
            raise FileNotFoundError(f"the folder has no {pattern}")


@functools.lru_cache  # for names that are not refused; roles are made many times
def _require_hub(name: str, kind: str) -> None:
    """Raise FileNotFoundError for a name of which the cache holds nothing, if the hub does not answer."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    timeout_s = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else HUB_TIMEOUT_S
    if constants.HF_HUB_OFFLINE or os.path.isdir(cached) or _failed_question(name, kind, timeout_s) is None:
        return
    time.sleep(1.0)
    if (error := _failed_question(name, kind, timeout_s)) is not None:
        raise FileNotFoundError(
            f"there is no such folder in {Path.cwd()}, and the hub cannot be reached at {constants.ENDPOINT} within "
            f"{timeout_s:g} s, which HF_HUB_ETAG_TIMEOUT sets ({describe_error(error)})"
        ) from error


def _failed_question(name: str, kind: str, timeout_s: float) -> Exception | None:
    """Return the error of a question about a name, without further tries; None if the hub answers."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type=kind), timeout=timeout_s)
    except (HfHubHTTPError, ValueError):  # an answer, or no name that the hub may have; the loader says which
        return None
    except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
        return error
    return None


def is_remote(address: object) -> bool:
    """Return whether a path is an address with a protocol, such as ``s3://bucket/run``."""
    return _SEPARATOR in str(address)


def local_path(path: str | os.PathLike[str], setting: str) -> Path:
    """Return a local path without ``~``, for files that grow or that other packages write.

    Args:
        path: A path that must not be an address.
        setting: Name of the setting that gives it, for the error.

    Raises:
        ConfigError: for an address.
    """
    if is_remote(path):
        raise ConfigError(
            f"{setting}: {str(path)!r} is an address, but this file is written on a disk alone; give a folder on a disk"
        )
    return expand_home(Path(path))


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return a folder for small files of a run: the folder itself, or the working directory for an address."""
    return Path.cwd() if is_remote(path) else expand_home(Path(path))


def _find_files(store: Any, path: str) -> list[str]:
    """Return all files below a path. fsspec's own search takes a folder that it failed to list for an empty one."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    is_async = isinstance(store, AsyncFileSystem)
    own = type(store)._find if is_async else type(store).find
    is_own = own is (AsyncFileSystem._find if is_async else AbstractFileSystem.find)
    try:
        found: list[str] = store.find(path, on_error="raise") if is_own else store.find(path)
    except FileNotFoundError:
        return []
    return found


def _open_store(place: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it.

    Raises:
        CheckpointError: for an unknown protocol, or one whose package is missing.
    """
    from fsspec.core import url_to_fs

    try:
        store, path = url_to_fs(str(place))
    except (ImportError, ValueError) as error:  # an ImportError names the package to install
        raise CheckpointError(
            f"{place} cannot be opened: {error}; install its package or correct the address"
        ) from error
    return store, path
