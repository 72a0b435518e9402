"""Carrying out moves of samples: each shipment goes from one rank to another in two stages.

Both ranks know of a shipment from the same plan. The bulk of its keys and values travels while its samples run on;
then, between two steps, they leave with what came since. Those whose tokens alone travel leave at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.run import GenerationRun, foreign_prompt
from lightning_realloc.generation.rebalance.load import LiveSample, SampleMove
from lightning_realloc.generation.rebalance.migrated_sample import (
    KVSpan,
    MigratedSample,
    SampleOrigin,
    decode_kv_span,
    decode_samples,
    encode_kv_span,
    encode_samples,
)
from lightning_realloc.generation.rebalance.migration_costs import Pace
from lightning_realloc.runtime.messages.bulk_messages import PendingReceive, PendingSend
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox


@dataclass(slots=True)
class Peers:
    """Ranks that generate other samples with the same part of the same model, and the way to them."""

    mailbox: Mailbox
    rank: int
    others: tuple[int, ...]
    run: int = 0
    call: int = 0
    """Which names of frames are this call's, see `Mailbox`."""
    num_calls: int = 0
    """Generations under these names so far."""
    num_reports: int = 0
    num_shipments: int = 0
    """Both so far, whoever sent them; all ranks count alike, since all of them plan the same. Those that are freed are
    told at the end."""

    def at(self, run: int, call: int) -> None:
        """Say that another call begins."""
        self.run, self.call, self.num_calls = run, call, 0

    def report_number(self) -> int:
        """Return the number of the next round's messages; see `BulkChannel`."""
        self.num_reports += 1
        return self.report_number_after(0)

    def report_number_after(self, rounds: int) -> int:
        """Return what `report_number` will be after so many rounds."""
        return 4 * (self.num_reports + rounds)

    def ending_number(self) -> int:
        """Return the number under which ranks that are freed in this round will hear that all is generated."""
        return 4 * self.num_reports + 3

    def shipment_number(self) -> int:
        """Return the number of the next shipment's first message; the second one's is one higher."""
        self.num_shipments += 1
        return 4 * self.num_shipments + 1


@dataclass(slots=True)
class _Shipment:
    """Samples that go from one rank to another, as planned in one round."""

    number: int
    """Of its first message; the second one's is one higher."""
    moves: tuple[SampleMove, ...]
    step: int
    """The round that planned it."""
    bulk: PendingReceive | None = None
    rest: PendingReceive | None = None
    """To this rank: what comes when the samples leave."""
    steps_left: int = 0
    """From this rank: after how many steps the bulk is taken to have arrived."""
    num_sent: dict[int, int] = field(default_factory=dict)
    """From this rank: sample id -> positions in the bulk."""
    stages_sent: set[int] = field(default_factory=set)
    """From this rank: which of the two messages are on their way."""
    told: dict[int, LiveSample] = field(default_factory=dict)
    """To this rank: its samples by id, as they were told of. Those that have ended by then do not come, nor those that
    cannot leave: these may come with a later shipment."""

    @property
    def has_bulk(self) -> bool:
        """Whether keys and values travel."""
        return any(move.how == "send" for move in self.moves)

    @property
    def is_ready(self) -> bool:
        """Whether its next stage waits for nobody."""
        return self.steps_left <= 0 and all(parcel is None or parcel.has_arrived() for parcel in (self.bulk, self.rest))


class Shipping:
    """What travels to and from one rank in one call.

    Args:
        run: The rank's samples.
        peers: The other ranks.
        pace: Learns how long transfers take.
        agree: Where ranks share a tensor-parallel model: returns the first one's numbers.
        clock: Tells seconds.
    """

    def __init__(
        self,
        run: GenerationRun,
        peers: Peers,
        pace: Pace,
        agree: Callable[[Sequence[float]], Sequence[float]] | None,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._peers = peers
        self._pace = pace
        self._agree = agree
        self._clock = clock
        self._origins = {index: SampleOrigin(peers.rank, index, s.prompt_number) for index, s in enumerate(run.samples)}
        self._arriving: list[_Shipment] = []
        self._leaving: list[_Shipment] = []
        self._sent: dict[int, deque[tuple[int, PendingSend]]] = {other: deque() for other in peers.others}
        """What left, to whom and by which round's plan: it holds memory until the other end has taken it in."""
        self.moved_in: dict[int, int] = {}
        """Sample id -> the round in which it last came to this rank."""
        self.any_moves = False
        """Whether samples were to move between any two ranks, or may have without this one's knowledge."""
        self.num_sent = self.num_received = self.bytes_sent = 0
        self.stall_s = 0.0

    @property
    def outgoing(self) -> set[int]:
        """Ids of samples that are about to leave."""
        return {move.sample_id for shipment in self._leaving for move in shipment.moves}

    @property
    def incoming(self) -> dict[int, LiveSample]:
        """Samples on their way to this rank, by id, as they were told of."""
        return {sample_id: sample for shipment in self._arriving for sample_id, sample in shipment.told.items()}

    @property
    def expects(self) -> bool:
        """Whether samples are on their way to this rank."""
        return bool(self._arriving)

    def expected_since(self, step: int) -> int:
        """Return the round that planned the oldest shipment on its way to this rank; the next one where none is.

        Args:
            step: The present round.
        """
        return min((shipment.step for shipment in self._arriving), default=step + 1)

    def release(self, expected_since: Mapping[int, float]) -> None:
        """Free what left for other ranks by plans before those from which on they expect shipments.

        Nobody waits: what has not been taken in yet may need the other end's attention, and that one may be waiting
        for this rank.
        """
        for other, step in expected_since.items():
            sent = self._sent[other]
            while sent and sent[0][0] < step:
                sent.popleft()[1].wait()

    def begin(self, moves: Sequence[SampleMove], told: Iterable[LiveSample], step: int, bytes_per_step: float) -> None:
        """Begin to carry out the moves of a round.

        Args:
            moves: Of all ranks.
            told: What ranks told of their samples.
            step: The round.
            bytes_per_step: What is taken to travel during a step of this rank.
        """
        known = {sample.sample_id: sample for sample in told}
        groups: dict[tuple[int, int], list[SampleMove]] = {}
        self.any_moves |= bool(moves)
        for move in moves:
            groups.setdefault((move.source, move.target), []).append(move)
        for (source, target), group in groups.items():
            shipment = _Shipment(self._peers.shipment_number(), tuple(group), step)
            if source == self._peers.rank:
                self._begin_to_send(shipment, bytes_per_step)
            elif target == self._peers.rank:
                shipment.told = {move.sample_id: known[move.sample_id] for move in group}
                self._begin_to_receive(shipment)

    def hand_over_all(self) -> None:
        """Let every sample that is to leave do so, whether or not its bulk has arrived."""
        for shipment in list(self._leaving):
            self._hand_over(shipment)

    def _begin_to_send(self, shipment: _Shipment, bytes_per_step: float) -> None:
        begin = self._clock()
        self._leaving.append(shipment)
        if not shipment.has_bulk:
            self._hand_over(shipment)
            return
        index_of = {self._run.samples[index].sample_id: index for index in self._run.movable}
        parts = []
        for move in shipment.moves:
            index = index_of.get(move.sample_id)
            if index is not None and move.how == "send":
                shipment.num_sent[move.sample_id] = end = self._run.samples[index].num_read
                parts.append(KVSpan(move.sample_id, 0, end, self._run.read_positions(index, 0, end)))
        content = encode_kv_span(parts, self._run.describe_cache())
        self._send(shipment, content, stage=0)
        shipment.steps_left = ceil(content.numel() / bytes_per_step)
        self.stall_s += self._clock() - begin

    def _begin_to_receive(self, shipment: _Shipment) -> None:
        bulk_channel, source = self._peers.mailbox.bulk_channel, shipment.moves[0].source
        if shipment.has_bulk:
            shipment.bulk = bulk_channel.receive(source, shipment.number)
        shipment.rest = bulk_channel.receive(source, shipment.number + 1)
        self._arriving.append(shipment)

    def move_on(self) -> None:
        """Go on with shipments for which nobody has to be waited for."""
        if not (self._leaving or self._arriving):
            return
        shipments = [*self._leaving, *self._arriving]
        for shipment in self._leaving:
            shipment.steps_left -= 1
        ready = [float(shipment.is_ready) for shipment in shipments]
        for shipment, is_ready in zip(shipments, ready if self._agree is None else self._agree(ready), strict=True):
            if is_ready and shipment.rest is None:
                self._hand_over(shipment)
            elif is_ready:
                self._take_in(shipment)

    def _hand_over(self, shipment: _Shipment) -> None:
        """Let samples leave, with what their bulk lacks; those that ended, or neither run nor wait for a slot, stay."""
        begin = self._clock()
        run = self._run
        running, waiting = set(run.movable), set(run.waiting)
        index_of = {run.samples[index].sample_id: index for index in running | waiting}
        travellers, parts = [], []
        for move in shipment.moves:
            index = index_of.get(move.sample_id)
            if index is None:
                continue
            sample = run.samples[index]
            # One that had to give its pages back since its bulk left is read again, here or there.
            num_sent = shipment.num_sent.get(move.sample_id, 0) if index in running else 0
            if num_sent:
                end = sample.num_read
                parts.append(KVSpan(move.sample_id, num_sent, end, run.read_positions(index, num_sent, end)))
            travellers.append(MigratedSample(self._origins[index], sample, num_sent))
            run.depart(index)
        self._send(shipment, encode_samples(travellers, parts), stage=1)
        self._leaving.remove(shipment)
        self.num_sent += len(travellers)
        self._note_stall(self._clock() - begin, len(parts))

    def _take_in(self, shipment: _Shipment) -> None:
        """Let the samples of a shipment run here, or wait for slots."""
        assert shipment.rest is not None, "a shipment to this rank"
        parts, shapes = self._bulk_of(shipment)
        travellers, later = decode_samples(shipment.rest.wait())
        begin = self._clock()
        self._arriving.remove(shipment)
        spans: dict[int, list[tuple[int, int, Tensor]]] = {}
        for part in (*parts, *later):
            spans.setdefault(part.sample_id, []).append((part.begin, part.end, part.content))
        fresh: dict[int, list[int]] = {}
        for traveller in travellers:
            index = self._settle(traveller, shipment.step)
            sample = self._run.samples[index]
            if traveller.num_sent:
                self._run.go_on(index, spans[sample.sample_id], shapes)
            elif sample.token_ids:
                self._run.go_on(index, [], shapes)
            else:
                fresh.setdefault(sample.prompt_number, []).append(index)
        for indices in fresh.values():  # samples of one prompt read it once
            self._run.queue(indices)
        self.num_received += len(travellers)
        self._note_stall(self._clock() - begin, sum(traveller.num_sent > 0 for traveller in travellers))

    def _bulk_of(self, shipment: _Shipment) -> tuple[list[KVSpan], list[LayerShape]]:
        if shipment.bulk is None:
            return [], []
        self._pace.take_transfer(in_time=shipment.bulk.has_arrived())
        return decode_kv_span(shipment.bulk.wait())

    def _settle(self, traveller: MigratedSample, step: int) -> int:
        """Make a sample one of this rank's; return its index."""
        sample, origin = traveller.sample, traveller.origin
        if origin.rank == self._peers.rank:
            index = origin.index
            self._run.come_back(index, sample)
        else:
            sample.prompt_number = foreign_prompt(origin.rank, origin.prompt_number)
            index = self._run.arrive(sample)
            self._origins[index] = origin
        self.moved_in[sample.sample_id] = step
        return index

    def wait(self) -> None:
        """Wait for the shipment that was begun first, and take it in.

        Nothing is left to leave, or two ranks could wait for each other.
        """
        self.hand_over_all()
        shipment = self._arriving[0]
        assert shipment.rest is not None, "a shipment to this rank"
        shipment.rest.wait()
        self._take_in(shipment)

    def _send(self, shipment: _Shipment, content: Tensor, *, stage: int) -> None:
        self.bytes_sent += content.numel()
        target = shipment.moves[0].target
        sent = self._peers.mailbox.bulk_channel.send(target, shipment.number + stage, content)
        shipment.stages_sent.add(stage)
        self._sent[target].append((shipment.step, sent))

    def _note_stall(self, seconds: float, num_samples: int) -> None:
        self.stall_s += seconds
        if num_samples:
            self._pace.take_stall(seconds / num_samples)

    def bring_back(self) -> list[Sample]:
        """Bring samples that ended elsewhere back to where they were asked for; return those of this rank."""
        peers, run = self._peers, self._run
        if not self.any_moves:
            return []
        self.release(dict.fromkeys(self._sent, inf))  # all have taken in everything
        peers.num_calls += 1
        for other in peers.others:
            theirs = [
                MigratedSample(origin, run.samples[index])
                for index, origin in self._origins.items()
                if origin.rank == other and not run.is_away(index)
            ]
            content = encode_samples(theirs)
            peers.mailbox.send([other], FrameKind.RETURNED, peers.run, peers.call, content, part=peers.num_calls)
        back = []
        for other in peers.others:
            content = peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, other, part=peers.num_calls)
            for traveller in decode_samples(content)[0]:
                run.come_back(traveller.origin.index, traveller.sample)
                back.append(run.samples[traveller.origin.index])
        return back

    def abandon(self) -> None:
        """Leave nobody waiting for samples of a rank that failed; of the failure itself the mailbox tells."""
        while self._leaving:
            shipment = self._leaving.pop()
            owed = {1: encode_samples([])} | ({0: encode_kv_span([], [])} if shipment.has_bulk else {})
            for stage in sorted(owed.keys() - shipment.stages_sent):
                with suppress(RuntimeError):  # who cannot be reached is gone, too
                    self._send(shipment, owed[stage], stage=stage)
