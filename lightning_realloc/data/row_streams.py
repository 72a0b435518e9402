"""Read the rows of a stream in a fixed number of parts, each of them from any position on.

The parts of a data set are the shards of ``datasets``, dealt out in turn. Their number depends on the data set alone,
so the order of all rows is the same on any number of ranks, each of which reads some of the parts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_realloc.data.rows import Row, RowSource, check_same_columns, table_rows
from lightning_realloc.data.sources import DatasetSource, is_stream
from lightning_realloc.errors import DataError

MAX_PARTS = 16
"""Parts of a stream, if it has as many shards; raising it divides the reading among more ranks, and opens more files
on each of a few ranks."""
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
"""Class of ``datasets`` that forgets the rows of its buffer when a state is loaded."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Position in one part of a stream."""

    rows: int = 0
    """Rows of the part before it."""
    state: Mapping[str, Any] | None = None
    """State of the data set there; None reads and skips the rows before it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one part."""

    rows: tuple[Row, ...]
    """Rows; fewer than requested at the end of the part."""
    end: Mark
    """Position after them."""


@dataclass(frozen=True, slots=True, eq=False)
class RowStream:
    """Rows that are read as they are needed, any number of times."""

    name: str
    """Name for error messages."""
    table: Iterable[Mapping[str, Any]]
    """Iterable of dictionaries, such as ``datasets.IterableDataset``."""

    @classmethod
    def open(cls, source: RowSource) -> RowStream:
        """Open a source as a stream of rows.

        Raises:
            DataError: for a source that cannot be opened, or a stream that is already divided among ranks.
        """
        table: Any = source.open() if isinstance(source, DatasetSource) else source
        if getattr(table, "_distributed", None) is not None:
            raise DataError(
                "the shards of a stream are divided among ranks by the data module, but this one was divided among "
                "ranks by split_dataset_by_node(); remove that call"
            )
        return cls(str(source) if isinstance(source, DatasetSource) else "the stream", table)

    @property
    def num_parts(self) -> int:
        """Number of parts that can be read independently of each other: 1 for iterables other than ``datasets``."""
        if not is_stream(self.table):
            return 1
        table: Any = self.table
        num_shards: int = table.num_shards
        return max(1, min(MAX_PARTS, num_shards))

    def chunks(self, epoch: int, begin: Mark, size: int, *, part: int = 0, num_parts: int = 1) -> Iterator[Chunk]:
        """Yield the rows of a part from a position on, ``size`` at a time, the last ones in a chunk with fewer.

        Raises:
            DataError: for rows that cannot be read, for different columns, and if the part ends before ``begin``.
        """
        table = self._open_part(epoch, part, num_parts)
        keeps_place = _keeps_its_place(table)
        if begin.state is not None and keeps_place:
            table.load_state_dict(dict(begin.state))
            rows = self._rows(table, self._name_of(part, num_parts), begin.rows)
        else:
            rows = self._rows(table, self._name_of(part, num_parts), 0)
            rows = self._skipped(rows, begin.rows, may_end=num_parts > 1)
        at = begin.rows
        while True:
            chunk = tuple(islice(rows, size))
            at += len(chunk)
            yield Chunk(chunk, Mark(at, table.state_dict() if keeps_place else None))
            if len(chunk) < size:
                return

    def rows(self, epoch: int, begin: int) -> Iterator[Row]:
        """Yield the rows from number ``begin`` on in the stream's own order; the rows before it are skipped."""
        for chunk in self.chunks(epoch, Mark(begin), 1):
            yield from chunk.rows

    def _open_part(self, epoch: int, part: int, num_parts: int) -> Any:
        table: Any = self.table
        if num_parts > 1:
            table = table.shard(num_parts, part, contiguous=False)
        elif is_stream(table):
            table = copy.copy(table)  # a state that is loaded would apply to every later reading of the epoch
        if hasattr(table, "set_epoch"):
            table.set_epoch(epoch)  # datasets reorders its shuffled rows in every epoch
        return table

    def _name_of(self, part: int, num_parts: int) -> str:
        return self.name if num_parts == 1 else f"part {part + 1} of {num_parts} of {self.name}"

    def _skipped(self, rows: Iterator[Row], count: int, *, may_end: bool) -> Iterator[Row]:
        """Yield the rows after the first ``count``.

        Raises:
            DataError: if there are fewer or, unless ``may_end``, no others.
        """
        num_skipped = sum(1 for _ in islice(rows, count))
        first = next(rows, None)
        if first is None and count and not (may_end and num_skipped == count):
            raise DataError(
                f"{self.name} ended after {num_skipped} rows, but the resumed run was at row {count}; give the same "
                f"stream, or start from the weights alone"
            )
        if first is not None:
            yield first
            yield from rows

    def _rows(self, table: Iterable[Mapping[str, Any]], name: str, begin: int) -> Iterator[Row]:
        first: Row | None = None
        number = begin
        try:
            for row in table_rows(table, name, first=begin):
                first = first or row
                check_same_columns(row, first)
                number += 1
                yield row
        except DataError:
            raise
        except Exception as error:  # from any package that fetches the data
            raise DataError(
                f"row {number} of {name} cannot be read: {type(error).__name__}({error}); a run resumed from a "
                f"checkpoint continues after the rows it has seen"
            ) from error


def _keeps_its_place(table: Any) -> bool:
    """Return whether a data set continues after exactly the rows before a state that it returned."""
    return is_stream(table) and hasattr(table, "load_state_dict") and not _has_shuffle_buffer(table._ex_iterable)


def _has_shuffle_buffer(examples: Any) -> bool:
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return type(examples).__name__ == _SHUFFLE_BUFFER or any(_has_shuffle_buffer(one) for one in inner if one)
