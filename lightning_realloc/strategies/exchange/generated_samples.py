"""Collect the samples that one generating call makes on several ranks, whole or chunk by chunk.

Each rank that generates gives the outline of its samples to a directory that all ranks receive: ids, lengths and values
per sample. From these every rank makes the same table. Sequences follow where a later call needs them. In chunks they
are sent at once, to calls that start before all samples are generated.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.shares import Integers
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.routing import Routes
from lightning_realloc.strategies.exchange.sample_table import (
    Holders,
    PositionedRows,
    SampleChunk,
    SampleTable,
    check_unchanged,
    outline,
    product_columns,
    sequence_lengths,
    with_objects,
)

ChunkKey = tuple[int, int]
"""Number of a chunk, and the rank that sends it."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The outlines of chunks of samples, of one rank or several."""

    known: Samples | None
    """The samples of all chunks, one chunk after the other; None without any."""
    chunks: Integers
    """(chunks, 3) number, sending rank and samples of each chunk that is not empty."""

    @classmethod
    def merge(cls, parts: Sequence[Directory]) -> Directory:
        """Return the directory of all chunks."""
        known = [part.known for part in parts if part.known is not None]
        chunks = np.concatenate([part.chunks for part in parts])
        return cls(Samples.concatenate(known) if known else None, chunks)

    @classmethod
    def of(cls, rank: int, chunks: Sequence[Samples | None]) -> Directory:
        """Return the directory of one rank's chunks, in the order of their numbers."""
        rows = [(number, rank, len(chunk)) for number, chunk in enumerate(chunks) if chunk is not None]
        known = [outline(chunk) for chunk in chunks if chunk is not None]
        sizes = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(Samples.concatenate(known) if known else None, sizes)


class RunMessages:
    """Messages of one pass over the calls.

    Args:
        mailbox: Messages between the ranks.
        run: Number of the pass.
        calls: Its calls.
    """

    def __init__(self, mailbox: Mailbox, run: int, calls: Sequence[ModelFunctionCall]) -> None:
        self._mailbox, self._run, self._calls = mailbox, run, calls
        self.others = mailbox.others
        """The other ranks."""

    def send(self, to: Iterable[int], kind: FrameKind, call: ModelFunctionCall, content: object, *, part: int) -> None:
        """Send samples or plain data of a call; the sender does not wait."""
        self._mailbox.send(to, kind, self._run, self._calls.index(call), encode_message(content), part=part)

    def receive(self, kind: FrameKind, call: ModelFunctionCall, sender: int, *, part: int) -> Any:
        """Return samples or plain data of a call; waits for them."""
        return decode_message(self._mailbox.receive(kind, self._run, self._calls.index(call), sender, part=part))

    def share(self, call: ModelFunctionCall, part: Directory, contributors: Sequence[int]) -> None:
        """Give this rank's part of a call's directory; the rank does not wait."""
        self._mailbox.share(FrameKind.DIRECTORY, self._run, self._calls.index(call), part, contributors)

    def directory(self, call: ModelFunctionCall) -> Directory:
        """Return a call's directory; waits for it."""
        found: Directory = self._mailbox.receive_whole(FrameKind.DIRECTORY, self._run, self._calls.index(call))
        return found


class GeneratedSamples:
    """The samples of one generating call, which each rank sends at its end.

    Args:
        call: The call.
        routes: Which rank works on which samples.
        messages: Messages of this pass over the calls.
        rank: This process.
    """

    def __init__(self, call: ModelFunctionCall, routes: Routes, messages: RunMessages, rank: int) -> None:
        self._call, self._routes, self._messages, self._rank = call, routes, messages, rank
        self._place = routes.placements[call.name]
        self._table: SampleTable | None = None

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends samples of the call."""
        return self._rank in self._place.senders

    def finish(self, made: Samples | None) -> None:
        """Send this rank's samples, without those that it has sent already; None: it made none."""
        self._share([_ordered(made)])

    def table(self, prompts: Samples) -> SampleTable:
        """Return all samples as every rank knows them, with the objects of their ``prompts``; waits for all outlines.

        Raises:
            PlanError: if no rank made a sample.
        """
        if self._table is None:
            directory = self._messages.directory(self._call)
            if directory.known is None:
                raise PlanError(f"call {self._call.name!r} made no samples; it must return at least one response")
            self._table = self._make_table(directory.known, directory.chunks, prompts)
        return self._table

    def _make_table(self, listed: Samples, chunks: Integers, prompts: Samples) -> SampleTable:
        """Return the table of all samples, given these chunk by chunk."""
        known = listed.sorted_by_id()
        positions = np.searchsorted(known.ids.numpy(), listed.ids.numpy())
        numbers, senders, sizes = chunks.T
        share_of = np.zeros(max(self._place.senders) + 1, dtype=np.int64)
        for share, ranks in self._place.holders.items():
            share_of[ranks[0]] = share
        shares = np.empty(len(known), dtype=np.int64)
        shares[positions] = np.repeat(share_of[senders], sizes)
        parts = np.split(positions, np.cumsum(sizes)[:-1])
        in_order = [parts[index] for index in np.lexsort((senders, numbers))]
        return SampleTable(with_objects(known, prompts), Holders(shares, self._place.holders), chunks=in_order)

    def _share(self, chunks: Sequence[Samples | None]) -> None:
        """Give the outlines of this rank's chunks to all ranks."""
        self._messages.share(self._call, Directory.of(self._rank, chunks), self._place.senders)


def _ordered(made: Samples | None) -> Samples | None:
    """Return samples in the order of ids; None if there are none."""
    return None if made is None or not len(made) else made.sorted_by_id()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk, as a rank receives it that works on a part of its samples."""

    sent_s: float
    """When it was sent, on the sender's clock."""
    lengths: Integers
    """Tokens of all samples of the chunk; none if it is empty."""
    rows: Samples | None
    """The samples that the rank works on; None without any."""


class ChunkedSamples(GeneratedSamples):
    """The same, where calls on other ranks start on chunks of samples while others are generated."""

    def __init__(self, call: ModelFunctionCall, routes: Routes, messages: RunMessages, rank: int) -> None:
        super().__init__(call, routes, messages, rank)
        self.num_chunks = routes.fusion.num_chunks_of(call)
        """Chunks in which each rank sends its samples, empty ones included."""
        self._sent: list[Samples | None] = []
        """Chunks that this rank has sent."""
        self._received: dict[ChunkKey, _Chunk] = {}
        self._clocks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        """Sender -> when it sent its chunks, on its clock, and when this rank read them, on its own."""

    def send(self, made: Samples) -> None:
        """Send some samples while others are generated."""
        if self.is_sender:
            self._send(made)

    def finish(self, made: Samples | None) -> None:
        """Send the samples that no chunk had.

        Raises:
            PlanError: if the call changed samples that it had sent.
        """
        rest = made
        if parts := [part for part in self._sent if part is not None]:
            sent = Samples.concatenate(parts)
            check_unchanged(self._call, made, sent)
            assert made is not None, "checked before"
            ids = set(sent.ids.tolist())
            rest = made.select([row for row, sample_id in enumerate(made.ids.tolist()) if sample_id not in ids])
        while len(self._sent) < self.num_chunks - 1:
            self._send(None)
        self._send(rest)
        self._share(self._sent)

    def chunks(self, prompts: Samples) -> Iterator[SampleChunk]:
        """Yield the chunks that this rank works on in fused calls, as they arrive."""
        for chunk in map(self._chunk, self._keys()):
            if chunk.rows is not None:
                positions = self._routes.fusion.chunk_positions(self._call, self._rank, chunk.lengths)
                yield SampleChunk(chunk.lengths, PositionedRows(with_objects(chunk.rows, prompts), positions))

    def rows(self) -> list[Samples]:
        """Return the sequences of all chunks that this rank works on in fused calls; waits for them."""
        if not self._is_user(self._rank):
            return []
        chunks = [self._chunk(key).rows for key in self._keys()]
        return [product_columns(rows, self._call, self._call.produces) for rows in chunks if rows is not None]

    def ended_at(self) -> float:
        """Return when the call ended, by this rank's ``time.perf_counter()``; after all chunks were read.

        A chunk may have waited for this rank to read it. The one that waited least shows how far the clocks differ.
        """
        return max(times[-1][0] + min(read - sent for sent, read in times) for times in self._clocks.values())

    def _keys(self) -> list[ChunkKey]:
        return [(number, sender) for number in range(self.num_chunks) for sender in self._place.senders]

    def _is_user(self, rank: int) -> bool:
        return bool(self._routes.fusion.users(self._call, rank))

    def _send(self, made: Samples | None) -> None:
        """Send a chunk to the ranks that work on its samples in fused calls."""
        number, made = len(self._sent), _ordered(made)
        self._sent.append(made)
        lengths = np.zeros(0, dtype=np.int64) if made is None else sequence_lengths(made)
        for rank in filter(self._is_user, self._messages.others):
            positions = self._routes.fusion.chunk_positions(self._call, rank, lengths)
            rows = None if made is None or not len(positions) else made.select(positions)
            chunk = _Chunk(time.perf_counter(), lengths, rows)
            self._messages.send([rank], FrameKind.CHUNK, self._call, chunk, part=number)

    def _chunk(self, key: ChunkKey) -> _Chunk:
        """Return a chunk as this rank receives it; waits for it."""
        if key not in self._received:
            number, sender = key
            chunk = self._messages.receive(FrameKind.CHUNK, self._call, sender, part=number)
            self._received[key] = chunk
            self._clocks[sender].append((chunk.sent_s, time.perf_counter()))
        return self._received[key]
