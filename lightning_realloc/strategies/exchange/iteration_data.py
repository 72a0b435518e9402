"""Hold one rank's samples of an iteration, and exchange results with other ranks.

Results stay on the ranks that made them. One holder sends them once to every rank that needs them in a later call. A
sender does not wait; a receiver waits only for its own inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_realloc.batch.samples import RECORD, Column, Samples, samples_state
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.codec import all_gather_samples
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.generated_samples import ChunkedSamples, GeneratedSamples, RunMessages
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.exchange.routing import Routes
from lightning_realloc.strategies.exchange.sample_table import (
    PositionedRows,
    SampleTable,
    outline,
    product_columns,
    values_of,
)

REST = -1
"""Part of a call's results that is sent after all chunks."""


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
        self._messages = RunMessages(mailbox, run, routes.calls)
        self._batch = SampleTable(batch)
        self._generated: dict[str, GeneratedSamples] = {}
        """Generating call -> its samples."""
        for call in routes.calls:
            if call.kind == "generate":
                kind = ChunkedSamples if routes.fusion.num_chunks_of(call) > 1 else GeneratedSamples
                self._generated[call.name] = kind(call, routes, self._messages, rank)
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
        return self._batch if owner is None else self._made_by(owner)

    def inputs(self, call: ModelFunctionCall) -> Samples | None:
        """Return the samples that this rank needs for ``call``, in the table's order; None if it needs none.

        Waits for results that other ranks make.
        """
        table = self.table(call)
        positions = self.routes.positions(call, self._rank, table)
        if not len(positions):
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
                columns |= values_of(known)
        return Samples(known.ids, columns, data | dict(known.data))

    def rows(self, call: ModelFunctionCall) -> PositionedRows:
        """Return the inputs of a call that this rank takes part in, by their positions in the table."""
        samples = self.inputs(call)
        assert samples is not None, f"rank {self._rank} has no part in {call.name}"
        return PositionedRows(samples, self.routes.positions(call, self._rank, self.table(call)))

    def chunked(self, call: ModelFunctionCall) -> ChunkedSamples | None:
        """Return the samples of a generating call that come in chunks, None if they come at its end."""
        generated = self._generated[call.name]
        return generated if isinstance(generated, ChunkedSamples) else None

    def index(self, call: ModelFunctionCall) -> int:
        """Return a call's place in running order."""
        return self.routes.calls.index(call)

    # ---- results of a call
    def carry(self, call: ModelFunctionCall, samples: Samples) -> None:
        """Leave some samples of a generating call for the next iteration; the report sends them to all ranks."""
        if len(samples) and self._generated[call.name].is_sender:
            self.report.add_carried(samples)

    def record(self, call: ModelFunctionCall, made: Samples | None) -> None:
        """Keep and send the results of a call on this rank; None without part in it, or without samples.

        Results of a generating call hold its whole responses, including those that were sent in chunks.
        The senders of a generating call record it without samples, too: other ranks wait for their chunks.

        Raises:
            PlanError: if the call returned other columns than it produces, or changed samples that it had sent.
        """
        generated = self._generated.get(call.name)
        if generated is not None and generated.is_sender:
            generated.finish(made)
        if made is None:
            return
        table = self._made_by(call)
        if generated is None:
            _check_complete(call, made)
        is_mine = self.routes.holders(call, table).senders[table.positions(made)] == self._rank
        if is_mine.any():
            self._mine[call.name] = made if is_mine.all() else made.select(np.flatnonzero(is_mine))
        self._held[call.name].append(product_columns(made, call, self.routes.products(call, self._rank, table)))
        outgoing = self.routes.outgoing(call, self._rank, table)
        if not outgoing:
            return
        rows = made.rows_of(table.ids(np.concatenate(list(outgoing.values())))).numpy()
        edges = np.cumsum([len(positions) for positions in outgoing.values()])[:-1]
        parts = Samples(made.ids, made.columns).select_parts(np.split(rows, edges))
        for receiver, part in zip(outgoing, parts, strict=True):
            samples = product_columns(part, call, self.routes.products(call, receiver, table))
            self._messages.send([receiver], FrameKind.ROWS, call, samples, part=REST)

    def _receive_results(self, producer: ModelFunctionCall, table: SampleTable) -> None:
        """Receive the results of other ranks that this one needs, in this call or a later one."""
        if producer.name in self._received:
            return
        self._received.add(producer.name)
        generated = self._generated.get(producer.name)
        if isinstance(generated, ChunkedSamples):
            self._held[producer.name] += generated.rows()
        for sender in self.routes.senders(producer, self._rank, table):
            self._held[producer.name].append(self._messages.receive(FrameKind.ROWS, producer, sender, part=REST))

    def _made_by(self, call: ModelFunctionCall) -> SampleTable:
        """Return the samples that the results of a call belong to; waits until their lengths are known here."""
        generated = self._generated.get(call.name)
        return self.table(call) if generated is None else generated.table(self.table(call).known)

    # ---- after the calls
    def send_report(self) -> None:
        """Give this rank's report to all ranks: metrics, values per sample, and samples for the next iteration."""
        values = {name: made for name, made in self._mine.items() if name not in self._generated}
        self.report.values = {name: outline(made) for name, made in values.items()}
        self.report.shown, self.report.num_shown = self._my_shown(), self._num_shown
        self._has_sent_report = True
        ranks = range(1 + len(self._mailbox.others))
        self._mailbox.share(FrameKind.CALL_METRICS, self.run, 0, self.report, ranks)

    def receive_report(self) -> IterationReport:
        """Return the merged reports of all ranks, and add the values that they made to the tables."""
        merged: IterationReport = self._mailbox.receive_whole(FrameKind.CALL_METRICS, self.run, 0)
        for call in self.routes.calls:
            if call.name in merged.values:
                table = self.table(call)
                table.add_columns(merged.values[call.name].by_ids(table.known.ids).columns)
        return merged

    def drain(self, calls: Sequence[ModelFunctionCall]) -> None:
        """Receive and drop the results of these calls, which their senders keep until then."""
        for call in calls:
            self._receive_results(call, self._made_by(call))
        if self._has_sent_report:
            self.receive_report()

    def known(self) -> Samples:
        """Return the last set of samples as every rank knows it: of sequences the lengths."""
        return self._last_table().known.lengths_only()

    def shown(self, report: IterationReport) -> Samples | None:
        """Return the first samples by id as :meth:`known`, with responses and records; None if none are to be shown.

        ``report`` is the merged one of all ranks.
        """
        if not self._num_shown:
            return None
        known = self._last_table().known.sorted_by_id()
        first = known.select(range(min(self._num_shown, len(known))))
        if report.shown is None:  # the loader's batch, which is known whole
            return first
        return first.with_columns(**report.shown.by_ids(first.ids).columns)

    def gather(self) -> Samples:
        """Return the last set of samples with all results of calls on it, on every rank. Collective."""
        last = self._last_table()
        complete = last.known if last is self._batch else None
        for call in self.routes.calls:
            if call.kind == "train" or self._made_by(call) is not last:
                continue
            made = all_gather_samples(self._mine.get(call.name))
            complete = made if complete is None else complete.with_columns(**made.by_ids(complete.ids).columns)
        assert complete is not None
        return complete.with_columns(**last.known.data)

    # ---- checkpoints
    def state(self) -> dict[str, Any]:
        """Return the batch as plain data, equal on all ranks."""
        return {
            "batch": samples_state(self._batch.known),
            "calls": [call.name for call in self.routes.calls],
            "version": self.version,
        }

    def results_at_once(self) -> dict[str, Samples]:
        """Return this rank's results of calls that ran at once, by call."""
        at_once = {call.name: self._mine[call.name] for call in self.routes.calls_at_once() if call.name in self._mine}
        return {name: Samples(made.ids, made.columns) for name, made in at_once.items()}

    def restore(self, made: Mapping[str, Samples]) -> None:
        """Record stored results of calls that ran at once, of this rank or of more, by any plan and number of ranks."""
        for call in self.routes.calls_at_once():
            self.record(call, self._part_of(call, made.get(call.name)))

    def _part_of(self, call: ModelFunctionCall, made: Samples | None) -> Samples | None:
        """Return the results that this rank would have made; None without any."""
        table = self.table(call)
        ids = table.ids(self.routes.positions(call, self._rank, table))
        if made is None or not len(ids):
            return None
        if call.kind == "compute":
            return made.by_ids(ids)
        place = self.routes.placements[call.name]
        if self._rank not in place.holders[place.layout.data_parallel_index(self._rank)]:
            return None
        prompts = set(ids.tolist())
        rows = [row for row, prompt in enumerate(made.tensor("prompt_id").tolist()) if prompt in prompts]
        return made.select(rows) if rows else None

    def _my_shown(self) -> Samples | None:
        """Return this rank's first responses by id, with what is recorded about them.

        All ranks together report those of the first samples.
        """
        mine = self._mine.get(list(self._generated)[-1]) if self._generated else None
        if not self._num_shown or mine is None or "response_ids" not in mine:
            return None
        first = mine.sorted_by_id().select(range(min(self._num_shown, len(mine))))
        shown = ["response_ids", *(name for name in first.columns if name.startswith(RECORD))]
        return Samples(first.ids, {name: first.columns[name] for name in shown})

    def _last_table(self) -> SampleTable:
        generating = [call for call in self.routes.calls if call.kind == "generate"]
        return self._made_by(generating[-1]) if generating else self._batch


def _check_complete(call: ModelFunctionCall, made: Samples) -> None:
    missing = [name for name in call.produces if name not in made.columns and name not in made.data]
    if missing:
        raise PlanError(
            f"call {call.name!r} produces {missing[0]!r}, but its method returned {', '.join(made.columns)}; "
            f"return a column of that name"
        )
