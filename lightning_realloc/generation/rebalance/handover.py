"""Hand samples over between ranks as planned, and bring finished ones back to the rank that asked for them.

Both ranks of a move know of it from the same plan. The tokens of a queued sample travel in one message of about a
kilobyte. A running sample may send its keys and values ahead; see `KVTransfer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.sample_access import SampleAccess, foreign_prompt_number
from lightning_realloc.generation.rebalance.kv_transfer import KVTransfer
from lightning_realloc.generation.rebalance.load import LiveSample, SampleMove
from lightning_realloc.generation.rebalance.migrated_sample import (
    KVSpan,
    MigratedSample,
    SampleOrigin,
    pack_samples,
    unpack_samples,
)
from lightning_realloc.generation.rebalance.pace import Agree, PaceEstimator
from lightning_realloc.generation.rebalance.peers import Peers
from lightning_realloc.runtime.messages.bulk_messages import PendingReceive, PendingSend
from lightning_realloc.runtime.messages.mailbox import FrameKind


@dataclass(slots=True)
class MigrationStats:
    """Samples that moved from and to this rank in one call, and their cost."""

    num_sent: int = 0
    """Samples that left."""
    num_received: int = 0
    """Samples that arrived."""
    bytes_sent: int = 0
    stall_s: float = 0.0
    """Seconds in which packing and unpacking samples kept this rank from decoding."""
    waited_s: float = 0.0
    """Seconds without a sample, or waiting for reports."""
    num_rounds: int = 0


@dataclass(slots=True)
class Shipment:
    """Moves from one rank to another that were planned in one round."""

    number: int
    """Number of the message with keys and values; that of the samples is one higher."""
    moves: tuple[SampleMove, ...]
    planned_in: int
    """Round of the plan."""
    message: PendingReceive | None = None
    """To this rank: its samples. From this rank: None."""
    expected: dict[int, LiveSample] = field(default_factory=dict)
    """To this rank: its samples by id, as reported. Some may stay where they are and come with a later shipment."""
    sent: set[int] = field(default_factory=set)
    """From this rank: numbers of the messages that were sent."""

    @property
    def has_kv(self) -> bool:
        """Whether keys and values travel."""
        return any(move.how == "send" for move in self.moves)


class SampleHandover:
    """Samples that travel from and to one rank in one call.

    Args:
        access: Samples of this rank.
        peers: The other ranks.
        pace: Learns how long transfers and handovers take.
        agree: Where ranks share a tensor-parallel model.
        clock: Returns seconds.
    """

    def __init__(
        self, access: SampleAccess, peers: Peers, pace: PaceEstimator, agree: Agree | None, clock: Callable[[], float]
    ) -> None:
        self._access = access
        self._peers = peers
        self._pace = pace
        self._agree = agree
        self._clock = clock
        self._kv = KVTransfer(access, pace)
        self._origins = {i: SampleOrigin(peers.rank, i, s.prompt_number) for i, s in enumerate(access.samples)}
        self._away: set[int] = set()
        """Indices of samples that left and have not returned."""
        self._arriving: list[Shipment] = []
        self._leaving: list[Shipment] = []
        self._sent: dict[int, deque[tuple[int, PendingSend]]] = {other: deque() for other in peers.others}
        """(planned_in, message) by target. A message holds memory until the target has taken it in."""
        self.moved_in: dict[int, int] = {}
        """Sample id -> round in which it last came to this rank."""
        self.any_moves = False
        """Whether samples were to move between any two ranks in this call."""
        self.stats = MigrationStats()

    @property
    def outgoing(self) -> set[int]:
        """Ids of the samples that are about to leave."""
        return {move.sample_id for shipment in self._leaving for move in shipment.moves}

    @property
    def incoming(self) -> dict[int, LiveSample]:
        """Samples on their way to this rank, by id, as reported."""
        return {sample_id: sample for shipment in self._arriving for sample_id, sample in shipment.expected.items()}

    @property
    def is_expecting(self) -> bool:
        """Whether samples are on their way to this rank."""
        return bool(self._arriving)

    def expected_since(self, current_round: int) -> int:
        """Return the round of the oldest shipment on its way to this rank; the next round if there is none."""
        return min((shipment.planned_in for shipment in self._arriving), default=current_round + 1)

    def release(self, expected_since: Mapping[int, float]) -> None:
        """Free the messages that have arrived: those planned before the rounds from which on the targets expect some.

        Waiting for any other message could deadlock: taking it in may need a target that waits for this rank.
        """
        for other, since in expected_since.items():
            sent = self._sent[other]
            while sent and sent[0][0] < since:
                sent.popleft()[1].wait()

    # ---- moves
    def begin(self, moves: Sequence[SampleMove], reported: Iterable[LiveSample], current_round: int) -> None:
        """Begin the moves of a round.

        Args:
            moves: Moves of all ranks.
            reported: Samples of all ranks.
            current_round: Number of the round.
        """
        known = {sample.sample_id: sample for sample in reported}
        groups: dict[tuple[int, int], list[SampleMove]] = {}
        self.any_moves |= bool(moves)
        for move in moves:
            groups.setdefault((move.source, move.target), []).append(move)
        for (source, target), group in groups.items():
            shipment = Shipment(self._peers.next_shipment_number(), tuple(group), current_round)
            if source == self._peers.rank:
                self._begin_to_send(shipment)
            elif target == self._peers.rank:
                shipment.expected = {move.sample_id: known[move.sample_id] for move in group}
                self._begin_to_receive(shipment, source)

    def _begin_to_send(self, shipment: Shipment) -> None:
        self._leaving.append(shipment)
        if not shipment.has_kv:
            self._hand_over(shipment)
            return
        begin = self._clock()
        self._send(shipment, shipment.number, self._kv.send_ahead(shipment.number, shipment.moves))
        self.stats.stall_s += self._clock() - begin

    def _begin_to_receive(self, shipment: Shipment, source: int) -> None:
        channel = self._peers.mailbox.bulk_channel
        if shipment.has_kv:
            self._kv.expect(shipment.number, channel.receive(source, shipment.number))
        shipment.message = channel.receive(source, shipment.number + 1)
        self._arriving.append(shipment)

    def take_in_arrived(self) -> None:
        """Take in the shipments that are here, waiting for none."""
        shipments = list(self._arriving)
        ready = [float(self._has_arrived(shipment)) for shipment in shipments]
        if ready and self._agree is not None:
            ready = list(self._agree(ready))
        for shipment, is_ready in zip(shipments, ready, strict=True):
            if is_ready:
                self._take_in(shipment)

    def _has_arrived(self, shipment: Shipment) -> bool:
        assert shipment.message is not None, "a shipment to this rank"
        return shipment.message.has_arrived() and self._kv.has_arrived(shipment.number)

    def hand_over_all(self) -> None:
        """Let the samples leave whose keys and values were sent ahead."""
        for shipment in list(self._leaving):
            self._hand_over(shipment)

    def wait(self) -> None:
        """Wait for the oldest shipment to this rank and take it in.

        Whatever is to leave leaves first, or two ranks could wait for each other.
        """
        self.hand_over_all()
        shipment = self._arriving[0]
        assert shipment.message is not None, "a shipment to this rank"
        shipment.message.wait()
        self._take_in(shipment)

    def _hand_over(self, shipment: Shipment) -> None:
        """Let samples leave, with the positions that were not sent ahead; finished and held ones stay."""
        begin = self._clock()
        access = self._access
        running = set(access.running)
        index_of = {access.samples[index].sample_id: index for index in (*running, *access.queued)}
        migrated, spans = [], []
        for move in shipment.moves:
            index = index_of.get(move.sample_id)
            if index is None:
                continue
            # A sample that was preempted since is read again, here or there.
            span = self._kv.rest(shipment.number, index) if index in running else None
            spans += [] if span is None else [span]
            num_sent = 0 if span is None else span.begin
            migrated.append(MigratedSample(self._origins[index], access.samples[index], num_sent))
            access.remove(index)
            self._away.add(index)
        self._send(shipment, shipment.number + 1, pack_samples(migrated, spans))
        self._kv.forget(shipment.number)
        self._leaving.remove(shipment)
        self.stats.num_sent += len(migrated)
        self._record_stall(self._clock() - begin, len(spans))

    def _take_in(self, shipment: Shipment) -> None:
        """Let the samples of a shipment run here, or wait for slots."""
        assert shipment.message is not None, "a shipment to this rank"
        ahead, shapes = self._kv.receive(shipment.number)
        migrated, rest, _ = unpack_samples(shipment.message.wait())
        begin = self._clock()
        self._arriving.remove(shipment)
        spans: dict[int, list[KVSpan]] = {}
        for span in (*ahead, *rest):
            spans.setdefault(span.sample_id, []).append(span)
        fresh: dict[int, list[int]] = {}
        for each in migrated:
            index = self._settle(each, shipment.planned_in)
            sample = self._access.samples[index]
            if each.num_sent:
                found = [(span.begin, span.end, span.content) for span in spans[sample.sample_id]]
                self._access.resume(index, found, shapes)
            elif sample.token_ids:
                self._access.resume(index)
            else:
                fresh.setdefault(sample.prompt_number, []).append(index)
        for indices in fresh.values():  # samples of one prompt read it once
            self._access.queue(indices)
        self.stats.num_received += len(migrated)
        self._record_stall(self._clock() - begin, sum(each.num_sent > 0 for each in migrated))

    def _settle(self, migrated: MigratedSample, planned_in: int) -> int:
        """Add a sample to this rank's; return its index."""
        sample, origin = migrated.sample, migrated.origin
        if origin.rank == self._peers.rank:
            self._return(migrated)
            index = origin.index
        else:
            sample.prompt_number = foreign_prompt_number(origin.rank, origin.prompt_number)
            index = self._access.add(sample)
            self._origins[index] = origin
        self.moved_in[sample.sample_id] = planned_in
        return index

    def _return(self, migrated: MigratedSample) -> None:
        """Give one of this rank's samples the state that another rank brought it to."""
        index = migrated.origin.index
        self._away.remove(index)
        self._access.samples[index].adopt(migrated.sample)

    def _send(self, shipment: Shipment, number: int, content: Tensor) -> None:
        self.stats.bytes_sent += content.numel()
        target = shipment.moves[0].target
        sent = self._peers.mailbox.bulk_channel.send(target, number, content)
        shipment.sent.add(number)
        self._sent[target].append((shipment.planned_in, sent))

    def _record_stall(self, seconds: float, num_samples: int) -> None:
        self.stats.stall_s += seconds
        if num_samples:
            self._pace.record_stall(seconds / num_samples)

    # ---- the end of the call
    def bring_back(self) -> list[Sample]:
        """Return samples that finished elsewhere to the ranks that asked for them; return those of this rank."""
        peers, access = self._peers, self._access
        if not self.any_moves:
            return []
        self.release(dict.fromkeys(self._sent, inf))  # all ranks have taken in everything
        peers.num_calls += 1
        for other in peers.others:
            theirs = [
                MigratedSample(origin, access.samples[index])
                for index, origin in self._origins.items()
                if origin.rank == other and index not in self._away
            ]
            content = pack_samples(theirs)
            peers.mailbox.send([other], FrameKind.RETURNED, peers.run, peers.call, content, part=peers.num_calls)
        returned = []
        for other in peers.others:
            content = peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, other, part=peers.num_calls)
            for each in unpack_samples(content)[0]:
                self._return(each)
                returned.append(access.samples[each.origin.index])
        return returned

    def abandon(self) -> None:
        """Send empty messages in place of those that peers wait for; the mailbox reports the failure itself."""
        while self._leaving:
            shipment = self._leaving.pop()
            owed = {shipment.number, shipment.number + 1} if shipment.has_kv else {shipment.number + 1}
            for number in sorted(owed - shipment.sent):
                with suppress(RuntimeError):  # an unreachable peer has ended too
                    self._send(shipment, number, pack_samples())
