"""An object store for tests, which keeps its objects in a local folder and can be made to fail midway.

As in S3, an object appears when its file is closed, also after an error, and there are neither folders nor renames.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from lightning_realloc.retries import attempts

PROTOCOL = "shelf"
attempts.FIRST_WAIT_S = 0.02  # this store works again when a test says so, not after a while


class ObjectStore(AbstractFileSystem):
    """Addresses are ``shelf://`` and an absolute path, below which every rank sees the same objects."""

    protocol = PROTOCOL
    cachable = False
    bytes_left: int | None = None
    """Bytes that this process may still write; None: all."""
    resets_left = 0
    """Writes of this process whose connection is lost before one succeeds."""
    reads_left: int | None = None
    """Files that this process may still open to read; None: all."""
    faults: Faults | None = None
    """Failures of this process's calls; None: none."""
    copies = True
    """Whether it copies objects by itself."""
    num_written = 0
    """Objects that this process has written."""

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the type and size of an object, or of a folder that holds one."""
        _meet_faults("info", path)
        return self._described(Path(self._strip_protocol(path)))

    def _described(self, place: Path) -> dict[str, Any]:
        if place.is_file():
            return {"name": str(place), "size": place.stat().st_size, "type": "file"}
        if any(one.is_file() for one in place.rglob("*")):
            return {"name": str(place), "size": 0, "type": "directory"}
        raise FileNotFoundError(place)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what lies in a folder."""
        _meet_faults("ls", path)
        found = [self._described(one) for one in Path(self._strip_protocol(path)).iterdir() if self._has_files(one)]
        return found if detail else [one["name"] for one in found]

    def modified(self, path: str) -> datetime:
        """Return when an object was written."""
        _meet_faults("modified", path)
        return datetime.fromtimestamp(Path(self._strip_protocol(path)).stat().st_mtime, UTC)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write an object in one request: the whole content, or the earlier one stays."""
        _take_room(len(value))
        with _Upload(Path(self._strip_protocol(path))) as upload:
            io.BytesIO.write(upload, value)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        _meet_faults("rm_file", path)
        Path(self._strip_protocol(path)).unlink()

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy an object in one request."""
        if not self.copies:
            raise NotImplementedError
        _meet_faults("cp_file", path2)
        with _Upload(Path(self._strip_protocol(path2))) as upload:
            io.BytesIO.write(upload, Path(self._strip_protocol(path1)).read_bytes())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: there are no folders."""

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Refuse, and so do `rename` and `move`, which call this."""
        raise NotImplementedError("an object store renames nothing")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        _meet_faults("open", path)
        if mode == "rb":
            if self.reads_left is not None:
                type(self).reads_left = self.reads_left - 1
                if self.reads_left < 0:
                    raise ConnectionError("the store has closed the connection")
            return Path(path).open("rb")
        return _Upload(Path(path))

    def _has_files(self, place: Path) -> bool:
        return place.is_file() or any(one.is_file() for one in place.rglob("*"))


class Faults:
    """Failures of a store, on a clock of its own, which passes while `attempts.retried` waits.

    Args:
        fails: Whether a call fails, given its name, its path and the seconds.
    """

    def __init__(self, fails: Callable[[str, str, float], bool]) -> None:
        self.fails = fails
        self.now_s = 0.0
        self.waits_s: list[float] = []
        self.num_calls = self.num_failed = 0

    def wait(self, seconds: float) -> None:
        """Let time pass, in place of `time.sleep`."""
        self.now_s += seconds
        self.waits_s.append(seconds)


def each_once() -> Faults:
    """Return faults of the first call of each name with each path."""
    seen: set[tuple[str, str]] = set()

    def fails(name: str, path: str, now_s: float) -> bool:
        is_first = (name, path) not in seen
        seen.add((name, path))
        return is_first

    return Faults(fails)


def one_in_ten(seed: int) -> Faults:
    """Return faults of a tenth of all calls."""
    rng = random.Random(seed)
    return Faults(lambda name, path, now_s: rng.random() < 0.1)


def between(start_s: float, end_s: float) -> Faults:
    """Return faults of all calls in a span of time."""
    return Faults(lambda name, path, now_s: start_s <= now_s < end_s)


def _meet_faults(name: str, path: str) -> None:
    """Count a call; raise ConnectionResetError if it fails."""
    if (faults := ObjectStore.faults) is not None:
        faults.num_calls += 1
        if faults.fails(name, path, faults.now_s):
            faults.num_failed += 1
            raise ConnectionResetError(f"the store has reset the connection in {name}")


def _take_room(num_bytes: int) -> None:
    """Count bytes that are written; raise ConnectionError if there is no room for them."""
    if ObjectStore.resets_left:
        ObjectStore.resets_left -= 1
        raise ConnectionResetError("the store has reset the connection")
    if ObjectStore.bytes_left is not None:
        ObjectStore.bytes_left -= num_bytes
        if ObjectStore.bytes_left < 0:
            raise ConnectionError("the store has closed the connection")


class _Upload(io.BytesIO):
    """An object that is being written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, content: Any) -> int:
        """Add bytes, while there is room."""
        _take_room(len(content))
        return super().write(content)

    def close(self) -> None:
        """Make the object visible, in one step."""
        if not self.closed:
            try:
                _meet_faults("close", str(self._path))
            except ConnectionResetError:
                super().close()
                raise
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(self.getvalue())
            os.replace(file.name, self._path)
            ObjectStore.num_written += 1
        super().close()


def address(path: Path) -> str:
    """Return the store's address for a local path."""
    return f"{PROTOCOL}://{path}"


def objects(folder: Path) -> Iterator[str]:
    """Yield the names of all objects below a folder."""
    return (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())


fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)
