"""Hold one rank's samples of an iteration, and exchange results with other ranks.

Results stay on the ranks that made them. One holder sends them once to every rank that needs them in a later call. A
sender does not wait; a receiver waits only for its own inputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_realloc.batch.samples import Column, Ragged, Samples, samples_from_state, samples_state
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.codec import all_gather_samples, decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.exchange.routing import Routes
from lightning_realloc.strategies.exchange.sample_table import (
    PositionedRows,
    SampleChunk,
    SampleTable,
    check_unchanged,
    sequence_lengths,
)

REST = -1
"""Chunk number of the rows that are sent after all chunks."""
ChunkKey = tuple[int, int]
"""Number of a chunk, and the rank that sends it."""


@dataclass(slots=True)
class _Generation:
    """State of one generating call on this rank."""

    sent: list[Samples] = field(default_factory=list)
    """Chunks that this rank sent."""
    outlines: dict[ChunkKey, Samples | None] = field(default_factory=dict)
    """Ids, lengths and values per sample of each chunk; None: the chunk is empty."""
    rows: dict[ChunkKey, Samples] = field(default_factory=dict)
    """Sequences of each chunk that this rank works on in fused calls."""
    clocks: defaultdict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Sender -> when it sent its chunks, on its clock, and when this rank read them, on its own."""
    table: SampleTable | None = None
    """All samples; None until all ranks have sent their outlines."""


class IterationData:
    """Gives this rank the inputs of each call in ``routes.calls``, and records the results.

    Args:
        batch: The loader's batch, the same on every rank.
        routes: Which rank works on which samples.
        mailbox: Messages between the ranks.
        rank: This process.
        run: Number of this pass over the calls, the same on all ranks.
        version: Batches that had been trained on when it began.
        num_shown: Number of samples, the first by id, whose responses every rank receives.
        iteration: Iteration in which the batch was loaded; None for an evaluation.
    """

    def __init__(
        self, batch: Samples, routes: Routes, mailbox: Mailbox, *, rank: int, run: int, version: int = 0,
        num_shown: int = 0, iteration: int | None = None,
    ) -> None:  # fmt: skip
        self.routes = routes
        self.run = run
        self.version = version
        self.iteration = iteration
        self.report = IterationReport()
        """This rank's report to all ranks."""
        self.training_metrics: dict[str, dict[str, float]] = {}
        """Training call -> this rank's metrics of it."""
        self._num_shown = num_shown
        self._mailbox, self._rank = mailbox, rank
        self._batch = SampleTable(batch)
        self._generations = {call.name: _Generation() for call in routes.calls if call.kind == "generate"}
        self._held: defaultdict[str, list[Samples]] = defaultdict(list)
        """Call -> its results that this rank needs later."""
        self._received: set[str] = set()
        """Calls whose results on other ranks have been received."""
        self._mine: dict[str, Samples] = {}
        """Call -> the results of which this rank is the first holder."""
        self._has_sent_report = False

    # ---- inputs of a call
    def table(self, call: ModelFunctionCall) -> SampleTable:
        """Return the samples that ``call`` works on; waits until their lengths are known here."""
        owner = self.routes.owners[call.name]
        return self._batch if owner is None else self._generated_table(owner)

    def inputs(self, call: ModelFunctionCall) -> Samples | None:
        """Return the samples that this rank needs for ``call``, in the table's order; None if it needs none.

        Waits for results that other ranks make.
        """
        table = self.table(call)
        positions = self.routes.positions(call, self._rank, table)
        if not positions:
            return None
        columns: dict[str, Column] = {}
        data: dict[str, tuple[object, ...]] = {}
        known = table.known.select(positions)
        for name in dict.fromkeys(self.routes.needs(call, self._rank)):
            producer = self.routes.producer(name)
            if producer is None:  # the loader
                columns |= known.columns if table is self._batch else {}
                continue
            self._receive_results(producer, table)
            rows = Samples.concatenate(self._held[producer.name]).by_ids(known.ids)
            columns |= rows.columns
            data |= rows.data
            if producer.kind == "generate":
                columns |= _values(known)
        return Samples(known.ids, columns, data | dict(known.data))

    def rows(self, call: ModelFunctionCall) -> PositionedRows:
        """Return the inputs of a call that this rank takes part in, by their positions in the table."""
        samples = self.inputs(call)
        assert samples is not None, f"rank {self._rank} has no part in {call.name}"
        return PositionedRows(samples, self.routes.positions(call, self._rank, self.table(call)))

    def chunks(self, source: ModelFunctionCall) -> Iterator[SampleChunk]:
        """Yield the chunks of a generating call that this rank works on in fused calls, as they arrive."""
        for key in self._chunk_keys(source):
            known = self._receive_outline(source, key)
            rows = self._receive_chunk(source, key)
            if known is not None and rows is not None:
                lengths = sequence_lengths(known)
                positions = self.routes.fusion.chunk_positions(source, self._rank, lengths)
                rows = rows.with_columns(**_values(known.select(positions)))
                rows = _with_objects(rows, self.table(source).known)
                yield SampleChunk(lengths, PositionedRows(rows, positions))

    def generation_ended_at(self, source: ModelFunctionCall) -> float:
        """Return when a generating call ended, by this rank's ``time.perf_counter()``; after all chunks were read.

        A chunk may have waited for this rank to read it. The one that waited least shows how far the clocks differ.
        """
        clocks = self._generations[source.name].clocks.values()
        return max(times[-1][0] + min(read - sent for sent, read in times) for times in clocks)

    def index(self, call: ModelFunctionCall) -> int:
        """Return a call's place in running order."""
        return self.routes.calls.index(call)

    # ---- results of a call
    def send_chunk(self, call: ModelFunctionCall, made: Samples) -> None:
        """Send some samples of a generating call while others are generated."""
        if self._rank in self.routes.placements[call.name].senders:
            sent, made = self._generations[call.name].sent, made.sorted_by_id()
            sent.append(made)
            self._send_chunk(call, len(sent) - 1, made)

    def carry(self, call: ModelFunctionCall, samples: Samples) -> None:
        """Leave some samples of a generating call for the next iteration; the report sends them to all ranks."""
        if len(samples) and self._rank in self.routes.placements[call.name].senders:
            self.report.add_carried(samples)

    def record(self, call: ModelFunctionCall, made: Samples | None) -> None:
        """Keep and send the results of a call on this rank; None without part in it, or without samples.

        Results of a generating call hold its whole responses, including those that were sent in chunks.
        The senders of a generating call record it without samples, too: other ranks wait for their chunks.

        Raises:
            PlanError: if the call returned other columns than it produces, or changed samples that it had sent.
        """
        if call.kind == "generate" and self._rank in self.routes.placements[call.name].senders:
            self._send_last_chunks(call, made)
        if made is None:
            return
        table = self._table_made_by(call)
        if call.kind != "generate":
            _check_complete(call, made)
        holders = self.routes.holders(call, table)
        mine = [position for position in table.positions(made) if holders[position][0] == self._rank]
        if mine:
            self._mine[call.name] = made if len(mine) == len(made) else made.by_ids(table.ids(mine))
        own = self.routes.delivery(call, self._rank, table)
        self._held[call.name].append(_product_columns(made, call, own.products))
        for rank in self._mailbox.others:
            delivery = self.routes.delivery(call, rank, table)
            if rows := delivery.senders.get(self._rank):
                samples = _product_columns(made.by_ids(table.ids(rows)), call, delivery.products)
                self._send([rank], FrameKind.ROWS, call, {"rows": samples}, chunk=REST)

    def _receive_results(self, producer: ModelFunctionCall, table: SampleTable) -> None:
        """Receive the results of other ranks that this one needs, in this call or a later one."""
        if producer.name in self._received:
            return
        self._received.add(producer.name)
        if self.routes.fusion.users(producer, self._rank):
            chunks = (self._receive_chunk(producer, key) for key in self._chunk_keys(producer))
            self._held[producer.name] += [rows for rows in chunks if rows is not None]
        for sender in sorted(self.routes.delivery(producer, self._rank, table).senders):
            _, samples = self._receive(FrameKind.ROWS, producer, sender, chunk=REST)
            self._held[producer.name].append(samples["rows"])

    # ---- chunks of a generating call
    def _send_last_chunks(self, call: ModelFunctionCall, made: Samples | None) -> None:
        """Send the samples that no chunk had."""
        generation, last, rest = self._generations[call.name], self.routes.fusion.num_chunks_of(call) - 1, made
        if generation.sent:
            sent = Samples.concatenate(generation.sent)
            check_unchanged(call, made, sent)
            assert made is not None, "checked before"
            ids = set(sent.ids.tolist())
            rest = made.select([row for row, sample_id in enumerate(made.ids.tolist()) if sample_id not in ids])
        for number in range(len(generation.sent), last):
            self._send_chunk(call, number, None)
        self._send_chunk(call, last, None if rest is None or not len(rest) else rest.sorted_by_id())

    def _send_chunk(self, call: ModelFunctionCall, number: int, made: Samples | None) -> None:
        """Send a chunk's outline to all ranks, and its sequences to those that work on them in fused calls."""
        generation = self._generations[call.name]
        known = generation.outlines[number, self._rank] = None if made is None else _outline(made)
        info = {"sent_s": time.perf_counter()}
        samples = {} if known is None else {"made": known}
        self._send(self._mailbox.others, FrameKind.DIRECTORY, call, samples, info, chunk=number)
        if made is None or not self.routes.fusion.sources:
            return
        lengths = sequence_lengths(made)
        for rank in self._mailbox.others:
            if positions := self.routes.fusion.chunk_positions(call, rank, lengths):
                rows = _product_columns(made.select(positions), call, call.produces)
                self._send([rank], FrameKind.ROWS, call, {"rows": rows}, chunk=number)

    def _chunk_keys(self, call: ModelFunctionCall) -> list[ChunkKey]:
        numbers = range(self.routes.fusion.num_chunks_of(call))
        return [(number, sender) for number in numbers for sender in self.routes.placements[call.name].senders]

    def _receive_outline(self, call: ModelFunctionCall, key: ChunkKey) -> Samples | None:
        """Return a chunk's outline, None if it is empty; waits for it."""
        generation, (number, sender) = self._generations[call.name], key
        if key not in generation.outlines:
            info, samples = self._receive(FrameKind.DIRECTORY, call, sender, chunk=number)
            generation.outlines[key] = samples.get("made")
            generation.clocks[sender].append((info["sent_s"], time.perf_counter()))
        return generation.outlines[key]

    def _receive_chunk(self, call: ModelFunctionCall, key: ChunkKey) -> Samples | None:
        """Return the sequences of a chunk that this rank works on in fused calls, None if there are none."""
        generation, known = self._generations[call.name], self._receive_outline(call, key)
        if known is None or not self.routes.fusion.chunk_positions(call, self._rank, sequence_lengths(known)):
            return None
        if key not in generation.rows:
            _, samples = self._receive(FrameKind.ROWS, call, key[1], chunk=key[0])
            generation.rows[key] = samples["rows"]
        return generation.rows[key]

    def _table_made_by(self, call: ModelFunctionCall) -> SampleTable:
        """Return the samples that the results of a call belong to."""
        return self._generated_table(call) if call.kind == "generate" else self.table(call)

    def _generated_table(self, call: ModelFunctionCall) -> SampleTable:
        """Return the samples that a generating call made; waits for the ranks that made them."""
        generation = self._generations[call.name]
        if generation.table is None:
            outlines = {key: self._receive_outline(call, key) for key in self._chunk_keys(call)}
            chunks = [(sender, known) for (_, sender), known in outlines.items() if known is not None]
            if not chunks:
                raise PlanError(f"call {call.name!r} made no samples; it must return at least one response")
            made = Samples.concatenate([known for _, known in chunks]).sorted_by_id()
            known = _with_objects(made, self.table(call).known)
            generation.table = self._make_table(call, known, chunks)
        return generation.table

    def _make_table(
        self, call: ModelFunctionCall, known: Samples, chunks: Sequence[tuple[int, Samples]]
    ) -> SampleTable:
        """Return the table of generated samples.

        Args:
            call: The generating call.
            known: All samples, as every rank knows them, in the table's order.
            chunks: Sender and outline of each chunk.
        """
        row_of = {sample_id: row for row, sample_id in enumerate(known.ids.tolist())}
        positions = [[row_of[sample_id] for sample_id in chunk.ids.tolist()] for _, chunk in chunks]
        place = self.routes.placements[call.name]
        holders: list[tuple[int, ...]] = [()] * len(known)
        holders_of = {sender: place.holders(index) for index, sender in enumerate(place.senders)}
        for (sender, _), rows in zip(chunks, positions, strict=True):
            for row in rows:
                holders[row] = holders_of[sender]
        return SampleTable(known, holders, chunks=positions)

    # ---- after the calls
    def send_report(self) -> None:
        """Send this rank's report to all ranks: metrics, values per sample, and samples for the next iteration."""
        values = {name: made for name, made in self._mine.items() if name not in self._generations}
        self.report.values = {name: _outline(made) for name, made in values.items()}
        self.report.shown = self._my_shown()
        self._has_sent_report = True
        content = self.report.encode()
        self._mailbox.send(self._mailbox.others, FrameKind.CALL_METRICS, self.run, 0, content)

    def receive_report(self) -> IterationReport:
        """Return the merged reports of all ranks, and add the values that they made to the tables."""
        reports = {self._rank: self.report}
        for rank in self._mailbox.others:
            content = self._mailbox.receive(FrameKind.CALL_METRICS, self.run, 0, rank)
            reports[rank] = IterationReport.from_message(content)
        merged = IterationReport.merge([report for _, report in sorted(reports.items())])
        for call in self.routes.calls:
            if call.name in merged.values:
                table = self.table(call)
                table.add_columns(merged.values[call.name].by_ids(table.known.ids).columns)
        return merged

    def drain(self, calls: Sequence[ModelFunctionCall]) -> None:
        """Receive and drop the results of these calls, which their senders keep until then."""
        for call in calls:
            self._receive_results(call, self._table_made_by(call))
        if self._has_sent_report:
            self.receive_report()

    def known(self) -> Samples:
        """Return the last set of samples as every rank knows it: of sequences the lengths."""
        return self._last_table().known.lengths_only()

    def shown(self, report: IterationReport) -> Samples | None:
        """Return the first samples by id as :meth:`known`, with their responses; None if none are to be shown.

        ``report`` is the merged one of all ranks.
        """
        if not self._num_shown:
            return None
        known = self._last_table().known.sorted_by_id()
        first = known.select(range(min(self._num_shown, len(known))))
        if report.shown is None:  # the loader's batch, which is known whole
            return first
        return first.with_columns(response_ids=report.shown.by_ids(first.ids).ragged("response_ids"))

    def gather(self) -> Samples:
        """Return the last set of samples with all results of calls on it, on every rank. Collective."""
        last = self._last_table()
        complete = last.known if last is self._batch else None
        for call in self.routes.calls:
            if call.kind == "train" or self._table_made_by(call) is not last:
                continue
            made = all_gather_samples(self._mine.get(call.name))
            complete = made if complete is None else complete.with_columns(**made.by_ids(complete.ids).columns)
        assert complete is not None
        return complete.with_columns(**last.known.data)

    # ---- checkpoints
    def state(self) -> dict[str, Any]:
        """Return the batch and the results of calls that ran at once, as plain data, equal on all ranks. Collective."""
        at_once = self.routes.calls_at_once()
        return {
            "batch": samples_state(self._batch.known),
            "calls": [call.name for call in self.routes.calls],
            "version": self.version,
            "made": {call.name: samples_state(all_gather_samples(self._mine.get(call.name))) for call in at_once},
        }

    def restore(self, made: Mapping[str, Any]) -> None:
        """Record stored results of calls that ran at once. They may come from another plan or number of ranks."""
        for call in self.routes.calls_at_once():
            self.record(call, self._part_of(call, samples_from_state(made[call.name])))

    def _part_of(self, call: ModelFunctionCall, made: Samples) -> Samples | None:
        """Return the results that this rank would have made; None without any."""
        table = self.table(call)
        ids = table.ids(self.routes.positions(call, self._rank, table))
        if not ids or call.kind == "compute":
            return made.by_ids(ids) if ids else None
        place = self.routes.placements[call.name]
        if self._rank not in place.holders(place.layout.data_parallel_index(self._rank)):
            return None
        prompts = set(ids)
        rows = [row for row, prompt in enumerate(made.tensor("prompt_id").tolist()) if prompt in prompts]
        return made.select(rows) if rows else None

    def _my_shown(self) -> Samples | None:
        """Return this rank's first responses by id; all ranks together report those of the first samples."""
        mine = self._mine.get(list(self._generations)[-1]) if self._generations else None
        if not self._num_shown or mine is None or "response_ids" not in mine:
            return None
        first = mine.sorted_by_id().select(range(min(self._num_shown, len(mine))))
        return Samples(first.ids, {"response_ids": first.ragged("response_ids")})

    def _last_table(self) -> SampleTable:
        generating = [call for call in self.routes.calls if call.kind == "generate"]
        return self._generated_table(generating[-1]) if generating else self._batch

    # ---- messages
    def _send(
        self, to: Iterable[int], kind: FrameKind, call: ModelFunctionCall, samples: Mapping[str, Samples],
        info: Mapping[str, Any] | None = None, *, chunk: int,
    ) -> None:  # fmt: skip
        content = encode_message(info or {}, samples)
        self._mailbox.send(to, kind, self.run, self.index(call), content, part=chunk)

    def _receive(
        self, kind: FrameKind, call: ModelFunctionCall, sender: int, *, chunk: int
    ) -> tuple[dict[str, Any], dict[str, Samples]]:
        return decode_message(self._mailbox.receive(kind, self.run, self.index(call), sender, part=chunk))


def _outline(samples: Samples) -> Samples:
    """Return the samples' numbers, with the lengths of sequences in place of sequences."""
    return Samples(samples.ids, samples.columns).lengths_only()


def _product_columns(samples: Samples, producer: ModelFunctionCall, names: Collection[str]) -> Samples:
    """Return the columns that belong to some of a call's products.

    Columns that the call did not announce belong to its first product. Values per sample of a generating call are left
    out: every rank knows them already.
    """
    kept: dict[str, Column] = {}
    for name, column in samples.columns.items():
        product = name if name in producer.produces else producer.produces[0]
        is_known = producer.kind == "generate" and not isinstance(column, Ragged)
        if product in names and not is_known:
            kept[name] = column
    return Samples(samples.ids, kept, {name: column for name, column in samples.data.items() if name in names})


def _values(samples: Samples) -> dict[str, Tensor]:
    """Return the columns of one value per sample."""
    return {name: column for name, column in samples.columns.items() if isinstance(column, Tensor)}


def _check_complete(call: ModelFunctionCall, made: Samples) -> None:
    missing = [name for name in call.produces if name not in made.columns and name not in made.data]
    if missing:
        raise PlanError(
            f"call {call.name!r} produces {missing[0]!r}, but its method returned {', '.join(made.columns)}; "
            f"return a column of that name"
        )


def _with_objects(made: Samples, prompts: Samples) -> Samples:
    """Give every response its prompt's python objects, which every rank has and which are never sent."""
    if "prompt_id" not in made:
        raise PlanError("a generate call must return the column 'prompt_id', the id of each response's prompt")
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompts.ids.tolist())}
    rows: Sequence[int] = [row_of[prompt_id] for prompt_id in made.tensor("prompt_id").tolist()]
    return made.with_columns(**{name: tuple(column[row] for row in rows) for name, column in prompts.data.items()})
