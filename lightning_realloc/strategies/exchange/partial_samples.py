"""The units of one iteration: samples that a generating rank hands on while it generates others.

Every rank hears what a unit holds: ids, lengths, values per sample. Ranks that infer on it get its sequences with that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.routing import Routes
from lightning_realloc.strategies.exchange.sample_table import Chosen, SampleTable, only_columns, outline

Early = Mapping[str, Sequence[Sequence[int]]]
"""Call -> sample ids of each forward pass that a rank made while others generated."""


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """What a rank works on at once."""

    lengths: list[int]
    """Tokens of all its samples, prompts included."""
    rows: Chosen
    """Those that this rank works on, by their positions in the unit."""


class SampleChunks:
    """Sends and receives the units of an iteration's generating calls, on one rank.

    Args:
        routes: Who works on what.
        mailbox: Between the ranks.
        rank: This process.
        run: Number of the walk through the calls, the same on all ranks.
    """

    def __init__(self, routes: Routes, mailbox: Mailbox, *, rank: int, run: int) -> None:
        self._routes, self._mailbox, self._rank, self._run = routes, mailbox, rank, run
        self._index = {call.name: index for index, call in enumerate(routes.calls)}
        self._directories: dict[tuple[str, int, int], Samples | None] = {}
        """(call, part, sender) -> what all ranks know of a unit; None: it is empty."""
        self._rows: dict[tuple[str, int, int], Samples] = {}
        self._sent: defaultdict[str, list[Samples]] = defaultdict(list)
        self._early: dict[tuple[str, int], Early] = {}
        """(call, sender) -> what it did in other calls while others generated; only what was done at all."""
        self._clocks: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        """(call, sender) -> when its units were sent, on its clock, and when they were taken in, on this rank's."""

    # ---- generating
    def send(self, call: ModelFunctionCall, made: Samples) -> None:
        """Hand on some samples while others are generated."""
        made = made.sorted_by_id()
        number = len(self._sent[call.name])
        self._sent[call.name].append(made)
        self._send(call, number, made)

    def send_rest(self, call: ModelFunctionCall, made: Samples | None, early: Early) -> None:
        """Hand on what was not handed on before of everything that a call made, and tell what was done early.

        Raises:
            PlanError: where the call did not make what it handed on.
        """
        sent, last = self._sent[call.name], self._routes.fusion.parts(call) - 1
        rest = made
        if sent:
            rest = _remainder(call, made, Samples.concatenate(sent))
        for number in range(len(sent), last):
            self._send(call, number, None)
        self._early[call.name, self._rank] = early
        self._send(call, last, None if rest is None or not len(rest) else rest.sorted_by_id(), early)

    def _send(self, call: ModelFunctionCall, number: int, made: Samples | None, early: Early | None = None) -> None:
        known = None if made is None else outline(made)
        self._directories[call.name, number, self._rank] = known
        info = {"sent_s": time.perf_counter(), "early": early or {}}
        content = encode_message(info, {} if known is None else {"made": known})
        self._send_frame(self._mailbox.others, FrameKind.DIRECTORY, call, number, content)
        if made is None or not self._routes.fusion.sources:
            return
        lengths = lengths_of(made)
        for rank in self._mailbox.others:
            positions = self._routes.fusion.worked_on(call, rank, lengths)
            if positions:
                rows = only_columns(made.select(positions), call, set(call.produces))
                self._send_frame((rank,), FrameKind.ROWS, call, number, encode_message({}, {"rows": rows}))

    def _send_frame(
        self, to: tuple[int, ...], kind: FrameKind, call: ModelFunctionCall, number: int, content: Tensor
    ) -> None:
        self._mailbox.send(to, kind, self._run, self._index[call.name], content, part=number)

    # ---- receiving
    def known(self, call: ModelFunctionCall, number: int, sender: int) -> Samples | None:
        """Return what all ranks know of a unit, None if it is empty; waits for it."""
        name = (call.name, number, sender)
        if name not in self._directories:
            content = self._mailbox.receive(FrameKind.DIRECTORY, self._run, self._index[call.name], sender, part=number)
            info, parts = decode_message(content)
            self._directories[name] = parts.get("made")
            self._clocks[call.name, sender].append((info["sent_s"], time.perf_counter()))
            if info["early"]:
                self._early[call.name, sender] = info["early"]
        return self._directories[name]

    def early(self, call: ModelFunctionCall, sender: int) -> Early:
        """Return what a rank did early of a generating call's samples, once its last unit is known."""
        return self._early.get((call.name, sender), {})

    def rows(self, call: ModelFunctionCall, number: int, sender: int) -> Samples | None:
        """Return the sequences of a unit that this rank works on in fused calls, None if there are none."""
        name = (call.name, number, sender)
        known = self.known(call, number, sender)
        if known is None or not self._positions(call, known):
            return None
        if name not in self._rows:
            content = self._mailbox.receive(FrameKind.ROWS, self._run, self._index[call.name], sender, part=number)
            self._rows[name] = decode_message(content)[1]["rows"]
        return self._rows[name]

    def unit(self, call: ModelFunctionCall, number: int, sender: int) -> SampleChunk | None:
        """Return a unit as this rank works on it, None if there is nothing to do; waits for it."""
        known, rows = self.known(call, number, sender), self.rows(call, number, sender)
        if known is None or rows is None:
            return None
        positions = self._positions(call, known)
        chosen = known.select(positions)
        values = {name: column for name, column in chosen.columns.items() if isinstance(column, Tensor)}
        return SampleChunk(lengths_of(known), Chosen(rows.with_columns(**values), positions))

    def over_at(self, call: ModelFunctionCall) -> float:
        """Return when the last unit arrived here, by ``time.perf_counter()``, once all have been taken in.

        It may have waited for this rank to take it in. But the unit that waited least tells how the clocks differ.
        """
        ends = []
        for (name, _), times in self._clocks.items():
            if name == call.name:
                ends.append(times[-1][0] + min(taken - sent for sent, taken in times))
        return max(ends)

    def _positions(self, call: ModelFunctionCall, known: Samples) -> tuple[int, ...]:
        return self._routes.fusion.worked_on(call, self._rank, lengths_of(known))


def lengths_of(unit: Samples) -> list[int]:
    """Return the tokens of a unit's samples, prompts included."""
    return SampleTable(unit, is_batch=False).lengths


def check_unchanged(call: ModelFunctionCall, made: Samples | None, sent: Samples) -> None:
    """Refuse a call that made other samples than other calls have worked on.

    Raises:
        PlanError: which says what to do.
    """
    if made is None or not set(sent.ids.tolist()).issubset(made.ids.tolist()) or not made.by_ids(sent.ids).equals(sent):
        raise PlanError(
            f"call {call.name!r} returned other samples than sample_responses handed on while it ran; return them as "
            f"they are, and leave changes to a call of their own, or set ReallocStrategy(generation_parts=1)"
        )


def _remainder(call: ModelFunctionCall, made: Samples | None, sent: Samples) -> Samples:
    check_unchanged(call, made, sent)
    assert made is not None, "checked before"
    ids = set(sent.ids.tolist())
    return made.select([row for row, sample_id in enumerate(made.ids.tolist()) if sample_id not in ids])
