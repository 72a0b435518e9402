"""Rows of samples as CSV files, as Markdown, and as cells of text."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

from lightning_realloc.callbacks.loggers.sample_thumbnails import THUMBNAIL_NAMES, KeyedImages
from lightning_realloc.output_files import append_text
from lightning_realloc.remote_path import AnyPath, RemotePath

MAX_MARKDOWN_CELL_CHARACTERS = 1000
"""Longest cell in Markdown, which is shown whole; longer cells are cut."""
MAX_THUMBNAILS = 1000
"""Thumbnails next to a table, the newest; a report shows 300. Each more takes up to 12 kB."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of an iteration; all have the same columns, and there is at least one."""

    name: str
    """Name in loggers, and of files."""
    rows: tuple[Row, ...]
    step: int
    """Step that loggers count the iteration's metrics with."""
    begins_run: bool = False
    """Whether files of an earlier run are replaced."""
    conversations: tuple[Row, ...] = ()
    """Conversations of the rows as data; empty without any."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Thumbnails that cells name, by name."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.rows[0])

    @property
    def cells(self) -> list[list[str]]:
        """Cells as text, row by row."""
        return [[cell_text(row[name]) for name in self.columns] for row in self.rows]

    def append_to(self, path: AnyPath) -> None:
        """Append the rows to a CSV file; columns that its header lacks are dropped.

        Conversations go to a file next to it with the suffix ``.jsonl``, one a line, and thumbnails into a folder,
        which keeps the newest ones of the run. In an object store, which cannot append, the whole files are written
        again, in one request each, and all thumbnails are kept.

        Raises:
            OSError: if it cannot be written. Stores raise errors of other classes, too.
        """
        lines = path.parent / f"{path.name.removesuffix(path.suffix)}.jsonl"
        if self.conversations or (self.begins_run and lines.is_file()):
            self._append_conversations(lines)
        self._write_files(files_folder(path))
        appends = path.is_file() and not self.begins_run
        if isinstance(path, RemotePath):
            earlier = path.read_text("utf-8") if appends else ""
            path.write_bytes((earlier + self.to_csv(_header(io.StringIO(earlier)))).encode())
            return
        header = []
        if appends:
            with path.open(newline="", encoding="utf-8") as file:
                header = _header(file)
        append_text(path, self.to_csv(header), replaces=not appends)

    def _write_files(self, folder: AnyPath) -> None:
        if self.begins_run and folder.is_dir():
            for path in _thumbnails_in(folder):
                path.unlink()
        if self.files and not isinstance(folder, RemotePath):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.files and isinstance(folder, Path):
            newest = sorted(_thumbnails_in(folder), key=os.path.getmtime, reverse=True)
            for path in newest[MAX_THUMBNAILS:]:
                path.unlink()

    def _append_conversations(self, path: AnyPath) -> None:
        text = "".join(json.dumps(one, ensure_ascii=False, default=plain_text) + "\n" for one in self.conversations)
        appends = path.is_file() and not self.begins_run
        if isinstance(path, RemotePath):
            path.write_bytes(((path.read_text("utf-8") if appends else "") + text).encode(errors="replace"))
            return
        append_text(path, text, replaces=not appends)

    def to_csv(self, header: Sequence[str] = ()) -> str:
        """Return the rows as lines below the header of a CSV file; with a header of their own if that is empty."""
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, header or self.columns, extrasaction="ignore")
        if not header:
            writer.writeheader()
        writer.writerows(dict(zip(self.columns, row, strict=True)) for row in self.cells)
        return file.getvalue()


def files_folder(path: AnyPath) -> AnyPath:
    """Return the folder of the thumbnails that a CSV file names, next to it."""
    return path.parent / f"{path.name.removesuffix(path.suffix)}_images"


def _thumbnails_in(folder: AnyPath) -> list[Any]:
    """Return the files in a folder that have names of thumbnails."""
    return [path for path in folder.iterdir() if fnmatchcase(path.name, THUMBNAIL_NAMES)]


def markdown(rows: Sequence[Row]) -> str:
    """Return rows with the same columns as a Markdown table; long cells are cut."""
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([_markdown_cell(row[name]) for name in header] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell_text(value: object) -> str:
    """Return a value as text: numbers with six digits, None and () as "", lists and mappings as JSON."""
    if value is None or (isinstance(value, tuple) and not value):
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=plain_text)


def plain_text(value: object) -> str:
    """Return a value that JSON does not know as text; bytes and images as their number alone."""
    if isinstance(value, KeyedImages):
        return f"{len(value)} images with the key {value.key:016x}"
    return f"{len(value):,} bytes" if isinstance(value, bytes | bytearray) else str(value)


def _header(file: TextIO) -> list[str]:
    return next(csv.reader(file), [])


def _markdown_cell(value: object) -> str:
    text = " ⏎ ".join(cell_text(value).splitlines()).replace("|", "\\|")
    limit = MAX_MARKDOWN_CELL_CHARACTERS
    return text if len(text) <= limit else text[: limit - 1] + "…"
