"""The data of one walk through the calls: who made what, who needs it, and how it gets there.

What a call made stays where it was made, and goes once, from one of its holders, to every rank that works on it later.
Ranks do not meet for that: whoever has something sends it, whoever needs something waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.codec import all_gather_samples, decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.chunk_results import ChunkResults
from lightning_realloc.strategies.exchange.partial_samples import Early, SampleChunk, SampleChunks
from lightning_realloc.strategies.exchange.routing import Routes, table_owner
from lightning_realloc.strategies.exchange.sample_table import Chosen, Holders, SampleTable, only_columns, outline

REST = -1
"""The part of a call's rows that did not go with a unit."""
_CARRIED = "carried over"
"""Beside the names of calls: what generating calls left for the next iteration."""
_SHOWN = "shown"
"""Beside the names of calls: the first responses, for people to read."""


class IterationData:
    """What this rank holds and owes in one walk through ``routes.calls``.

    Args:
        batch: What the loader supplied, the same on every rank.
        routes: Who works on what.
        mailbox: Between the ranks.
        rank: This process.
        run: Number of the walk, the same on all ranks.
        version: Batches that had been trained on when it began.
    """

    def __init__(
        self, batch: Samples, routes: Routes, mailbox: Mailbox, *, rank: int, run: int, version: int = 0
    ) -> None:
        self.routes = routes
        self.run = run
        self.version = version
        self.facts: dict[str, float] = {}
        """What this rank has to tell of the calls."""
        self._mailbox, self._rank = mailbox, rank
        self._batch = SampleTable(batch, is_batch=True)
        self._made: dict[str, SampleTable] = {}
        self._made_by: dict[str, Holders] = {}
        self._received: set[str] = set()
        self._owners = {call.name: table_owner(call, routes.calls) for call in routes.calls}
        self._index = {call.name: index for index, call in enumerate(routes.calls)}
        self._units = SampleChunks(routes, mailbox, rank=rank, run=run)
        self.carried: Samples | None = None
        """What generating calls left for the next iteration on all ranks, by id, once notes were received."""
        self._my_carried: list[Samples] = []
        self.num_shown = 0
        """Of how many samples all ranks are told the responses."""
        self._shown: Samples | None = None
        self._mine: dict[str, Samples] = {}
        self._early: dict[str, ChunkResults] = {}
        self._notes: dict[str, Samples] | None = None
        """What this rank told; None: nothing yet."""

    # ---- before a call
    def table(self, call: ModelFunctionCall) -> SampleTable:
        """Return the samples that ``call`` works on; waits until their lengths are known here."""
        owner = self._owners[call.name]
        return self._batch if owner is None else self._made_table(owner)

    def inputs(self, call: ModelFunctionCall) -> Samples | None:
        """Return the rows and columns that this rank needs for ``call``, in the table's order; None without part in it.

        Waits for what is on its way.
        """
        table = self.table(call)
        positions = self.routes.worked_on(call, self._rank, table, self._holders_of_table(call))
        if not positions:
            return None
        columns: dict[str, Column] = {}
        data: dict[str, tuple[object, ...]] = {}
        chosen = table.known.select(positions)
        for name in dict.fromkeys(self.routes.needs(call, self._rank)):
            producer = self._producer(name)
            if producer is None:  # the loader
                columns |= chosen.columns if table.is_batch else {}
                continue
            self._receive(producer, table)
            rows = table.rows(producer.name, positions)
            columns |= rows.columns
            data |= rows.data
            if producer.kind == "generate":
                columns |= {n: c for n, c in chosen.columns.items() if isinstance(c, torch.Tensor)}
        return Samples(chosen.ids, columns, data | dict(chosen.data))

    def chosen(self, call: ModelFunctionCall) -> Chosen:
        """Return the inputs of a call that this rank takes part in, to be picked from by position."""
        rows = self.inputs(call)
        assert rows is not None, f"rank {self._rank} has no part in {call.name}"
        positions = self.routes.worked_on(call, self._rank, self.table(call), self._holders_of_table(call))
        return Chosen(rows, positions)

    def units(self, source: ModelFunctionCall) -> Iterator[SampleChunk]:
        """Yield what this rank infers on of a generating call's samples, as they come; waits for all of them."""
        for number in range(self.routes.fusion.parts(source)):
            for sender in self._senders(source):
                unit = self._units.unit(source, number, sender)
                if unit is not None:
                    yield unit

    def source(self, call: ModelFunctionCall) -> ModelFunctionCall:
        """Return the generating call that a fused call takes samples of."""
        name = self.routes.fusion.sources[call.name]
        return next(source for source in self.routes.calls if source.name == name)

    def over_at(self, source: ModelFunctionCall) -> float:
        """Return when a generating call was over, by this rank's ``time.perf_counter()``; after its last unit."""
        return self._units.over_at(source)

    def index(self, call: ModelFunctionCall) -> int:
        """Return a call's place in this walk."""
        return self._index[call.name]

    # ---- during a generating call, and after any
    def send_chunk(self, call: ModelFunctionCall, made: Samples) -> None:
        """Hand on some of the samples that a generating call makes here, while it makes others."""
        if self._rank in self._senders(call):
            self._units.send(call, made)

    def record_early(self, work: Mapping[str, ChunkResults]) -> None:
        """Keep what calls made here of samples that were finished, while other ranks generated."""
        self._early |= work
        self.facts |= {f"hidden_s/{name}": done.seconds for name, done in work.items()}

    def early(self, call: ModelFunctionCall) -> ChunkResults:
        """Return what was done of a call before its turn."""
        return self._early.get(call.name, ChunkResults())

    def early_seconds(self, call: ModelFunctionCall) -> float:
        """Return the seconds of a call that passed before its turn; for a generating call, less what others took."""
        tails = self.routes.fusion.tails
        others = sum(work.seconds for name, work in self._early.items() if tails[name] == call.name)
        return self.early(call).seconds - others

    def publish_samples(self, call: ModelFunctionCall, made: Samples | None) -> None:
        """Hand on what a generating call made here; None on a rank without part in it, or without anything to do."""
        speaks = self._rank in self._senders(call)
        if speaks:
            self._units.send_rest(call, made, self._early_of(call))
        if made is None and not speaks:
            return
        table = self._made_table(call)
        if made is not None:
            if speaks:
                self._mine[call.name] = made
            self._hold_and_send(call, table, made)

    def carry(self, call: ModelFunctionCall, samples: Samples) -> None:
        """Leave some of what a generating call made here for the next iteration; all ranks will be told of it."""
        if len(samples) and self._rank in self._senders(call):
            self._my_carried.append(samples.sorted_by_id())

    def publish_columns(self, call: ModelFunctionCall, made: Samples | None) -> None:
        """Hand on what an infer or compute call made here of its samples; None without part in it."""
        if made is None:
            return
        table = self.table(call)
        holders = self.routes.holders(call, table, self._holders_of_table(call))
        self._check_complete(call, made)
        positions = [p for p, ranks in enumerate(holders) if ranks[0] == self._rank]
        if positions:
            self._mine[call.name] = made.by_ids(table.ids(positions))
        self._hold_and_send(call, table, made)

    # ---- at the end
    def send_notes(self) -> None:
        """Tell all ranks what was made here per sample, what is carried on, and the facts about the calls."""
        made = {name: outline(part) for name, part in self._mine.items() if name not in self._made}
        if self._my_carried:
            made[_CARRIED] = Samples.concatenate(self._my_carried)
        if (shown := self._my_shown()) is not None:
            made[_SHOWN] = shown
        self._notes = made
        content = encode_message(self.facts, made)
        self._mailbox.send(self._mailbox.others, FrameKind.CALL_METRICS, self.run, 0, content)

    def receive_notes(self) -> dict[str, float]:
        """Learn what all ranks made per sample; return their facts, of each the largest value."""
        parts: dict[str, list[Samples]] = {}
        facts: dict[str, float] = {}
        for rank in sorted((*self._mailbox.others, self._rank)):
            if rank == self._rank:
                told, made = self.facts, self._notes or {}
            else:
                told, made = decode_message(self._mailbox.receive(FrameKind.CALL_METRICS, self.run, 0, rank))
            facts |= {name: max(value, facts.get(name, value)) for name, value in told.items()}
            for name, part in made.items():
                parts.setdefault(name, []).append(part)
        if _CARRIED in parts:
            self.carried = Samples.concatenate(parts[_CARRIED]).sorted_by_id()
        if _SHOWN in parts:
            self._shown = Samples.concatenate(parts[_SHOWN])
        for call in self.routes.calls:
            if call.name in parts:
                table = self.table(call)
                table.learn(dict(Samples.concatenate(parts[call.name]).by_ids(table.known.ids).columns))
        return facts

    def drain(self, calls: Sequence[ModelFunctionCall]) -> None:
        """Wait for what other ranks sent of these calls, though nobody will work on it: senders wait for that."""
        for call in calls:
            self._receive(call, self._made_table(call) if call.kind == "generate" else self.table(call))
        if self._notes is not None:
            self.receive_notes()

    def known(self) -> Samples:
        """Return the last set of samples, with what every rank knows of them: sequences by their lengths alone."""
        return self._last_table().known.lengths_only()

    def shown(self) -> Samples | None:
        """Return the first samples by id as :meth:`known`, with their responses; None where none were asked for."""
        if not self.num_shown:
            return None
        known = self._last_table().known.sorted_by_id()
        first = known.select(range(min(self.num_shown, len(known))))
        if self._shown is None:  # the loader's batch, which is known whole
            return first
        return first.with_columns(response_ids=self._shown.by_ids(first.ids).ragged("response_ids"))

    def gather(self, device: torch.device) -> Samples:
        """Return the last set of samples with everything that was made of them, on every rank. Collective."""
        table = self._last_table()
        complete = table.known if table.is_batch else None
        for call in self.routes.calls:
            if call.kind == "train" or (call.kind != "generate" and self.table(call) is not table):
                continue
            if call.kind == "generate" and self._made.get(call.name) is not table:
                continue
            made = all_gather_samples(self._mine.get(call.name), device=device)
            complete = made if complete is None else complete.with_columns(**made.by_ids(complete.ids).columns)
        assert complete is not None
        return complete.with_columns(**table.known.data)

    # ---- inside
    def _early_of(self, source: ModelFunctionCall) -> Early:
        tails = self.routes.fusion.tails
        return {
            name: [part.ids.tolist() for part in work.parts]
            for name, work in self._early.items()
            if work.parts and tails[name] == source.name
        }

    def _my_shown(self) -> Samples | None:
        """Return the first responses that were made here; the first of all ranks are among those of each."""
        generating = [call.name for call in self.routes.calls if call.kind == "generate"]
        mine = self._mine.get(generating[-1]) if generating else None
        if not self.num_shown or mine is None or "response_ids" not in mine:
            return None
        first = mine.sorted_by_id().select(range(min(self.num_shown, len(mine))))
        return Samples(first.ids, {"response_ids": first.ragged("response_ids")})

    def _last_table(self) -> SampleTable:
        tables = [self._made_table(call) for call in self.routes.calls if call.kind == "generate"]
        return tables[-1] if tables else self._batch

    def _producer(self, name: str) -> ModelFunctionCall | None:
        return next((call for call in self.routes.calls if name in call.produces), None)

    def _senders(self, call: ModelFunctionCall) -> tuple[int, ...]:
        place = self.routes.placements[call.name]
        return tuple(place.holders(index)[0] for index in range(place.layout.data_parallel_size))

    def _made_table(self, call: ModelFunctionCall) -> SampleTable:
        """Return what a generating call made; waits for the ranks that made it."""
        if call.name in self._made:
            return self._made[call.name]
        parts: list[tuple[tuple[int, ...], Samples]] = []
        for number in range(self.routes.fusion.parts(call)):
            for index, sender in enumerate(self._senders(call)):
                part = self._units.known(call, number, sender)
                if part is not None:
                    parts.append((self.routes.placements[call.name].holders(index), part))
        if not parts:
            raise PlanError(f"call {call.name!r} made no samples; it must return at least one response")
        known = _with_objects(Samples.concatenate([part for _, part in parts]).sorted_by_id(), self.table(call).known)
        holder_of = {sample_id: holders for holders, part in parts for sample_id in part.ids.tolist()}
        row_of = {sample_id: row for row, sample_id in enumerate(known.ids.tolist())}
        units = [[row_of[sample_id] for sample_id in part.ids.tolist()] for _, part in parts]
        early: dict[str, dict[int, list[tuple[int, ...]]]] = {}
        for sender in self._senders(call):
            for name, packs in self._units.early(call, sender).items():
                early.setdefault(name, {})[sender] = [tuple(row_of[sample_id] for sample_id in pack) for pack in packs]
        self._made[call.name] = SampleTable(known, is_batch=False, units=units, early=early)
        self._made_by[call.name] = [holder_of[sample_id] for sample_id in known.ids.tolist()]
        return self._made[call.name]

    def _holders_of_table(self, call: ModelFunctionCall) -> Holders | None:
        owner = self._owners[call.name]
        if owner is None:
            return None
        self._made_table(owner)
        return self._made_by[owner.name]

    def _holders(self, producer: ModelFunctionCall, table: SampleTable) -> Holders:
        if producer.kind == "generate":
            return self._made_by[producer.name]
        return self.routes.holders(producer, table, self._holders_of_table(producer))

    def _wanted(self, producer: ModelFunctionCall, table: SampleTable, rank: int) -> tuple[set[int], set[str]]:
        """Return the positions and names of ``producer`` that ``rank`` needs in later calls."""
        positions: set[int] = set()
        names: set[str] = set()
        for user in self.routes.users(producer):
            needed = set(self.routes.needs(user, rank)).intersection(producer.produces)
            rows = self.routes.worked_on(user, rank, table, self._holders_of_table(user)) if needed else ()
            if rows:
                positions.update(rows)
                names.update(needed)
        if producer.kind == "generate" and self.routes.fusion.users(producer, rank):
            names.update(producer.produces)  # as in every unit: what a rank holds of a call has the same columns
        return positions, names

    def _came_early(self, producer: ModelFunctionCall, table: SampleTable, rank: int) -> set[int]:
        """Return the positions of ``producer`` that ``rank`` got with the units."""
        users = self.routes.fusion.users(producer, rank)
        return {p for user in users for p in self.routes.worked_on(user, rank, table, None)}

    def _hold_and_send(self, producer: ModelFunctionCall, table: SampleTable, made: Samples) -> None:
        holders = self._holders(producer, table)
        position_of = {sample_id: position for position, sample_id in enumerate(table.ids(range(len(table))))}
        mine = [position_of[sample_id] for sample_id in made.ids.tolist()]
        sending = {position for position in mine if holders[position][0] == self._rank}
        _, names = self._wanted(producer, table, self._rank)
        table.hold(producer.name, only_columns(made, producer, names))
        for rank in self._mailbox.others:
            positions, names = self._wanted(producer, table, rank)
            later = (positions & sending) - self._came_early(producer, table, rank)
            rows = sorted(p for p in later if rank not in holders[p])
            if rows:
                content = encode_message({}, {"rows": only_columns(made.by_ids(table.ids(rows)), producer, names)})
                self._mailbox.send([rank], FrameKind.ROWS, self.run, self._index[producer.name], content, part=REST)

    def _receive(self, producer: ModelFunctionCall, table: SampleTable) -> None:
        """Wait for what other ranks made and this one needs, in this call or a later one."""
        if producer.name in self._received:
            return
        self._received.add(producer.name)
        holders = self._holders(producer, table)
        positions, _ = self._wanted(producer, table, self._rank)
        positions -= self._hold_units(producer, table)
        for sender in sorted({holders[p][0] for p in positions if self._rank not in holders[p]}):
            content = self._mailbox.receive(FrameKind.ROWS, self.run, self._index[producer.name], sender, part=REST)
            table.hold(producer.name, decode_message(content)[1]["rows"])

    def _hold_units(self, producer: ModelFunctionCall, table: SampleTable) -> set[int]:
        """Keep the sequences that came with units; return their positions."""
        early = self._came_early(producer, table, self._rank)
        if early:
            for number in range(self.routes.fusion.parts(producer)):
                for sender in self._senders(producer):
                    rows = self._units.rows(producer, number, sender)
                    if rows is not None:
                        table.hold(producer.name, rows)
        return early

    def _check_complete(self, call: ModelFunctionCall, made: Samples) -> None:
        missing = [name for name in call.produces if name not in made.columns and name not in made.data]
        if missing:
            raise PlanError(
                f"call {call.name!r} produces {missing[0]!r}, but its method returned {', '.join(made.columns)}; "
                f"return a column of that name"
            )


def _with_objects(made: Samples, prompts: Samples) -> Samples:
    """Give every response its prompt's python objects, which every rank has and nobody sent."""
    if "prompt_id" not in made:
        raise PlanError("a generate call must return the column 'prompt_id', the id of each response's prompt")
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompts.ids.tolist())}
    rows: Sequence[int] = [row_of[prompt_id] for prompt_id in made.tensor("prompt_id").tolist()]
    return made.with_columns(**{name: tuple(column[row] for row in rows) for name, column in prompts.data.items()})
