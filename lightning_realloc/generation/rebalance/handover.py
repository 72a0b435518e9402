"""Hand samples over between ranks as planned, and bring finished ones back to the rank that asked for them.

Both ranks of a move derive it from the same plan. The tokens of a queued sample travel in one message of about a
kilobyte. A running sample may move with its keys and values in two stages, so that it decodes while most bytes travel.
In the round of the plan, the keys and values so far are sent ahead. In the next round the sample leaves, with the
positions added since.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.sample_access import SampleAccess, foreign_prompt_number
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
class Departure:
    """Samples that leave this rank for another one, planned in one round."""

    moves: list[SampleMove]
    planned_in: int
    """Round of the plan."""
    owed: deque[int]
    """Numbers of the messages that the target still expects: keys and values, if any move, and then the samples."""
    num_ahead: dict[int, int] = field(default_factory=dict)
    """Sample id -> number of positions whose keys and values were sent ahead."""


@dataclass(slots=True)
class Arrival:
    """Samples on their way to this rank, planned in one round."""

    source: int
    """Rank that sends them."""
    planned_in: int
    """Round of the plan."""
    expected: dict[int, LiveSample]
    """Samples by id, as reported. Some may stay where they are and come with a later arrival."""
    message: PendingReceive
    """The samples."""
    kv_message: PendingReceive | None
    """Keys and values sent ahead; None: none are."""

    def is_here(self) -> bool:
        """Return whether all messages have arrived."""
        return self.message.has_arrived() and (self.kv_message is None or self.kv_message.has_arrived())


class SampleHandover:
    """Samples that travel from and to one rank in one call; ``pace`` learns how long transfers and handovers take."""

    def __init__(
        self, access: SampleAccess, peers: Peers, pace: PaceEstimator, agree: Agree | None, clock: Callable[[], float]
    ) -> None:
        self._access = access
        self._peers = peers
        self._pace = pace
        self._agree = agree
        self._clock = clock
        self._origins = {i: SampleOrigin(peers.rank, i, s.prompt_number) for i, s in enumerate(access.samples)}
        self._away: set[int] = set()
        """Indices of samples that left and have not returned."""
        self._arriving: list[Arrival] = []
        self._leaving: list[Departure] = []
        self._sent: dict[int, deque[tuple[int, PendingSend]]] = {other: deque() for other in peers.others}
        """(planned_in, message) by target. A message holds memory until the target has taken it in."""
        self.moved_in: dict[int, int] = {}
        """Sample id -> round in which it last came to this rank."""
        self.any_moves = False
        """Whether any plan of this call had moves, between any ranks."""
        self.stats = MigrationStats()

    @property
    def outgoing(self) -> set[int]:
        """Ids of the samples that are about to leave."""
        return {move.sample_id for departure in self._leaving for move in departure.moves}

    @property
    def incoming(self) -> dict[int, LiveSample]:
        """Samples on their way to this rank, by id, as reported."""
        return {sample_id: sample for arrival in self._arriving for sample_id, sample in arrival.expected.items()}

    def home_of(self, index: int) -> int:
        """Return the rank whose call a sample on this rank belongs to."""
        return self._origins[index].rank

    def expected_since(self, current_round: int) -> int:
        """Return the round that planned the oldest arrival; the next round if none is on its way."""
        return min((arrival.planned_in for arrival in self._arriving), default=current_round + 1)

    def release(self, expected_since: Mapping[int, float]) -> None:
        """Free messages that have arrived: those planned before the round since which their target expects some.

        Waiting for any other message could deadlock: taking it in may need a target that waits for this rank.
        """
        for other, since in expected_since.items():
            sent = self._sent[other]
            while sent and sent[0][0] < since:
                sent.popleft()[1].wait()

    # ---- moves
    def begin(self, moves: Sequence[SampleMove], reported: Iterable[LiveSample], current_round: int) -> None:
        """Begin the moves of a round, given the moves and the reported samples of all ranks."""
        known = {sample.sample_id: sample for sample in reported}
        self.any_moves |= bool(moves)
        groups: defaultdict[tuple[int, int], list[SampleMove]] = defaultdict(list)
        for move in moves:
            groups[move.source, move.target].append(move)
        receive = self._peers.mailbox.bulk_channel.receive
        for (source, target), group in groups.items():
            number = self._peers.next_shipment_number()
            has_kv = any(move.how == "send" for move in group)
            if source == self._peers.rank:
                owed = deque([number, number + 1] if has_kv else [number + 1])
                self._begin_to_send(Departure(group, current_round, owed))
            elif target == self._peers.rank:
                expected = {move.sample_id: known[move.sample_id] for move in group}
                kv_message = receive(source, number) if has_kv else None
                self._arriving.append(Arrival(source, current_round, expected, receive(source, number + 1), kv_message))

    def _begin_to_send(self, departure: Departure) -> None:
        self._leaving.append(departure)
        if len(departure.owed) == 1:
            self._hand_over(departure)
            return
        begin, access = self._clock(), self._access
        shapes = access.describe_cache()
        assert shapes is not None, "no plan sends keys and values that cannot leave"
        index_of = self._by_id(access.running)
        spans = []
        for move in departure.moves:
            if move.how == "send" and move.sample_id in index_of:
                spans.append(self._read_from(index_of[move.sample_id], 0))
                departure.num_ahead[move.sample_id] = spans[-1].end
        self._send(departure, pack_samples(spans=spans, shapes=shapes))
        self.stats.stall_s += self._clock() - begin

    def take_in_arrived(self) -> None:
        """Take in the arrivals that are here, without waiting."""
        arriving = list(self._arriving)
        are_here = [float(arrival.is_here()) for arrival in arriving]
        if arriving and self._agree is not None:
            are_here = list(self._agree(are_here))
        for arrival, is_here in zip(arriving, are_here, strict=True):
            if is_here:
                self._take_in(arrival)

    def hand_over_all(self) -> None:
        """Send the samples whose keys and values were sent ahead."""
        for departure in list(self._leaving):
            self._hand_over(departure)

    def wait(self) -> None:
        """Wait for the oldest arrival and take it in.

        Samples that are to leave do so first, or two ranks could wait for each other.
        """
        self.hand_over_all()
        arrival = self._arriving[0]
        self._peers.wait_for(arrival.message, arrival.source)
        self._take_in(arrival)

    def _hand_over(self, departure: Departure) -> None:
        """Send samples, with the positions that were not sent ahead; finished and held samples stay."""
        begin, access = self._clock(), self._access
        access.settle()
        running = self._by_id(access.running)
        index_of = running | self._by_id(access.queued)
        migrated, spans = [], []
        for move in departure.moves:
            if move.sample_id not in index_of:
                continue
            index, num_ahead = index_of[move.sample_id], 0
            if move.sample_id in running:  # a sample that was preempted since is read again, here or there
                num_ahead = departure.num_ahead.get(move.sample_id, 0)
            if num_ahead:
                spans.append(self._read_from(index, num_ahead))
            migrated.append(MigratedSample(self._origins[index], access.samples[index], num_ahead))
            access.remove(index)
            self._away.add(index)
        self._send(departure, pack_samples(migrated, spans))
        self._leaving.remove(departure)
        self.stats.num_sent += len(migrated)
        self._record_stall(self._clock() - begin, len(spans))

    def _by_id(self, indices: Iterable[int]) -> dict[int, int]:
        return {self._access.samples[index].sample_id: index for index in indices}

    def _read_from(self, index: int, begin: int) -> KVSpan:
        """Return the keys and values of a running sample from a position on."""
        sample = self._access.samples[index]
        content = self._access.read_cache(index, begin, sample.num_read)
        return KVSpan(sample.sample_id, begin, sample.num_read, content)

    def _take_in(self, arrival: Arrival) -> None:
        """Add the samples of an arrival to this rank's; they run, or wait for slots."""
        ahead: list[KVSpan] = []
        shapes: list[LayerShape] = []
        if arrival.kv_message is not None:
            self._pace.record_transfer(in_time=arrival.kv_message.has_arrived())
            _, ahead, shapes = unpack_samples(arrival.kv_message.wait())
        migrated, rest, _ = unpack_samples(arrival.message.wait())
        begin = self._clock()
        self._arriving.remove(arrival)
        spans: defaultdict[int, list[tuple[int, int, Tensor]]] = defaultdict(list)
        for span in (*ahead, *rest):
            spans[span.sample_id].append(span[1:])
        fresh: defaultdict[int, list[int]] = defaultdict(list)
        for each in migrated:
            index = self._settle(each, arrival.planned_in)
            sample = self._access.samples[index]
            if each.num_sent:
                self._access.resume(index, spans[sample.sample_id], shapes)
            elif sample.token_ids:
                self._access.resume(index)
            else:
                fresh[sample.prompt_number].append(index)
        for indices in fresh.values():  # samples of one prompt read it once
            self._access.queue(indices)
        self.stats.num_received += len(migrated)
        self._record_stall(self._clock() - begin, sum(each.num_sent > 0 for each in migrated))

    def _settle(self, migrated: MigratedSample, planned_in: int) -> int:
        """Add a sample to this rank's; return its index."""
        sample, origin = migrated.sample, migrated.origin
        self.moved_in[sample.sample_id] = planned_in
        if origin.rank == self._peers.rank:
            self._return(migrated)
            return origin.place
        sample.prompt_number = foreign_prompt_number(origin.rank, origin.prompt_number)
        index = self._access.add(sample)
        self._origins[index] = origin
        return index

    def _return(self, migrated: MigratedSample) -> Sample:
        """Update one of this rank's samples to its state on another rank, and return it."""
        place = migrated.origin.place
        self._away.remove(place)
        sample = self._access.samples[place]
        sample.adopt(migrated.sample)
        return sample

    def _send(self, departure: Departure, content: Tensor) -> None:
        """Send the next message of a departure."""
        self.stats.bytes_sent += content.numel()
        target = departure.moves[0].target
        message = self._peers.mailbox.bulk_channel.send(target, departure.owed[0], content)
        departure.owed.popleft()
        self._sent[target].append((departure.planned_in, message))

    def _record_stall(self, seconds: float, num_samples: int) -> None:
        self.stats.stall_s += seconds
        if num_samples:
            self._pace.record_stall(seconds / num_samples)

    # ---- the end of the call
    def bring_back(self) -> list[Sample]:
        """Return samples that finished elsewhere to the ranks that asked for them; return those of this rank."""
        peers, samples = self._peers, self._access.samples
        if not self.any_moves:
            return []
        self.release(dict.fromkeys(self._sent, inf))  # all ranks have taken in everything
        peers.num_calls += 1
        here = [(i, origin) for i, origin in self._origins.items() if i not in self._away]
        for other in peers.others:
            theirs = [MigratedSample(origin, samples[i]) for i, origin in here if origin.rank == other]
            content = pack_samples(theirs)
            peers.mailbox.send([other], FrameKind.RETURNED, peers.run, peers.call, content, part=peers.num_calls)
        returned = []
        for other in peers.others:
            content = peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, other, part=peers.num_calls)
            returned += [self._return(each) for each in unpack_samples(content)[0]]
        return returned

    def abandon(self) -> None:
        """Send empty messages in place of those that peers wait for; the mailbox reports the failure itself."""
        for departure in self._leaving:
            with suppress(RuntimeError):  # an unreachable peer has ended too
                while departure.owed:
                    self._send(departure, pack_samples())
