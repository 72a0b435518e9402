"""Moving samples between data-parallel ranks while they generate, so that all of them end at about the same time.

Ranks tell each other their loads in rounds, and nobody waits: what was told in one round is planned by in the next.
Every rank plans the same moves from the same reports. A sample moves in two stages: the bulk of its keys and values
travels while it runs on; then, between two steps, it leaves with what came since. Where it is quicker, only its tokens
travel and the other rank reads them again. Finished samples return to the rank that was asked for them.

Rounds go by the steps of the slowest rank, lie a tenth of a second apart at least, and get rarer while nothing moves; a
rank without samples waits for the others there, one with samples goes on until it has heard all of them. The first
reports are sent shortly before the first round: short calls are over without any, and send each other nothing else.
Where calls were that short that no move could pay, most of the next ones of their kind are made without even that.
Where other calls wait for what is finished, ranks may be freed for them: they hand over what they have, and take no
part in rounds any more. One of those that go on tells them when everything is generated.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.run import GenerationRun
from lightning_realloc.generation.rebalance.balance import choose, plan_balance
from lightning_realloc.generation.rebalance.kv_transfer import Peers, Shipping
from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, SampleMove
from lightning_realloc.generation.rebalance.migration_costs import (
    LengthBook,
    Pace,
    Report,
    as_moved,
    loads_of,
    next_round_s,
)
from lightning_realloc.generation.rebalance.short_calls import ShortCallPredictor
from lightning_realloc.generation.rebalance.steps_taken import StepRecorder
from lightning_realloc.runtime.messages.bulk_messages import PendingReceive, PendingSend
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind

_T = TypeVar("_T")
_Planned = tuple[tuple[SampleMove, ...], tuple[int, ...], float, int]
"""Moves, freed ranks, the bytes that travel during a step, and the steps until the next round."""

PERIOD_STEPS = 16
"""Steps of the slowest rank between two rounds."""
TOLD_BEFORE_STEPS = 2
"""Steps before the first round in which the first report is sent: in a call that is over by then nothing could move."""
LEAST_PERIOD_S = 0.1
"""Seconds between them at least, however short steps are: a round takes up to a millisecond of a rank's own time."""
SHORT_CALL_PERIODS = 2
"""Of the least length, within which a call is over that is short: a plan needs one to be made and one to be of use."""
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
    was_freed: bool = False
    """Whether this rank went over to other calls while others generated."""


class WaitingCalls(Protocol):
    """Calls that wait for what is generated, as far as they can work on what is finished on this rank."""

    def seconds(self) -> float:
        """Return how long that takes from now, 0 where nothing is known of it yet."""

    def work(self) -> bool:
        """Do a small part of it, waiting for nobody; return whether there was anything to do."""


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
        self._short_calls = ShortCallPredictor()
        self._has_begun = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """What goes on in here leads to :meth:`carry_out`; where it fails before, leave nobody waiting for it."""
        self._has_begun = False
        try:
            yield
        except BaseException:
            if not self._has_begun:
                _send_nothing(self.peers, self.peers.others)
            raise

    def carry_out(
        self,
        run: GenerationRun,
        hints: Sequence[int] | None = None,
        *,
        max_new_tokens: int,
        follow: Callable[[Sequence[Sample]], None] | None = None,
        waiting_calls: WaitingCalls | None = None,
    ) -> None:
        """Take all samples of all ranks to their ends. Collective over the peers.

        Args:
            run: What this rank begins with.
            hints: Expected response length per prompt, 0 where it is not known.
            max_new_tokens: What bounds the responses of all ranks: calls of the dataflow are told apart by it.
            follow: Called after every step with all samples that ended here so far.
            waiting_calls: What this rank may be freed for.
        """
        call = _Call(self, run, dict(enumerate(hints or ())), follow, waiting_calls)
        self._has_begun = True
        kind = self.peers.call, max_new_tokens
        try:
            if self._short_calls.predict(kind):
                call.carry_out_apart()
            else:
                call.carry_out()
                self._short_calls.look_at(kind, was_short=call.was_short)
        except BaseException:
            call.abandon()
            raise
        finally:
            self.stats = call.stats()


class _Call:
    """Steps and rounds of one call."""

    def __init__(
        self,
        migration: Migration,
        run: GenerationRun,
        hints: Mapping[int, int],
        follow: Callable[[Sequence[Sample]], None] | None,
        waiting_calls: WaitingCalls | None,
    ) -> None:
        self._run = run
        self._follow = follow
        self._waiting_calls = waiting_calls
        self._peers = peers = migration.peers
        self._others = peers.others
        """Those that meet in rounds."""
        self._over: PendingReceive | None = None
        """Once this rank is freed: it comes when everything is generated."""
        self._leader = peers.rank
        """Whom it comes from."""
        self._owed: list[tuple[int, int]] = []
        """To whom this rank tells that, and under which number."""
        self._pace = pace = migration.pace
        self._book = migration.lengths
        self._agree = migration.agree
        self._clock = migration.clock
        self._shipping = Shipping(run, peers, pace, migration.agree, migration.clock)
        self._expected = self._book.begin(run.samples, hints)
        self._last: Report | None = None
        self._on_the_way: deque[dict[int, PendingReceive]] = deque()
        """What others tell in the next two rounds, by who tells it. Receiving begins a round early: gloo keeps those
        who begin to receive what the other end has sent already until its own thread gets a core."""
        self._told: deque[PendingSend] = deque()
        self._steps = StepRecorder(run, pace, self._book, self._expected, migration.clock)
        """Learnt from in rounds."""
        self._round = self._num_quiet = 0
        self._steps_left = PERIOD_STEPS
        self._steps_s = self._waited_s = 0.0
        self.was_short = False
        """Once the call is over: whether no move could have paid in it, on whatever rank."""

    def stats(self) -> MigrationStats:
        """Return the counts so far."""
        shipping = self._shipping
        return MigrationStats(
            shipping.num_sent, shipping.num_received, shipping.bytes_sent, shipping.stall_s, self._waited_s,
            self._round, was_freed=self._over is not None,
        )  # fmt: skip

    def carry_out(self) -> None:
        """Make steps and rounds until every sample of every rank is over and back."""
        self._expect(rounds=1)
        while True:
            self._shipping.move_on()
            if self._last is None and (self._steps_left <= TOLD_BEFORE_STEPS or not self._run.has_work):
                self._tell(self._others)
            if self._run.has_work and not self._is_time_to_meet():
                self._step()
            elif not self._run.has_work and self._shipping.expects:
                self._wait(self._shipping.wait)
            elif not self._meet():
                break
        peer_failures = self._take_leave()
        if self._over is not None:
            self._work_elsewhere(self._over)
        for other, parcel in peer_failures.items():
            self._wait(partial(self._read, parcel, other))
        self._tell_freed({"reports": self._peers.num_reports, "shipments": self._peers.num_shipments})
        self._steps.learn()
        back = self._shipping.bring_back()
        for sent in self._told:
            sent.wait()
        for sample in back:
            if sample.finish_reason != "unfinished":
                self._book.keep(sample)

    def carry_out_apart(self) -> None:
        """Make steps until every sample of this rank is over, as the other ranks do with theirs."""
        while self._run.has_work:
            self._step()
        self._steps.learn()

    def abandon(self) -> None:
        """Leave nobody waiting for a rank that failed; of the failure itself the mailbox tells."""
        self._shipping.abandon()
        with suppress(RuntimeError):
            self._tell_freed({})
        _send_nothing(self._peers, self._others)

    # ---- steps
    def _step(self) -> None:
        # Where all samples wait for their environments there is time to look around.
        self._steps_left = self._steps_left - 1 if self._steps.step() else 0
        if self._follow is not None:
            self._follow(self._run.ended)

    def _wait(self, wait: Callable[[], _T]) -> _T:
        begin = self._clock()
        result = wait()
        self._waited_s += self._clock() - begin
        return result

    # ---- rounds
    def _is_time_to_meet(self) -> bool:
        """Whether a round is due and all others have told: who has work waits for nobody."""
        if self._steps_left > 0:
            return False
        has_heard = float(all(parcel.has_arrived() for parcel in self._on_the_way[0].values()))
        return bool(has_heard if self._agree is None else self._agree([has_heard])[0])

    def _meet(self) -> bool:
        """Plan by what all ranks told in the last round, and tell again; return whether there is a next round."""
        reports = self._wait(self._hear)
        if not any(report.live for report in reports):
            longest_s = max(report.steps_s for report in reports)
            self.was_short = longest_s < SHORT_CALL_PERIODS * LEAST_PERIOD_S and not self._shipping.any_moves
            return False
        if not self._round:
            _check_distinct(reports)
            self._expect(rounds=1)
        self._expected.hear(report.evidence for report in reports)
        self._shipping.release({told.rank: told.expected_since for told in reports if told.rank != self._peers.rank})
        self._shipping.hand_over_all()  # nobody waits longer than a round for a sample
        self._round += 1
        planned: _Planned = (), (), inf, PERIOD_STEPS
        if (known := loads_of(reports)) is not None:
            planned = self._plan(*known, {report.rank: report.pace.step_s for report in reports})
        moves, freed, bytes_per_step, self._steps_left = planned
        told = (sample for report in reports for sample in report.live)
        self._shipping.begin(moves, told, self._round, bytes_per_step)
        others = self._others
        if freed:
            self._free(freed)
        if self._over is None:
            self._tell(others)  # those who are freed now have begun to receive it
        return self._over is None

    def _plan(self, loads: Sequence[RankLoad], cost: MoveCost, steps_s: Mapping[int, float]) -> _Planned:
        seconds = {load.rank: steps_s[load.rank] or load.curve.seconds(max(load.rows, 1)) for load in loads}
        own_s, slowest_s = seconds[self._peers.rank], max(seconds.values())
        # What was told is a round old, and what is planned takes a round: a gap of less may be none any more.
        least_period_s = max(PERIOD_STEPS * slowest_s, LEAST_PERIOD_S)
        freed = tuple[int, ...]()
        if any(load.waiting_call_s for load in loads):
            choice = choose(loads, cost, least_gap_s=least_period_s, rest_steps=REST_ROUNDS, step=self._round)
            moves, freed = choice.moves, choice.freed
        else:
            moves = plan_balance(loads, cost, least_gap_s=least_period_s, rest_steps=REST_ROUNDS, step=self._round)
        num_quiet = self._num_quiet + 1 if self._expected.knows_ends else 1  # that lengths differ is to be seen soon
        self._num_quiet = 0 if moves or freed else num_quiet
        period_s = next_round_s(loads, least_period_s, self._num_quiet)
        return moves, freed, cost.bytes_per_s * own_s, max(1, round(period_s / own_s))

    def _tell(self, others: Iterable[int]) -> None:
        """Send this rank's report, and begin to receive what is told in the round after, if there is one surely."""
        if self._round:
            self._expect(rounds=2)
        self._last = self._report()
        while self._told and len(self._told) >= 2 * len(self._others):  # of two rounds ago: all have told of one since
            self._told.popleft().wait()
        self._send(others, self._last.to_json())

    def _take_leave(self) -> dict[int, PendingReceive]:
        """Send a last word to those who receive it already; return theirs, which are on the way."""
        if not self._round:
            return {}
        peer_failures = self._on_the_way.popleft()
        self._send(peer_failures, {"leaves": self._peers.rank})
        return peer_failures

    def _expect(self, *, rounds: int) -> None:
        """Begin to receive what is told after so many rounds."""
        bulk_channel, number = self._peers.mailbox.bulk_channel, self._peers.report_number_after(rounds)
        self._on_the_way.append({other: bulk_channel.receive(other, number) for other in self._others})

    def _send(self, others: Iterable[int], content: Mapping[str, Any]) -> None:
        """Send what is told in this round."""
        channel, number, message = (
            self._peers.mailbox.bulk_channel,
            self._peers.report_number(),
            encode_message(content, {}),
        )
        self._told.extend(channel.send(other, number, message) for other in others)

    def _hear(self) -> list[Report]:
        """Return what every rank told in the last round, ranks ascending."""
        assert self._last is not None, "a round begins with a report"
        told = {other: self._read(parcel, other) for other, parcel in self._on_the_way.popleft().items()}
        reports = [Report.from_json(told[other]) for other in self._others]  # those who were freed sent a last word
        return sorted((self._last, *reports), key=lambda report: report.rank)

    def _read(self, parcel: PendingReceive, sender: int) -> dict[str, Any]:
        """Return what a rank told; waits for it."""
        peers, told = self._peers, decode_message(parcel.wait())[0]
        if not told:  # that rank failed, or knows of one that did; the mailbox hears why
            peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, sender, part=peers.num_calls + 1)
        return told

    def _report(self) -> Report:
        num_steps = self._steps.learn()
        pace = self._pace.agreed(self._agree)
        self._steps_s += num_steps * pace.step_s
        run, incoming, outgoing = self._run, self._shipping.incoming, self._shipping.outgoing
        movable, held = run.movable, run.held
        self._expected.watch(len(run.samples[index].token_ids) for index in (*movable, *held))
        # Who is still on the way, or holds a slot and does not run, cannot move now: told as if it had just moved.
        running = [self._live(i) for i in movable] + [as_moved(self._live(i), self._round) for i in held]
        waiting = [self._live(i) for i in run.waiting]
        return Report(
            rank=self._peers.rank,
            running=tuple(sample for sample in running if sample.sample_id not in outgoing),
            waiting=tuple(sample for sample in waiting if sample.sample_id not in outgoing),
            incoming=tuple(as_moved(sample, self._round) for sample in incoming.values()),
            free_slots=run.free_slots,
            bytes_per_token=sum(shape.num_bytes for shape in run.describe_cache()),
            pace=pace,
            steps_s=self._steps_s,
            evidence=self._expected.evidence,
            waiting_call_s=0.0 if self._waiting_calls is None else self._waiting_calls.seconds(),
            expected_since=self._shipping.expected_since(self._round),
        )

    def _live(self, index: int) -> LiveSample:
        sample = self._run.samples[index]
        num_tokens = len(sample.token_ids)
        remaining = self._expected.expected(sample.prompt_number, num_tokens, max_new_tokens=sample.max_new_tokens)
        moved_in = self._shipping.moved_in.get(sample.sample_id)
        return LiveSample(sample.sample_id, sample.position + 1, remaining, moved_in, num_tokens > 0)

    # ---- ranks that have other work
    def _free(self, freed: Sequence[int]) -> None:
        """Go on without these ranks; this one may be one of them. The lowest of the others tells them of the end."""
        peers, number = self._peers, self._peers.ending_number()
        leader = min(rank for rank in (peers.rank, *self._others) if rank not in freed)
        self._shipping.any_moves = True
        if peers.rank in freed:
            self._leader, self._others = leader, ()
            self._over = peers.mailbox.bulk_channel.receive(leader, number)
            return
        self._others = tuple(other for other in self._others if other not in freed)
        if peers.rank == leader:
            self._owed += [(rank, number) for rank in freed]

    def _work_elsewhere(self, over: PendingReceive) -> None:
        """Hand over what is to leave, and work on what waits until the other ranks have generated everything.

        What fails is raised then: ranks that generate hear of nothing before.
        """
        assert self._waiting_calls is not None, "who has nothing else to do is not freed"
        try:
            self._finish_up()
            while self._waiting_calls.work() and not over.has_arrived():
                pass
        except Exception:
            self._shipping.abandon()
            self._wait(over.wait)
            raise
        told = self._wait(lambda: self._read(over, self._leader))
        self._peers.num_reports, self._peers.num_shipments = told["reports"], told["shipments"]

    def _finish_up(self) -> None:
        """Make steps until all samples have left or are over: most leave at once, one that cannot move does not."""
        while self._run.has_work or self._shipping.expects:
            self._shipping.move_on()
            if self._steps_left <= 0:
                self._shipping.hand_over_all()
            if self._run.has_work:
                self._step()
            elif self._shipping.expects:
                self._wait(self._shipping.wait)
        self._shipping.hand_over_all()

    def _tell_freed(self, content: Mapping[str, int]) -> None:
        """Tell the ranks that this one is to tell that everything is generated, or, with nothing, of a failure."""
        bulk_channel = self._peers.mailbox.bulk_channel
        while self._owed:
            self._told.append(bulk_channel.send(*self._owed.pop(), encode_message(content, {})))


def _send_nothing(peers: Peers, others: Iterable[int]) -> None:
    """Send an empty report in place of the next one: whoever reads it asks the mailbox why."""
    number = peers.report_number()
    for other in others:
        with suppress(RuntimeError):  # who cannot be reached is gone, too
            peers.mailbox.bulk_channel.send(other, number, encode_message({}, {}))


def _check_distinct(reports: Sequence[Report]) -> None:
    ids = [sample.sample_id for report in reports for sample in report.live]
    twice = sorted(sample_id for sample_id, count in Counter(ids).items() if count > 1)
    if twice:
        raise GenerationError(
            f"ranks that move samples between them need distinct sample ids, and {twice[:8]} are on several; pass "
            "generate(sample_ids=...) with ids that no other rank uses"
        )
