"""Read a file with one JSON object a line as it grows; broken lines are counted, and the rest is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

T = TypeVar("T")
MAX_LINE_BYTES = 4 << 20
"""Longest line that is read; a longer one counts as broken."""
BROKEN_LINE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors of lines that are no JSON, or have other fields or values than the writer's."""
HEAD_BYTES = 200
"""Bytes at a file's beginning that are compared; the first line of a record has the time of day within them."""


class FollowedFile(Generic[T]):
    """A file of which only new lines are read.

    Args:
        path: The file; it may not exist yet.
        parse: Returns a line's content. It may raise the errors of `BROKEN_LINE`.
    """

    def __init__(self, path: Path, parse: Callable[[Mapping[str, Any]], T]) -> None:
        self._path, self._parse = path, parse
        self.items: list[T] = []
        """Content of all lines that could be read."""
        self._broken: list[int] = []
        self._offset = self._number = 0
        self._head = b""
        """First bytes of the file, by which another file at its place is recognized."""
        self._error: str | None = None
        self._has_rest = False
        """Whether there are bytes after the last end of a line."""

    def update(self) -> None:
        """Read the lines that have been added; a file that was replaced or cut is read from its beginning."""
        if self._path.exists() and not self._path.is_file():  # a device or a pipe may never end
            self._forget()
            self._error = "it is no regular file"
            return
        try:
            with self._path.open("rb") as file:
                self._error = None
                head = file.read(HEAD_BYTES)
                if not head.startswith(self._head) or file.seek(0, os.SEEK_END) < self._offset:
                    self._forget()
                self._head = head
                file.seek(self._offset)
                self._read(file)
        except OSError as error:
            self._forget()
            self._error = error.strerror or str(error)

    @property
    def problem(self) -> str | None:
        """The lines that could not be read, or why the file could not, in words; None without any."""
        if self._error is not None:
            return f"{self._path.name} cannot be read: {self._error}"
        if not self._broken:
            return None
        count, first = len(self._broken), self._broken[0]
        if count == 1:
            return f"{self._path.name} has 1 broken line, line {first}; it is left out"
        return f"{self._path.name} has {count} broken lines, the first is line {first}; they are left out"

    @property
    def cut(self) -> str | None:
        """Words on a last line without an end, which is still being written unless the run has ended; None without."""
        return f"{self._path.name} was cut in the middle of a line, which is left out" if self._has_rest else None

    def _forget(self) -> None:
        self.items, self._broken = [], []
        self._offset = self._number = 0
        self._has_rest = False
        self._head = b""

    def _read(self, file: BinaryIO) -> None:
        """Read complete lines; one without an end is still being written, and is read again the next time."""
        is_long = False
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                is_long = True
                continue
            self._number += 1
            self._offset = file.tell()
            try:
                self.items.append(self._parse(json.loads(b"" if is_long else line)))
            except BROKEN_LINE:
                self._broken.append(self._number)
            is_long = False
        self._has_rest = file.tell() > self._offset
