"""Files of an object store for torch's distributed checkpoint, with the size and checksum of each one written.

Torch's own class for fsspec renames a file, and its errors leave a partial file under the final name.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_realloc.remote_path import RemotePath, is_remote


class RemoteFiles(FileSystem):
    """Opens the files of one checkpoint, by their addresses."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        """Name of each file that was written -> its size and checksum."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        place = RemotePath.parse(str(path))
        with place.open(mode) as stream:
            if mode == "rb":
                yield stream
                return
            counted = _CountedStream(stream)
            try:
                yield counted
            except RuntimeError as error:  # torch raises one of its own when a write fails
                raise (counted.problem or error) from error
        self.records[place.name] = counted.record()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copy a small file to its final name: a store has no renames."""
        old, new = RemotePath.parse(str(path)), RemotePath.parse(str(new_path))
        new.write_bytes(old.read_bytes())
        old.unlink()
        self.records[new.name] = self.records.pop(old.name)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: a folder exists while a file lies below it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_remote(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return RemotePath.parse(str(path)).exists()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        RemotePath.parse(str(path)).unlink()


class _CountedStream:
    """Stream that passes bytes on to another one, and keeps their number and checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._num_bytes = 0
        self._checksum = 0
        self.problem: Exception | None = None
        """Error of the write that failed; None before."""

    def write(self, content: bytes | memoryview) -> int:
        """Write all of the content."""
        view = memoryview(content).cast("B")
        try:
            self._stream.write(view)
        except Exception as error:
            self.problem = error
            raise
        self._checksum = zlib.crc32(view, self._checksum)
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: a store gets a file when it is closed."""

    def close(self) -> None:
        """Do nothing: the stream is closed where it was opened."""

    def record(self) -> dict[str, Any]:
        """Return size and checksum, as `checkpoint_files.file_records` does."""
        return {"bytes": self._num_bytes, "crc32": f"{self._checksum:08x}"}
