"""Moving samples between data-parallel ranks while they generate, so that all of them end at about the same time.

Ranks tell each other their loads in rounds, and nobody waits: what was told in one round is planned by in the next.
Every rank plans the same moves from the same reports. A sample moves in two stages: the bulk of its keys and values
travels while it runs on; then, between two steps, it leaves with what came since. Where it is quicker, only its tokens
travel and the other rank reads them again. Finished samples return to the rank that was asked for them.

Rounds go by the steps of the slowest rank; a rank without samples waits for the others there.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.balance import plan_balance
from lightning_realloc.generation.migration_costs import LengthBook, Pace, Report, as_moved, loads_of
from lightning_realloc.generation.rank_load import LiveSample, MoveCost, RankLoad, SampleMove
from lightning_realloc.generation.run import GenerationRun
from lightning_realloc.generation.shipping import Peers, Shipping
from lightning_realloc.runtime.exchange import decode_message, encode_message
from lightning_realloc.runtime.freight import Dispatch, Parcel
from lightning_realloc.runtime.mailbox import FrameKind

_T = TypeVar("_T")

PERIOD_STEPS = 16
"""Steps of the slowest rank between two rounds."""
REST_ROUNDS = 4
"""In which a sample that moved stays where it is."""
LONGEST_PAUSE_S = 0.05
"""How long a rank may wait for environments before it looks at what the others tell."""


@dataclass(frozen=True, slots=True)
class MigrationStats:
    """What moving samples came to on this rank, in one call."""

    num_sent: int = 0
    """Samples that left."""
    num_received: int = 0
    bytes_sent: int = 0
    stall_s: float = 0.0
    """Seconds in which packing and unpacking samples kept this rank from decoding."""
    waited_s: float = 0.0
    """Seconds without a sample, or waiting for what others tell."""
    num_rounds: int = 0


class Migration:
    """Moves samples of a rank's generations. One per engine.

    Args:
        peers: The other ranks.
        agree: Where ranks share a tensor-parallel model: returns the first one's numbers.
        clock: Tells seconds.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        agree: Callable[[Sequence[float]], Sequence[float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = MigrationStats()
        self.peers = peers
        self.agree = agree
        self.clock = clock
        self.pace = Pace()
        self.lengths = LengthBook()

    def carry_out(self, run: GenerationRun, hints: Sequence[int] | None = None) -> None:
        """Take all samples of all ranks to their ends. Collective over the peers.

        Args:
            run: What this rank begins with.
            hints: Expected response length per prompt, 0 where it is not known.
        """
        call = _Call(self, run, dict(enumerate(hints or ())))
        try:
            call.carry_out()
        except BaseException:
            with suppress(RuntimeError):  # those who cannot be reached are gone, too
                call.abandon()
            raise
        finally:
            self.stats = call.stats()


class _Call:
    """Steps and rounds of one call."""

    def __init__(self, migration: Migration, run: GenerationRun, hints: Mapping[int, int]) -> None:
        self._run = run
        self._peers = peers = migration.peers
        self._pace = pace = migration.pace
        self._book = migration.lengths
        self._agree = migration.agree
        self._clock = migration.clock
        self._shipping = Shipping(run, peers, pace, migration.agree, migration.clock)
        self._expected = self._book.begin(run.samples, hints)
        self._last: Report | None = None
        self._on_the_way: list[Parcel] = []
        self._told: deque[Dispatch] = deque()
        self._round = self._num_ended = 0
        self._steps_left = PERIOD_STEPS
        self._waited_s = 0.0

    def stats(self) -> MigrationStats:
        """Return the counts so far."""
        shipping = self._shipping
        return MigrationStats(
            shipping.num_sent, shipping.num_received, shipping.bytes_sent, shipping.stall_s, self._waited_s, self._round
        )

    def carry_out(self) -> None:
        """Make steps and rounds until every sample of every rank is over and back."""
        self._tell()
        while True:
            self._shipping.move_on()
            if self._run.has_work and self._steps_left > 0:
                self._step()
            elif not self._run.has_work and self._shipping.expects:
                self._wait(self._shipping.wait)
            elif not self._meet():
                break
        for sent in self._told:
            sent.wait()
        for sample in self._shipping.bring_back():
            self._book.keep(sample)

    def abandon(self) -> None:
        """Leave nobody waiting for a rank that failed; of the failure itself the mailbox tells."""
        self._shipping.abandon()
        number = self._peers.report_number()
        for other in self._peers.others:
            self._peers.mailbox.freight.send(other, number, encode_message({}, {}))

    # ---- steps
    def _step(self) -> None:
        run, before = self._run, self._run.counts
        begin = self._clock()
        run.step()
        seconds = self._clock() - begin
        rows, read, generated = (after - then for after, then in zip(run.counts, before, strict=True))
        self._pace.take_step(rows=rows, read=read, generated=generated, seconds=seconds)
        # Where all samples wait for their environments there is time to look around.
        self._steps_left = self._steps_left - 1 if rows or read else 0
        for sample in run.ended[self._num_ended :]:
            self._expected.finish(sample.prompt_index, len(sample.token_ids))
            self._book.keep(sample)
        self._num_ended = len(run.ended)

    def _wait(self, wait: Callable[[], _T]) -> _T:
        begin = self._clock()
        result = wait()
        self._waited_s += self._clock() - begin
        return result

    # ---- rounds
    def _meet(self) -> bool:
        """Plan by what all ranks told in the last round, and tell again; return whether anybody has work."""
        reports = self._wait(self._hear)
        if not any(report.num_live for report in reports):
            return False
        if not self._round:
            _check_distinct(reports)
        self._expected.hear(report.evidence for report in reports)
        self._shipping.hand_over_all()  # nobody waits longer than a round for a sample
        self._round += 1
        known = loads_of(reports)
        if known is None:
            moves, bytes_per_step, self._steps_left = tuple[SampleMove, ...](), inf, PERIOD_STEPS
        else:
            steps_s = {report.rank: report.pace.step_s for report in reports}
            moves, bytes_per_step, self._steps_left = self._plan(*known, steps_s)
        told = (sample for report in reports for sample in (*report.running, *report.waiting))
        self._shipping.begin(moves, told, self._round, bytes_per_step)
        self._tell()
        return True

    def _plan(
        self, loads: Sequence[RankLoad], cost: MoveCost, steps_s: Mapping[int, float]
    ) -> tuple[tuple[SampleMove, ...], float, int]:
        """Return the moves of this round, the bytes that travel during a step, and the steps until the next round."""
        seconds = {load.rank: steps_s[load.rank] or load.curve.seconds(max(load.rows, 1)) for load in loads}
        own_s, slowest_s = seconds[self._peers.rank], max(seconds.values())
        # What was told is a round old, and what is planned takes a round: a gap of less may be none any more.
        moves = plan_balance(
            loads, cost, least_gap_s=PERIOD_STEPS * slowest_s, rest_steps=REST_ROUNDS, step=self._round
        )
        return moves, cost.bytes_per_s * own_s, max(1, round(PERIOD_STEPS * slowest_s / own_s))

    def _tell(self) -> None:
        """Send the others this rank's report, and begin to receive theirs."""
        peers, freight = self._peers, self._peers.mailbox.freight
        number = peers.report_number()
        self._last = self._report()
        content = encode_message(self._last.to_json(), {})
        self._on_the_way = [freight.receive(other, number) for other in peers.others]
        while len(self._told) >= 2 * len(peers.others):  # of two rounds ago: all have told of one since
            self._told.popleft().wait()
        self._told.extend(freight.send(other, number, content) for other in peers.others)

    def _hear(self) -> list[Report]:
        """Return what every rank told in the last round, ranks ascending."""
        peers = self._peers
        assert self._last is not None, "a round begins with a report"
        reports = [self._last]
        for other, parcel in zip(peers.others, self._on_the_way, strict=True):
            told = decode_message(parcel.wait())[0]
            if not told:  # that rank failed; the mailbox hears why
                peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, other, part=peers.num_calls + 1)
            reports.append(Report.from_json(told))
        return sorted(reports, key=lambda report: report.rank)

    def _report(self) -> Report:
        run, incoming, outgoing = self._run, self._shipping.incoming, self._shipping.outgoing
        movable, held = run.movable, run.held
        self._expected.watch(len(run.samples[index].token_ids) for index in (*movable, *held))
        # Who is still on the way, or holds a slot and does not run, cannot move now: told as if it had just moved.
        running = [self._live(i) for i in movable] + [as_moved(self._live(i), self._round) for i in held]
        waiting = [self._live(i) for i in run.waiting]
        for sample in incoming.values():
            (running if sample.has_begun else waiting).append(as_moved(sample, self._round))
        stays = tuple(sample for sample in running if sample.sample_id not in outgoing)
        waits = tuple(sample for sample in waiting if sample.sample_id not in outgoing)
        # Where all who run are about to leave, with the slots and pages that they hold, those who wait will have these.
        least_free = int(bool(waits) and not stays)
        seats_taken = sum(sample.has_begun for sample in incoming.values())
        return Report(
            rank=self._peers.rank,
            running=stays,
            waiting=waits,
            free_slots=max(run.free_slots - seats_taken, least_free),
            bytes_per_token=sum(shape.num_bytes for shape in run.describe_cache()),
            pace=self._pace.agreed(self._agree),
            evidence=self._expected.evidence,
        )

    def _live(self, index: int) -> LiveSample:
        sample = self._run.samples[index]
        num_tokens = len(sample.token_ids)
        remaining = self._expected.expected(sample.prompt_index, num_tokens, max_new_tokens=sample.max_new_tokens)
        moved_in = self._shipping.moved_in.get(sample.sample_id)
        return LiveSample(sample.sample_id, sample.position + 1, remaining, moved_in, num_tokens > 0)


def _check_distinct(reports: Sequence[Report]) -> None:
    ids = [sample.sample_id for report in reports for sample in (*report.running, *report.waiting)]
    twice = sorted(sample_id for sample_id, count in Counter(ids).items() if count > 1)
    if twice:
        raise GenerationError(
            f"ranks that move samples between them need distinct sample ids, and {twice[:8]} are on several; pass "
            "generate(sample_ids=...) with ids that no other rank uses"
        )
