"""Batches of a data stream of unknown length: block-wise shuffling, reading ahead, and exact resumption.

Every rank reads the whole stream and makes the same global batches. Rows are read and shuffled in blocks, so a few
numbers describe the position, and a resumed run reads forward to its block. A shuffle buffer whose rows stay for any
time would have to be part of every checkpoint.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

import torch

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.rows import Row, RowSource, check_same_columns, table_rows
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.errors import CheckpointError, DataError

T = TypeVar("T")

_POLL_INTERVAL_S = 0.1
"""Seconds between a full reader's checks that its items are still wanted; raising it delays the thread's end."""
_JOIN_TIMEOUT_S = 5.0
"""Seconds to wait for a stopped reader to finish the item that it is reading."""

Tabulate = Callable[[Sequence[Row]], Samples | None]
"""Convert the rows of a block that fit to samples with ids 0, 1, ...; None if none of them fits."""


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
                "every rank reads the whole stream, but this one was divided among ranks by split_dataset_by_node(); "
                "remove that call: batches are divided among the ranks later, by length"
            )
        return cls(str(source) if isinstance(source, DatasetSource) else "the stream", table)

    def rows(self, epoch: int, begin: int) -> Iterator[Row]:
        """Yield the rows from number ``begin`` on; the rows before it are read and skipped.

        Raises:
            DataError: for rows that cannot be read, for different columns, and if the stream ends before ``begin``.
        """
        if hasattr(self.table, "set_epoch"):
            self.table.set_epoch(epoch)  # datasets reorders its shuffled rows in every epoch
        last = -1
        for last, row in enumerate(self._read()):
            if last >= begin:
                yield row
        if last < begin > 0:
            raise DataError(
                f"{self.name} ended after {last + 1} rows, but the resumed run was at row {begin}; give the same "
                f"stream, or start from the weights alone"
            )

    def _read(self) -> Iterator[Row]:
        first: Row | None = None
        number = 0
        try:
            for row in table_rows(self.table, self.name):
                first = first or row
                check_same_columns(row, first)
                number += 1
                yield row
        except DataError:
            raise
        except Exception as error:  # from any package that fetches the data
            raise DataError(
                f"row {number} of {self.name} cannot be read: {type(error).__name__}({error}); a run resumed from a "
                f"checkpoint continues after the rows it has seen"
            ) from error


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position of a run in a stream."""

    epoch: int = 0
    """Number of completed passes over the stream."""
    block: int = 0
    """Index of the first row of the block in which the next batch begins."""
    position: int = 0
    """Number of this block's rows that were handed out."""
    num_before: int = 0
    """Number of samples in earlier blocks, over all epochs; ids in this block start from it."""


class StreamLoader:
    """Training batches of a stream, reordered in every epoch.

    A sample's id is the number of samples before it over all epochs, unique over the run and independent of ranks.
    Lightning's epoch is ``epoch_batches`` long, wherever in the stream it begins.

    Args:
        stream: Rows to read.
        tabulate: Converts a block of rows to samples.
        batch_size: Rows per batch over all ranks together.
        shuffle_buffer: Rows of a block. With ``shuffle`` they are reordered within their block, by the seed, the epoch
            and the block alone.
        drop_last: Whether to drop a last batch that is smaller than the others.
        group_size: Number of adjacent samples made from one row; a batch holds whole rows.
        epoch_batches: Batches after which an iteration over the loader ends; the next one continues from there. None
            never ends.
        reads_ahead: Whether a thread reads the rows of the next block in advance; the batches are the same.

    Raises:
        DataError: for settings that cannot be used, and while reading, for invalid rows.
    """

    def __init__(
        self,
        stream: RowStream,
        tabulate: Tabulate,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 1000,
        drop_last: bool = False,
        group_size: int = 1,
        epoch_batches: int | None = None,
        reads_ahead: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("shuffle_buffer", shuffle_buffer)):
            if value < 1:
                raise DataError(f"{name}={value} must be at least 1")
        self.stream = stream
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.block_rows = shuffle_buffer if shuffle else batch_size
        self.drop_last = drop_last
        self.group_size = group_size
        self.epoch_batches = sys.maxsize if epoch_batches is None else epoch_batches
        self.reads_ahead = reads_ahead
        self._tabulate = tabulate
        self._place = StreamPosition()
        self._batches: Generator[tuple[Samples, StreamPosition], None, None] | None = None

    def __len__(self) -> int:
        return self.epoch_batches

    def check(self) -> None:
        """Read and discard one block, to find errors that affect all rows before the first step.

        Raises:
            DataError: for such an error, and for a stream without rows.
        """
        rows = self.stream.rows(0, 0)
        block = tuple(islice(rows, self.block_rows))
        if not block:
            raise DataError(f"{self.stream.name} holds no rows; it needs at least one")
        self._tabulate(block)

    def __iter__(self) -> Iterator[Samples]:
        # A generator: Lightning makes an iterator before it resumes, which must not change the state.
        for _ in range(self.epoch_batches):
            if self._batches is None:
                self._batches = self._batches_from(self._place)
            batch, place = next(self._batches)
            # Counted before the yield, so that a checkpoint written during this batch's training includes it.
            self._place = place
            yield batch

    def close(self) -> None:
        """Stop reading; the next iteration continues at the same position."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run and the settings that it depends on."""
        return {"place": asdict(self._place), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was handed out last.

        Raises:
            CheckpointError: if the checkpoint was written with another order.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming needs the same stream in the same order; the checkpoint has {name}={state.get(name)} "
                    f"and this run {name}={value}, set it back or start from the weights alone"
                )
        self.close()
        self._place = StreamPosition(**state["place"])

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "block_rows": self.block_rows,
            "drop_last": self.drop_last,
        }

    def _batches_from(self, place: StreamPosition) -> Generator[tuple[Samples, StreamPosition], None, None]:
        """Yield batches without end, each with the position after it."""
        while True:
            is_whole_pass, has_batches = place.block == place.position == 0, False
            cutter = _BatchCutter(self.batch_size, self.group_size)
            num_samples = place.num_before
            for begin, table in self._blocks(place):
                for batch, position in cutter.cut(table, place.position if begin.block == place.block else 0):
                    has_batches = True
                    yield batch, StreamPosition(begin.epoch, begin.block, position, begin.num_before)
                num_samples = begin.num_before + len(table)
            place = StreamPosition(place.epoch + 1, 0, 0, num_samples)
            if not self.drop_last and (rest := cutter.rest()) is not None:
                has_batches = True
                yield rest, place
            if is_whole_pass and not has_batches:
                raise DataError(
                    f"{self.stream.name} has fewer usable rows than batch_size={self.batch_size} needs, "
                    f"{num_samples // self.group_size}; lower batch_size, add rows or set drop_last=False"
                )

    def _blocks(self, place: StreamPosition) -> Iterator[tuple[StreamPosition, Samples]]:
        """Yield each block's position and its samples in batch order."""
        begin, num_before = place.block, place.num_before
        rows = self._rows(place)
        while block := tuple(islice(rows, self.block_rows)):
            table = self._tabulate(block)
            at = StreamPosition(place.epoch, begin, 0, num_before)
            begin += len(block)
            if table is not None:
                num_before += len(table)
                yield at, self._ordered(table, at)

    def _rows(self, place: StreamPosition) -> Iterator[Row]:
        def rows() -> Iterator[Row]:
            return self.stream.rows(place.epoch, place.block)

        return read_ahead(rows, self.block_rows) if self.reads_ahead else rows()

    def _ordered(self, table: Samples, at: StreamPosition) -> Samples:
        num_rows = len(table) // self.group_size
        order = torch.arange(num_rows)
        if self.shuffle:
            digest = hashlib.sha256(f"{self.seed},{at.epoch},{at.block}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            order = torch.randperm(num_rows, generator=generator)
        rows = (order[:, None] * self.group_size + torch.arange(self.group_size)).flatten().tolist()
        chosen = table.select(rows)
        return chosen.with_ids(chosen.ids + at.num_before)


class _BatchCutter:
    """Cut batches from consecutive blocks; the rest of one block begins the next block's first batch."""

    def __init__(self, batch_size: int, group_size: int) -> None:
        self._size = batch_size * group_size
        self._group_size = group_size
        self._left: list[Samples] = []

    def cut(self, table: Samples, position: int) -> Iterator[tuple[Samples, int]]:
        """Yield batches after the first ``position`` rows, each with the number of rows handed out so far."""
        at = position * self._group_size
        while at < len(table):
            end = min(at + self._size - sum(map(len, self._left)), len(table))
            self._left.append(table.select(range(at, end)))
            at = end
            if sum(map(len, self._left)) == self._size:
                batch, self._left = Samples.concatenate(self._left), []
                yield batch, at // self._group_size

    def rest(self) -> Samples | None:
        """Return the remaining samples, fewer than a batch; None if there are none."""
        return Samples.concatenate(self._left) if self._left else None


def read_ahead(items: Callable[[], Iterator[T]], num_ahead: int) -> Generator[T]:
    """Yield the items of an iterator while a thread reads up to ``num_ahead`` items in advance.

    The thread alone makes and reads the iterator. Its exception is raised here in place of the next item. The thread
    ends with the iterator, or when this generator is closed.
    """
    read: Queue[tuple[T] | BaseException | None] = Queue(num_ahead)
    is_stopped = Event()
    thread = Thread(target=_read, args=(items, read, is_stopped), daemon=True, name="read-ahead")
    thread.start()
    try:
        while (item := read.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        is_stopped.set()
        thread.join(_JOIN_TIMEOUT_S)


def _read(items: Callable[[], Iterator[T]], read: Queue[tuple[T] | BaseException | None], is_stopped: Event) -> None:
    try:
        for item in items():
            if not _put((item,), read, is_stopped):
                return
        _put(None, read, is_stopped)
    except BaseException as error:
        _put(error, read, is_stopped)


def _put(
    item: tuple[T] | BaseException | None, read: Queue[tuple[T] | BaseException | None], is_stopped: Event
) -> bool:
    """Wait until there is room for an item; return False if the reader was stopped meanwhile."""
    while not is_stopped.is_set():
        with suppress(Full):
            read.put(item, timeout=_POLL_INTERVAL_S)
            return True
    return False
