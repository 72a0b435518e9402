"""In which order do samples come of which nobody knows how many there are? Batches of a stream, and where we stopped.

Every rank reads the whole stream and makes the same global batches of it, as of a table. It is read in blocks, and
shuffled within them: where a run stands is then a few numbers, and one that is resumed reads its way back to the
block it was in. A buffer whose rows stay any time would have to be part of every checkpoint.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.read_ahead import read_ahead
from lightning_realloc.data.rows import Row, RowSource, refuse_other_columns, table_rows
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.errors import CheckpointError, DataError

Tabulate = Callable[[Sequence[Row]], Samples | None]
"""Makes samples with ids 0, 1, ... of the rows of a block that fit; None where not one of them does."""


@dataclass(frozen=True, slots=True, eq=False)
class RowStream:
    """Rows that are read as they are needed, any number of times over."""

    name: str
    """For error messages."""
    table: Iterable[Mapping[str, Any]]

    @classmethod
    def open(cls, source: RowSource) -> RowStream:
        """Return a source's rows.

        Raises:
            DataError: for what cannot be opened, and for rows that are divided among ranks.
        """
        table: Any = source.open() if isinstance(source, DatasetSource) else source
        if getattr(table, "_distributed", None) is not None:
            raise DataError(
                "every rank reads the whole stream, and this one was given to ranks by split_dataset_by_node(); leave "
                "that out: batches are dealt out to the ranks later, by length"
            )
        return cls(str(source) if isinstance(source, DatasetSource) else "the stream", table)

    def rows(self, epoch: int, begin: int) -> Iterator[Row]:
        """Yield the rows from number ``begin`` on; those before it are read, too.

        Raises:
            DataError: for what cannot be read, for columns that other rows do not have, and where there is no such row.
        """
        if hasattr(self.table, "set_epoch"):
            self.table.set_epoch(epoch)  # what datasets shuffles comes in another order in every epoch
        last = -1
        for last, row in enumerate(self._read()):
            if last >= begin:
                yield row
        if last < begin > 0:
            raise DataError(
                f"{self.name} ended after {last + 1} rows, and the run that is resumed was at row {begin}; give the "
                f"same stream, or start from the weights alone"
            )

    def _read(self) -> Iterator[Row]:
        first: Row | None = None
        number = 0
        try:
            for row in table_rows(self.table, self.name):
                first = first or row
                refuse_other_columns(row, first)
                number += 1
                yield row
        except DataError:
            raise
        except Exception as error:  # of any of the packages that may fetch it
            raise DataError(
                f"row {number} of {self.name} cannot be read: {type(error).__name__}({error}); a run that is resumed "
                f"from a checkpoint goes on behind the rows it has seen"
            ) from error


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands in a stream."""

    epoch: int = 0
    """How many times the stream was read to its end."""
    block: int = 0
    """The row of the stream with which the block begins that the next batch begins in."""
    position: int = 0
    """How many of this block's rows were handed out."""
    num_before: int = 0
    """Samples that earlier blocks held, in all epochs: the ids of this one's count on from here."""


class StreamLoader:
    """Training batches of a stream, epoch after epoch, each in another order.

    A sample's id counts the samples before it, over all epochs: unique over the run, and the same wherever the sample
    goes. What Lightning calls an epoch is ``epoch_batches`` long, wherever in the stream it begins.

    Args:
        stream: The rows.
        tabulate: Makes samples of a block of rows.
        batch_size: Rows per batch over all ranks together.
        shuffle_buffer: Rows of a block. With ``shuffle`` they come in another order, by the seed, the epoch and the
            block alone; they never leave their block.
        drop_last: Whether to leave out what remains at a stream's end and is less than a batch.
        group_size: Samples that a row becomes, next to each other; a batch holds whole rows.
        epoch_batches: Batches after which an iteration over the loader ends, and the next one goes on; None: never.
        reads_ahead: Whether a thread reads the rows of the next block meanwhile. What is drawn from it stays the same.

    Raises:
        DataError: for settings that cannot be used; while it is read, for anything wrong with the rows.
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
        self._place = Place()
        self._batches: Generator[tuple[Samples, Place], None, None] | None = None

    def __len__(self) -> int:
        return self.epoch_batches

    def check(self) -> None:
        """Read a block and forget it, so that what is wrong with all rows is found before the first step.

        Raises:
            DataError: for that, and for a stream without rows.
        """
        rows = self.stream.rows(0, 0)
        block = tuple(islice(rows, self.block_rows))
        if not block:
            raise DataError(f"{self.stream.name} holds no rows; it needs at least one")
        self._tabulate(block)

    def __iter__(self) -> Iterator[Samples]:
        # A generator, so an iterator that nobody draws from, as Lightning makes one before it resumes, changes nothing.
        for _ in range(self.epoch_batches):
            if self._batches is None:
                self._batches = self._batches_from(self._place)
            batch, place = next(self._batches)
            # Counted before it is handed out: a checkpoint written while the batch is trained on has it behind it.
            self._place = place
            yield batch

    def close(self) -> None:
        """Read no further; who draws again goes on at the same place."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run, and what it depends on."""
        return {"place": asdict(self._place), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was handed out last.

        Raises:
            CheckpointError: when the checkpoint is of another order.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming needs the same stream in the same order; the checkpoint has {name}={state.get(name)} "
                    f"and this run {name}={value}, set it back or start from the weights alone"
                )
        self.close()
        self._place = Place(**state["place"])

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "block_rows": self.block_rows,
            "drop_last": self.drop_last,
        }

    def _batches_from(self, place: Place) -> Generator[tuple[Samples, Place], None, None]:
        """Yield batches without end, each with the place behind it."""
        while True:
            is_whole, found = place.block == place.position == 0, False
            pieces = _Pieces(self.batch_size, self.group_size)
            behind = place.num_before
            for begin, table in self._blocks(place):
                for batch, position in pieces.cut(table, place.position if begin.block == place.block else 0):
                    found = True
                    yield batch, Place(begin.epoch, begin.block, position, begin.num_before)
                behind = begin.num_before + len(table)
            place = Place(place.epoch + 1, 0, 0, behind)
            if not self.drop_last and (rest := pieces.rest()) is not None:
                found = True
                yield rest, place
            if is_whole and not found:
                raise DataError(
                    f"{self.stream.name} has fewer usable rows than batch_size={self.batch_size} needs, "
                    f"{behind // self.group_size}; lower batch_size, add rows or set drop_last=False"
                )

    def _blocks(self, place: Place) -> Iterator[tuple[Place, Samples]]:
        """Yield where each block begins, and its samples in the order in which they are handed out."""
        begin, num_before = place.block, place.num_before
        rows = self._rows(place)
        while block := tuple(islice(rows, self.block_rows)):
            table = self._tabulate(block)
            at = Place(place.epoch, begin, 0, num_before)
            begin += len(block)
            if table is not None:
                num_before += len(table)
                yield at, self._ordered(table, at)

    def _rows(self, place: Place) -> Iterator[Row]:
        def rows() -> Iterator[Row]:
            return self.stream.rows(place.epoch, place.block)

        return read_ahead(rows, self.block_rows) if self.reads_ahead else rows()

    def _ordered(self, table: Samples, at: Place) -> Samples:
        num_rows = len(table) // self.group_size
        order = torch.arange(num_rows)
        if self.shuffle:
            digest = hashlib.sha256(f"{self.seed},{at.epoch},{at.block}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            order = torch.randperm(num_rows, generator=generator)
        rows = (order[:, None] * self.group_size + torch.arange(self.group_size)).flatten().tolist()
        chosen = table.select(rows)
        return chosen.with_ids(chosen.ids + at.num_before)


class _Pieces:
    """Cuts batches out of one block after the other; what is left of one begins the next block's first batch."""

    def __init__(self, batch_size: int, group_size: int) -> None:
        self._size = batch_size * group_size
        self._group_size = group_size
        self._left: list[Samples] = []

    def cut(self, table: Samples, position: int) -> Iterator[tuple[Samples, int]]:
        """Yield batches, each with the rows of ``table`` that were handed out by then; the first ones were before."""
        at = position * self._group_size
        while at < len(table):
            end = min(at + self._size - sum(map(len, self._left)), len(table))
            self._left.append(table.select(range(at, end)))
            at = end
            if sum(map(len, self._left)) == self._size:
                batch, self._left = Samples.concatenate(self._left), []
                yield batch, at // self._group_size

    def rest(self) -> Samples | None:
        """Return what is less than a batch; None where nothing is left."""
        return Samples.concatenate(self._left) if self._left else None
