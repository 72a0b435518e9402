"""Exchange load reports between data-parallel ranks while they generate, and move samples by a plan made from these.

Ranks report their loads in rounds. A rank with samples never waits for another one: it plans by the last round's
reports, which have arrived, and sends its next report. Every rank plans the same moves from the same reports. Finished
samples return to the rank that asked for them.

Rounds follow the steps of the slowest rank, at least a tenth of a second apart, and get rarer while nothing moves. A
rank without samples waits for the reports of the others, or works on calls that need finished samples. Ranks send their
first report shortly before the first round, so a short call ends without rounds. Where earlier calls of the same kind
were too short for a move to pay, most calls exchange no message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.sample_access import SampleAccess
from lightning_realloc.generation.rebalance.balance_policy import plan_balance
from lightning_realloc.generation.rebalance.handover import MigrationStats, SampleHandover
from lightning_realloc.generation.rebalance.home_conversations import HomeConversations
from lightning_realloc.generation.rebalance.load import (
    LiveSample,
    LoadReport,
    MoveCost,
    RankLoad,
    SampleMove,
    drain_seconds,
    loads_from_reports,
)
from lightning_realloc.generation.rebalance.pace import (
    Agree,
    LengthHistory,
    PaceEstimator,
    ShortCallPredictor,
    SteppedRun,
    StepRecorder,
)
from lightning_realloc.generation.rebalance.peers import Peers, ReportMessages
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor

_T = TypeVar("_T")

PERIOD_STEPS = 16
"""Steps of the slowest rank between two rounds. Raise it to save rounds, at the price of later moves."""
REPORT_AHEAD_STEPS = 2
"""Steps before the first round at which the first report is sent. A call that ends earlier sends none."""
MIN_PERIOD_S = 0.1
"""Least seconds between two rounds. A round takes up to a millisecond of a rank's own time."""


class Rebalancer:
    """Moves samples between ranks while they generate. One per engine that has peers.

    Example::

        engine = GenerationEngine(model, peers=Peers(mailbox, rank, others=(1, 2, 3)))  # builds one
    """

    max_pause_s = 0.05
    """Longest wait of a step for environments, in seconds, before the rank looks for reports."""

    def __init__(
        self, peers: Peers, *, agree: Agree | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stats = MigrationStats()
        """Counts of the last call."""
        self.peers = peers
        self.agree = agree
        self.clock = clock
        self.pace = PaceEstimator()
        self.history = LengthHistory()
        self._short_calls = ShortCallPredictor()
        self._has_begun = False

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Enclose preparations and :meth:`run_to_end`: if preparations fail, peers receive the failure."""
        self._has_begun = False
        try:
            yield
        except BaseException:
            if not self._has_begun:
                ReportMessages(self.peers).send_failure()
            raise

    def run_to_end(
        self,
        run: SteppedRun,
        access: SampleAccess,
        hints: Sequence[int] | None = None,
        *,
        max_new_tokens: int,
        on_step: Callable[[Sequence[Sample]], None] | None = None,
    ) -> None:
        """Generate until all samples of all ranks are finished and back. Collective over the peers.

        Args:
            hints: Expected response length per prompt; 0 if unknown.
            max_new_tokens: Bound of the responses of all ranks, by which calls of different length are kept apart.
            on_step: Called after every step with all samples that finished on this rank so far.
        """
        lengths = self.history.predictor(access.samples, hints or ())
        recorder = StepRecorder(run, self.pace, self.history, lengths, clock=self.clock, on_step=on_step)
        rounds = _Rounds(self, run, access, recorder, lengths)
        self.stats, self._has_begun = rounds.stats, True
        kind = self.peers.call, max_new_tokens
        talks = run.conversations
        session = talks.serving(rounds.home_of) if isinstance(talks, HomeConversations) else nullcontext()
        try:
            with session:
                if self._short_calls.predict(kind):
                    rounds.run_alone()
                else:
                    for sample in rounds.run_to_end():
                        if sample.finish_reason != "unfinished":
                            self.history.record(sample)
                    self._short_calls.observe(kind, was_short=rounds.was_short)
        except BaseException:
            rounds.abandon()
            raise


class _Rounds:
    """Steps and rounds of one call."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        run: SteppedRun,
        access: SampleAccess,
        recorder: StepRecorder,
        lengths: LengthPredictor,
    ) -> None:
        self._run = run
        self._access = access
        self._recorder = recorder
        self._lengths = lengths
        self._peers = rebalancer.peers
        self._agree, self._clock = rebalancer.agree, rebalancer.clock
        self._handover = SampleHandover(access, self._peers, rebalancer.pace, self._agree, self._clock)
        self.stats = self._handover.stats
        self._messages = ReportMessages(self._peers)
        self._last: LoadReport | None = None
        """This rank's last report; None before the first one."""
        self._round = self._num_quiet = 0
        self._steps_left = PERIOD_STEPS
        self.was_short = False
        """Whether the call was too short on every rank for a move to pay; known at its end."""

    def home_of(self, index: int) -> int:
        """Return the rank whose call a sample on this rank belongs to."""
        return self._handover.home_of(index)

    def run_to_end(self) -> list[Sample]:
        """Make steps and rounds until every sample of every rank is finished; return those that came back."""
        self._messages.post_receives(rounds_ahead=1)
        while True:
            self._handover.take_in_arrived()
            if self._last is None and (self._steps_left <= REPORT_AHEAD_STEPS or not self._run.has_work):
                self._send_report()
            if self._run.has_work and not self._is_round_due():
                # A step that advances nothing waited for environments: there is time for a round.
                self._steps_left = self._steps_left - 1 if self._recorder.step() else 0
            elif not self._run.has_work and self._handover.incoming:
                self._wait(self._handover.wait)
            elif not self._run_round():
                break
        if self._round:
            self._wait(self._messages.exchange_farewells)
        self._recorder.learn()
        returned = self._handover.bring_back()
        self._messages.finish()
        return returned

    def run_alone(self) -> None:
        """Make steps until every sample of this rank is finished, as every other rank does."""
        while self._run.has_work:
            self._recorder.step()
        self._recorder.learn()

    def abandon(self) -> None:
        """Answer all peers that wait for this rank, which failed; the mailbox reports the failure itself."""
        self._handover.abandon()
        self._messages.send_failure()

    def _wait(self, wait: Callable[[], _T]) -> _T:
        begin, talks = self._clock(), self._run.conversations
        replied_s = 0.0 if talks is None else talks.reply_s
        result = wait()
        replied_s = 0.0 if talks is None else talks.reply_s - replied_s
        self.stats.waited_s += self._clock() - begin - replied_s
        return result

    # ---- rounds
    def _is_round_due(self) -> bool:
        """Return whether it is time for a round and all reports are here; a rank with samples waits for none."""
        return self._steps_left <= 0 and self._have_reports_arrived()

    def _have_reports_arrived(self) -> bool:
        have_arrived = float(self._messages.have_arrived())
        return bool(have_arrived if self._agree is None else self._agree([have_arrived])[0])

    def _run_round(self) -> bool:
        """Plan and begin moves by the last reports, and send the next one; return whether there is a next round."""
        reports = self._wait(self._receive_reports)
        if not any(report.live for report in reports):
            # It takes one period to make a plan, and one for the plan to be of use.
            longest_s = max(report.steps_s for report in reports)
            self.was_short = longest_s < 2 * MIN_PERIOD_S and not self._handover.any_moves
            return False
        if not self._round:
            _check_distinct(reports)
            self._messages.post_receives(rounds_ahead=1)
        self._lengths.receive_evidence(report.evidence for report in reports)
        self._handover.release({r.rank: r.expected_since for r in reports if r.rank != self._peers.rank})
        self._handover.hand_over_all()
        self._round += 1
        self.stats.num_rounds = self._round
        self._steps_left = PERIOD_STEPS
        if (known := loads_from_reports(reports)) is not None:
            moves = self._plan(*known, {report.rank: report.pace.step_s for report in reports})
            reported = (sample for report in reports for sample in report.live)
            self._handover.begin(moves, reported, self._round)
        self._send_report()
        return True

    def _plan(self, loads: Sequence[RankLoad], cost: MoveCost, step_s: Mapping[int, float]) -> tuple[SampleMove, ...]:
        """Return the moves of this round, and set the steps until the next one."""
        seconds = {load.rank: step_s[load.rank] or load.curve.seconds(max(load.rows, 1)) for load in loads}
        # Reports are a round old and moves take a round, in which a smaller gap between ranks may close.
        period_s = max(PERIOD_STEPS * max(seconds.values()), MIN_PERIOD_S)
        moves = plan_balance(
            loads, cost if self._peers.moves == "all" else None, min_gap_s=period_s, current_round=self._round
        )
        num_quiet = (
            self._num_quiet + 1 if self._lengths.knows_ends else 1
        )  # rounds stay frequent until lengths are known
        self._num_quiet = 0 if moves else num_quiet
        next_s = next_round_s(loads, period_s, self._num_quiet)
        self._steps_left = max(1, round(next_s / seconds[self._peers.rank]))
        return moves

    # ---- reports
    def _send_report(self) -> None:
        if self._round:
            self._messages.post_receives(rounds_ahead=2)
        self._last = self._report()
        self._messages.send({"report": self._last})

    def _receive_reports(self) -> list[LoadReport]:
        """Return the last report of every rank, ranks ascending; waits for them."""
        assert self._last is not None, "a round begins with a report"
        received = [LoadReport.from_json(content["report"]) for content in self._messages.receive()]
        return sorted((self._last, *received), key=lambda report: report.rank)

    def _report(self) -> LoadReport:
        pace = self._recorder.report(self._agree)
        access, outgoing = self._access, self._handover.outgoing
        running, held = access.running, access.held
        self._lengths.watch(len(access.samples[index].token_ids) for index in (*running, *held))
        # Held samples, and samples on their way, cannot move now: they are reported as if they had just moved.
        live = [self._live(i) for i in running] + [self._live(i)._replace(last_moved_round=self._round) for i in held]
        return LoadReport(
            rank=self._peers.rank,
            running=tuple(sample for sample in live if sample.sample_id not in outgoing),
            waiting=tuple(s for s in map(self._live, access.queued) if s.sample_id not in outgoing),
            incoming=tuple(s._replace(last_moved_round=self._round) for s in self._handover.incoming.values()),
            free_slots=access.free_slots,
            bytes_per_token=self._bytes_per_token(),
            pace=pace,
            steps_s=self._recorder.steps_s,
            evidence=self._lengths.evidence,
            expected_since=self._handover.expected_since(self._round),
        )

    def _bytes_per_token(self) -> float:
        """Return the bytes of a token's keys and values: under tensor parallelism, those of the first rank."""
        own = self._access.bytes_per_token
        return own if self._agree is None else self._agree([own])[0]

    def _live(self, index: int) -> LiveSample:
        sample = self._access.samples[index]
        num_tokens = len(sample.token_ids)
        remaining = self._lengths.expected(sample.prompt_number, num_tokens, max_new_tokens=sample.max_new_tokens)
        moved_in = self._handover.moved_in.get(sample.sample_id)
        return LiveSample(sample.sample_id, sample.position + 1, remaining, moved_in, num_tokens > 0)


def _check_distinct(reports: Sequence[LoadReport]) -> None:
    ids = [sample.sample_id for report in reports for sample in report.live]
    duplicates = sorted(sample_id for sample_id, count in Counter(ids).items() if count > 1)
    if duplicates:
        raise GenerationError(
            f"ranks that move samples between them need distinct sample ids, and {duplicates[:8]} are on several; pass "
            "generate(sample_ids=...) with ids that no other rank uses"
        )


def next_round_s(loads: Sequence[RankLoad], period_s: float, num_quiet: int) -> float:
    """Return the seconds until the next round: ``period_s`` after a move, more after ``num_quiet`` rounds without one.

    The bounds are four periods, and two fifths of the time until the first rank finishes.
    """
    first_finish_s = min(drain_seconds(load) for load in loads)
    return max(min(min(2.0**num_quiet, 4.0) * period_s, 0.4 * first_finish_s), period_s)
