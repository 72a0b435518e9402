"""Read the rows of a stream in a fixed number of parts, each of them from any position on.

The parts of a data set are the shards of ``datasets``, dealt out in turn. Their number depends on the data set alone,
so the order of all rows is the same on any number of ranks, each of which reads some of the parts. All parts together
hold the rows that the data set itself yields: a data set whose rows depend on the shards before them is one part.
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
_COUNTING = ("SkipExamplesIterable", "TakeExamplesIterable")
"""Classes of ``datasets`` that select rows by their number, which they divide by the number of shards."""
_KEEPS_ALL = "all_exhausted_without_replacement"
"""Strategy of ``datasets`` that interleaves all rows of all data sets once; others drop or repeat some."""


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
        if any(step.num_shards > 1 and _needs_all_shards(step) for step in _steps(table)):
            return 1
        num_shards: int = table.num_shards
        return max(1, min(MAX_PARTS, num_shards))

    @property
    def is_shuffled(self) -> bool:
        """Whether ``datasets`` shuffles the rows, in every epoch in another order."""
        return is_stream(self.table) and any(map(_is_shuffle_buffer, _steps(self.table)))

    def chunks(self, epoch: int, begin: Mark, size: int, *, part: int = 0, num_parts: int = 1) -> Iterator[Chunk]:
        """Yield the rows of a part from a position on, ``size`` at a time, the last ones in a chunk with fewer.

        Raises:
            DataError: for rows that cannot be read, for different columns, and if the part ends before ``begin``.
        """
        table = self._open_part(epoch, part, num_parts)
        keeps_place = _keeps_its_place(table)
        if begin.state is not None and keeps_place and begin.state["epoch"] == table.epoch:
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
            table = copy.copy(table)
            table.__dict__ = dict(table.__dict__)  # else a state that is loaded applies to the original as well
        if hasattr(table, "set_epoch"):  # datasets reorders shards and shuffled rows in every epoch
            table.set_epoch(0 if is_stream(table) and any(map(_needs_its_order, _steps(table))) else epoch)
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
    return is_stream(table) and hasattr(table, "load_state_dict") and not any(map(_is_shuffle_buffer, _steps(table)))


def _steps(table: Any) -> Iterator[Any]:
    """Yield the steps of ``datasets`` that make the rows of a data set, each before those that it reads from."""
    waiting = [table._ex_iterable if hasattr(table, "_ex_iterable") else table]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", ())


def _is_shuffle_buffer(step: Any) -> bool:
    return type(step).__name__ == _SHUFFLE_BUFFER


def _counts_rows(step: Any) -> bool:
    """Return whether the step selects or changes a row by the number of rows before it."""
    return type(step).__name__ in _COUNTING or getattr(step, "with_indices", False)


def _needs_all_shards(step: Any) -> bool:
    """Return whether the step yields other rows of all shards than of each shard alone."""
    drops_rows = getattr(step, "stopping_strategy", _KEEPS_ALL) != _KEEPS_ALL
    drops_rest = getattr(step, "drop_last_batch", False)
    takes_all_rows = getattr(step, "batched", False) and (step.batch_size or 0) < 1
    return _counts_rows(step) or drops_rows or drops_rest or takes_all_rows


def _needs_its_order(step: Any) -> bool:
    """Return whether the step would yield other rows if ``datasets`` shuffled those that it reads."""
    return _counts_rows(step) and (step.num_shards > 1 or any(hasattr(one, "generator") for one in _steps(step)))
