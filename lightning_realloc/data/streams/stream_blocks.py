"""Read a stream block by block: every rank reads some parts of it, and gets the rows of all.

Storage is read once by all ranks together, instead of once by each. The order of a block's rows is the same on any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from lightning_realloc.data.rows import Row, check_same_columns
from lightning_realloc.data.streams.row_streams import Chunk, Mark, RowStream
from lightning_realloc.errors import DataError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.messages.plain_data import encode_value

T = TypeVar("T")

_JOIN_TIMEOUT_S = 5.0
"""Seconds to wait for a stopped reader to finish the item that it is reading."""
_Chunks = Mapping[int, Chunk]
"""Part of the stream -> its rows in one block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are shuffled together."""

    rows: tuple[Row, ...]
    """The rows: the first one of each part, the second one of each part, and so on."""
    marks: tuple[Mark, ...]
    """Position in each part after them."""


class BlockReader:
    """Reads the blocks of a stream, on one rank of several.

    Args:
        stream: Rows to read.
        num_parts: Parts that are read in turn; with 1, every rank reads the whole stream.
        block_rows: Rows of a block, at least; a block takes as many rows of each part, and has fewer once one ends.
        rank: This rank.
        num_ranks: Ranks that divide the parts among them.
        reads_ahead: Whether a thread reads the next block in advance.
    """

    def __init__(
        self, stream: RowStream, num_parts: int, *, block_rows: int, rank: int, num_ranks: int, reads_ahead: bool
    ) -> None:
        self._stream = stream
        self._num_parts = num_parts
        self._size = -(-block_rows // num_parts)
        self._is_divided = num_parts > 1 and num_ranks > 1
        self._mine = range(rank, num_parts, num_ranks) if self._is_divided else range(num_parts)
        self._reads_ahead = reads_ahead

    def blocks(self, epoch: int, marks: tuple[Mark, ...]) -> Generator[Block]:
        """Yield the blocks of an epoch from a position on. Collective over all ranks if they divide the parts.

        Args:
            epoch: Number of passes over the stream before this one.
            marks: Position in each part; () for the beginning.

        Raises:
            DataError: on every rank, for rows that one of them cannot read.
        """
        marks = marks or (Mark(),) * self._num_parts

        def read() -> Iterator[_Chunks]:
            return self._chunks(epoch, marks)

        mine = read_ahead(read) if self._reads_ahead else read()
        while True:
            chunks = self._exchange(mine)
            marks = tuple(chunks[part].end if part in chunks else mark for part, mark in enumerate(marks))
            rows = _in_turn([chunks[part].rows for part in sorted(chunks)])
            if not rows:
                return
            yield Block(rows, marks)

    def _chunks(self, epoch: int, marks: tuple[Mark, ...]) -> Iterator[_Chunks]:
        """Yield the rows of this rank's parts, block by block."""
        opened = {
            part: self._stream.chunks(epoch, marks[part], self._size, part=part, num_parts=self._num_parts)
            for part in self._mine
        }
        while opened:
            found = {part: next(chunks) for part, chunks in opened.items()}
            opened = {part: chunks for part, chunks in opened.items() if len(found[part].rows) == self._size}
            yield found

    def _exchange(self, chunks: Iterator[_Chunks]) -> _Chunks:
        """Return the next rows of all parts; {} once all have ended."""
        if not self._is_divided:
            return next(chunks, {})
        mine: _Chunks | DataError
        try:
            mine = next(chunks, {})
            _check_plain(row for chunk in mine.values() for row in chunk.rows)
        except DataError as error:  # raised below on every rank, since the others wait for this one's rows
            mine = error
        everyone: list[_Chunks | DataError] = gather_objects(mine)
        merged: dict[int, Chunk] = {}
        for theirs in everyone:
            if isinstance(theirs, DataError):
                raise theirs
            merged |= theirs
        return merged


def _check_plain(rows: Iterable[Row]) -> None:
    """Raise DataError, naming row and column, for a value that ranks cannot exchange."""
    for row in rows:
        for column, value in row.values.items():
            if isinstance(value, str | int | float):
                continue
            try:
                encode_value(value)
            except DataError as error:
                raise DataError(
                    f"column {column!r} of {row.place} cannot be sent to the other ranks, among which the shards of "
                    f"this stream are divided: {error}. Remove the column with remove_columns(), or map() it"
                ) from error


def _in_turn(parts: list[tuple[Row, ...]]) -> tuple[Row, ...]:
    """Return the first row of each part, then the second one of each, and so on.

    Raises:
        DataError: for parts with different columns.
    """
    filled = [rows for rows in parts if rows]
    for rows in filled:
        check_same_columns(rows[0], filled[0][0])
    longest = max(map(len, filled), default=0)
    return tuple(rows[at] for at in range(longest) for rows in filled if at < len(rows))


def read_ahead(items: Callable[[], Iterator[T]]) -> Generator[T]:
    """Yield the items of an iterator while a thread reads the one after each.

    The thread alone makes and reads the iterator. Its exception is raised here in place of the next item. The thread
    ends with the iterator, or when this generator is closed.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()
    read: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    thread = Thread(target=_read, args=(items, wanted, read), daemon=True, name="read-ahead")
    thread.start()
    try:
        wanted.put(True)
        while (item := read.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            wanted.put(True)
            yield item[0]
    finally:
        wanted.put(False)
        thread.join(_JOIN_TIMEOUT_S)


def _read(
    items: Callable[[], Iterator[T]],
    wanted: SimpleQueue[bool],
    read: SimpleQueue[tuple[T] | BaseException | None],
) -> None:
    """Read an item for every True, until False; None follows the last item."""
    try:
        rest = ((item,) for item in items())
        while wanted.get():
            read.put(next(rest, None))
    except BaseException as error:
        read.put(error)
