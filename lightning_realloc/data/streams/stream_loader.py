"""Batches of a data stream of unknown length: block-wise shuffling, reading ahead, and exact resumption.

Every rank makes the same global batches. Rows are read and shuffled in blocks, so a few numbers and the state of the
data set describe the position, and a resumed run begins with its block. A shuffle buffer whose rows stay for any time
would have to be part of every checkpoint.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.loader import refuse_other_order
from lightning_realloc.data.rows import NoUsableRowsError, Row
from lightning_realloc.data.streams.row_streams import Mark, RowStream
from lightning_realloc.data.streams.stream_blocks import BlockReader
from lightning_realloc.errors import CheckpointError, DataError

_MAX_CHECKED_ROWS = 1000
"""Rows after which a stream without a usable row is refused before training; more delay this error."""
Tabulate = Callable[[Sequence[Row]], Samples]
"""Convert the usable rows of a block to samples with ids 0, 1, ...; NoUsableRowsError if there are none."""


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
    marks: tuple[Mark, ...] = ()
    """Position in each part of the stream at which the block begins; () for the beginning of an epoch."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPosition:
        """Return a position that `dataclasses.asdict` has converted. Checkpoints of earlier versions have no marks."""
        earlier = ({"rows": state["block"]},) if state["block"] else ()
        marks = tuple(Mark(**mark) for mark in state.get("marks", earlier))
        return cls(**{**state, "marks": marks})


class StreamLoader:
    """Training batches of a stream, reordered in every epoch.

    A sample's id is the number of samples before it over all epochs, unique over the run and independent of ranks.
    Lightning's epoch is ``epoch_batches`` long, wherever in the stream it begins.

    Args:
        stream: Rows to read.
        tabulate: Converts a block of rows to samples.
        batch_size: Rows per batch over all ranks together.
        shuffle_buffer: Rows of a block, more if it is no multiple of the stream's parts. With ``shuffle`` they are
            reordered within their block, by the seed, the epoch and the block alone. Without it, the stream is not
            divided into parts, which would be read in turn.
        drop_last: Whether to drop a last batch that is smaller than the others.
        group_size: Number of adjacent samples made from one row; a batch holds whole rows.
        reads_ahead: Whether a thread reads the rows of the next block in advance; the batches are the same.
        rank: This rank.
        num_ranks: Ranks that divide the parts of the stream among them, and iterate in step.

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
        reads_ahead: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
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
        self.epoch_batches = sys.maxsize
        """Batches after which an iteration over the loader ends; the next one continues from there."""
        self.num_parts = stream.num_parts if shuffle else 1
        self._reader = BlockReader(
            stream,
            self.num_parts,
            block_rows=self.block_rows,
            rank=rank,
            num_ranks=num_ranks,
            reads_ahead=reads_ahead,
        )
        self._tabulate = tabulate
        self._first_problem = ""
        self._place = StreamPosition()
        self._batches: Generator[tuple[Samples, StreamPosition], None, None] | None = None

    def __len__(self) -> int:
        return self.epoch_batches

    def check(self) -> None:
        """Read and discard the blocks up to the first usable row, to find errors of all rows before the first step.

        Raises:
            DataError: for such an error, and for a stream without rows.
        """
        num_rows = 0
        with closing(self._reader.blocks(0, ())) as blocks:
            for block in blocks:
                if self._table_of(block.rows) is not None:
                    return
                num_rows += len(block.rows)
                if num_rows >= _MAX_CHECKED_ROWS:
                    break
        if num_rows == 0:
            raise DataError(f"{self.stream.name} holds no rows; it needs at least one")
        raise DataError(f"{self.stream.name} has no usable row among its first {num_rows}; {self._first_problem}")

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
        return {"place": asdict(self._place), "num_parts": self.num_parts, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was handed out last.

        Raises:
            CheckpointError: if the checkpoint was written with another order.
        """
        refuse_other_order("stream", self._identity(), state)
        if (theirs := state.get("num_parts", 1)) != self.num_parts:  # earlier versions had one part
            raise CheckpointError(
                f"resuming needs a stream that is divided as before; the checkpoint was written with {theirs} parts, "
                f"and the stream now has {self.num_parts}: give the same shards, skip() and take() as before, or start "
                f"from the weights alone"
            )
        self.close()
        self._place = StreamPosition.from_state(state["place"])

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
                    yield batch, replace(begin, position=position)
                num_samples = begin.num_before + len(table)
            place = StreamPosition(place.epoch + 1, 0, 0, num_samples)
            if not self.drop_last and (rest := cutter.rest()) is not None:
                has_batches = True
                yield rest, place
            if is_whole_pass and not has_batches:
                problem = self._first_problem and f"; about the others: {self._first_problem}"
                raise DataError(
                    f"{self.stream.name} has fewer usable rows than batch_size={self.batch_size} needs, "
                    f"{num_samples // self.group_size}; lower batch_size, add rows or set drop_last=False{problem}"
                )

    def _blocks(self, place: StreamPosition) -> Iterator[tuple[StreamPosition, Samples]]:
        """Yield each block's position and its samples in batch order."""
        at = replace(place, position=0)
        epoch = place.epoch if self.shuffle or self.stream.is_shuffled else 0  # datasets reorders shards as well
        for block in self._reader.blocks(epoch, place.marks):
            table = self._table_of(block.rows)
            num_samples = 0 if table is None else len(table)
            if table is not None:
                yield at, self._ordered(table, at)
            begin, num_before = at.block + len(block.rows), at.num_before + num_samples
            at = StreamPosition(place.epoch, begin, 0, num_before, block.marks)

    def _table_of(self, rows: Sequence[Row]) -> Samples | None:
        """Return the samples of a block; None if none of its rows can be used."""
        try:
            return self._tabulate(rows)
        except NoUsableRowsError as error:
            self._first_problem = self._first_problem or str(error)
            return None

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


def stream_epoch_batches(trainer: Trainer | None) -> int:
    """Return the number of a stream's batches in the Trainer's epoch.

    Raises:
        DataError: if the Trainer's settings give none.
    """
    if trainer is None:
        return sys.maxsize
    limit, steps = trainer.limit_train_batches, trainer.max_steps
    if isinstance(limit, int):
        return limit
    if limit not in (None, 1.0) or steps < 1:
        raise DataError(
            f"a stream has no length that could define an epoch: limit_train_batches={limit} and max_steps={steps}; "
            f"give Trainer(max_steps=...), or limit_train_batches as a whole number of batches per epoch"
        )
    return steps


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
