"""Collect the samples that one generating call makes on several ranks, whole or chunk by chunk.

Each rank that generates sends the outline of its samples to all ranks: ids, lengths and values per sample. From these
every rank makes the same table. Sequences follow where a later call needs them. In chunks they are sent at once, to
calls that start before all samples are generated.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lightning_realloc.batch.samples import Samples
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
    values_of,
    with_objects,
)

ChunkKey = tuple[int, int]
"""Number of a chunk, and the rank that sends it."""


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


class GeneratedSamples:
    """The samples of one generating call, which each rank sends at its end.

    Args:
        call: The call.
        routes: Which rank works on which samples.
        messages: Messages of this pass over the calls.
        rank: This process.
    """

    num_chunks = 1
    """Chunks in which each rank sends its samples, empty ones included."""

    def __init__(self, call: ModelFunctionCall, routes: Routes, messages: RunMessages, rank: int) -> None:
        self._call, self._routes, self._messages, self._rank = call, routes, messages, rank
        self._place = routes.placements[call.name]
        self._outlines: dict[ChunkKey, Samples | None] = {}
        """Outline of each chunk; None: the chunk is empty."""
        self._clocks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        """Sender -> when it sent its outlines, on its clock, and when this rank read them, on its own."""
        self._table: SampleTable | None = None

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends samples of the call."""
        return self._rank in self._place.senders

    def finish(self, made: Samples | None) -> None:
        """Send this rank's samples, without those that it has sent already; None: it made none."""
        self._send(0, made)

    def table(self, prompts: Samples) -> SampleTable:
        """Return all samples as every rank knows them, with the objects of their ``prompts``; waits for all outlines.

        Raises:
            PlanError: if no rank made a sample.
        """
        if self._table is None:
            outlines = {key: self._outline(key) for key in self._keys()}
            chunks = [(sender, known) for (_, sender), known in outlines.items() if known is not None]
            if not chunks:
                raise PlanError(f"call {self._call.name!r} made no samples; it must return at least one response")
            known = Samples.concatenate([known for _, known in chunks]).sorted_by_id()
            self._table = self._make_table(with_objects(known, prompts), chunks)
        return self._table

    def _make_table(self, known: Samples, chunks: Sequence[tuple[int, Samples]]) -> SampleTable:
        """Return the table of all samples, given sender and outline of each chunk."""
        positions = [np.searchsorted(known.ids.numpy(), chunk.ids.numpy()) for _, chunk in chunks]
        share_of = {ranks[0]: share for share, ranks in self._place.holders.items()}
        shares = np.full(len(known), -1)
        for (sender, _), rows in zip(chunks, positions, strict=True):
            shares[rows] = share_of[sender]
        return SampleTable(known, Holders(shares, self._place.holders), chunks=positions)

    def _keys(self) -> list[ChunkKey]:
        return [(number, sender) for number in range(self.num_chunks) for sender in self._place.senders]

    def _send(self, number: int, made: Samples | None) -> None:
        """Send the outline of a chunk to all ranks."""
        known = None if made is None or not len(made) else outline(made).sorted_by_id()
        self._outlines[number, self._rank] = known
        content = (time.perf_counter(), known)
        self._messages.send(self._messages.others, FrameKind.DIRECTORY, self._call, content, part=number)

    def _outline(self, key: ChunkKey) -> Samples | None:
        """Return a chunk's outline, None if it is empty; waits for it."""
        number, sender = key
        if key not in self._outlines:
            sent_s, self._outlines[key] = self._messages.receive(FrameKind.DIRECTORY, self._call, sender, part=number)
            self._clocks[sender].append((sent_s, time.perf_counter()))
        return self._outlines[key]


class ChunkedSamples(GeneratedSamples):
    """The same, where calls on other ranks start on chunks of samples while others are generated."""

    def __init__(self, call: ModelFunctionCall, routes: Routes, messages: RunMessages, rank: int) -> None:
        super().__init__(call, routes, messages, rank)
        self.num_chunks = routes.fusion.num_chunks_of(call)
        self._sent: list[Samples] = []
        """Chunks that this rank sent before the call's end."""
        self._rows: dict[ChunkKey, Samples] = {}
        """Sequences of each chunk that this rank works on in fused calls."""

    def send(self, made: Samples) -> None:
        """Send some samples while others are generated."""
        if self.is_sender:
            self._sent.append(made)
            self._send(len(self._sent) - 1, made)

    def finish(self, made: Samples | None) -> None:
        """Send the samples that no chunk had.

        Raises:
            PlanError: if the call changed samples that it had sent.
        """
        rest = made
        if self._sent:
            sent = Samples.concatenate(self._sent)
            check_unchanged(self._call, made, sent)
            assert made is not None, "checked before"
            ids = set(sent.ids.tolist())
            rest = made.select([row for row, sample_id in enumerate(made.ids.tolist()) if sample_id not in ids])
        for number in range(len(self._sent), self.num_chunks - 1):
            self._send(number, None)
        self._send(self.num_chunks - 1, rest)

    def chunks(self, prompts: Samples) -> Iterator[SampleChunk]:
        """Yield the chunks that this rank works on in fused calls, as they arrive."""
        for key in self._keys():
            known, rows = self._outline(key), self._chunk(key)
            if known is not None and rows is not None:
                lengths = sequence_lengths(known)
                positions = self._routes.fusion.chunk_positions(self._call, self._rank, lengths)
                rows = with_objects(rows.with_columns(**values_of(known.select(positions))), prompts)
                yield SampleChunk(lengths, PositionedRows(rows, positions))

    def rows(self) -> list[Samples]:
        """Return the sequences of all chunks that this rank works on in fused calls; waits for them."""
        chunks = map(self._chunk, self._keys())
        return [rows for rows in chunks if rows is not None]

    def ended_at(self) -> float:
        """Return when the call ended, by this rank's ``time.perf_counter()``; after all chunks were read.

        A chunk may have waited for this rank to read it. The one that waited least shows how far the clocks differ.
        """
        return max(times[-1][0] + min(read - sent for sent, read in times) for times in self._clocks.values())

    def _send(self, number: int, made: Samples | None) -> None:
        """Send the outline of a chunk to all ranks, and its sequences to those that work on them in fused calls."""
        made = None if made is None or not len(made) else made.sorted_by_id()
        super()._send(number, made)
        if made is None:
            return
        lengths = sequence_lengths(made)
        for rank in self._messages.others:
            positions = self._routes.fusion.chunk_positions(self._call, rank, lengths)
            if len(positions):
                rows = product_columns(made.select(positions), self._call, self._call.produces)
                self._messages.send([rank], FrameKind.ROWS, self._call, rows, part=number)

    def _chunk(self, key: ChunkKey) -> Samples | None:
        """Return the sequences of a chunk that this rank works on in fused calls, None if there are none."""
        known, (number, sender) = self._outline(key), key
        if known is None:
            return None
        if not len(self._routes.fusion.chunk_positions(self._call, self._rank, sequence_lengths(known))):
            return None
        if key not in self._rows:
            self._rows[key] = self._messages.receive(FrameKind.ROWS, self._call, sender, part=number)
        return self._rows[key]
