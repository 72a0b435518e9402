"""Simulate data-parallel generation ranks event by event, to measure the gain of moving samples.

Independent of the code under test: it counts whole steps of the true lengths. The policy sees only expected lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, erfc, exp, log, sqrt

from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, SampleMove, StepCurve

PERIOD_STEPS = 16
PROMPT_TOKENS = 128

Policy = Callable[[tuple[RankLoad, ...], int], tuple[SampleMove, ...]]
"""Reported loads and the current round -> moves."""


@dataclass(slots=True)
class SimulatedSample:
    """A response with its true length, and its assumed distribution: log-normal, cut at ``longest``."""

    sample_id: int
    length: int
    median: float
    noise: float
    """Standard deviation of the length's logarithm; 0: the length is known."""
    longest: int
    done: int = 0
    last_moved_round: int | None = None

    def published(self) -> LiveSample:
        """Return its entry in its rank's report: the expected remaining length, given that it has not finished."""
        context = PROMPT_TOKENS + self.done
        return LiveSample(self.sample_id, context, self._expected() - self.done, self.last_moved_round)

    def _expected(self) -> float:
        # E[L | L > done] = median exp(noise² / 2) P(Z < noise − z) / P(Z > z), with z = log(done / median) / noise.
        if self.noise == 0.0:
            return self.length
        z = log(max(self.done, 1) / self.median) / self.noise
        longer = erfc(z / sqrt(2))
        if longer < 1e-9:
            return self.longest
        mean = self.median * exp(self.noise**2 / 2) * erfc((z - self.noise) / sqrt(2)) / longer
        return max(min(mean, self.longest), self.done)


@dataclass(slots=True)
class SimulatedRank:
    """A rank with its own clock: it decodes whenever it has rows."""

    rank: int
    waiting: list[SimulatedSample]
    slots: int
    curve: StepCurve
    running: list[SimulatedSample] = field(default_factory=list)
    clock_s: float = 0.0
    finished_s: float = 0.0
    """Time on the clock when its last finished sample ended."""

    def admit(self) -> None:
        begun = max(self.slots - len(self.running), 0)
        self.running += self.waiting[:begun]
        del self.waiting[:begun]

    def run_until(self, until_s: float) -> None:
        """Run steps until the clock has passed ``until_s``; a rank without rows is idle."""
        self.admit()
        while self.running and self.clock_s < until_s:
            step_s = self.curve.seconds(len(self.running))
            to_an_end = min(sample.length - sample.done for sample in self.running)
            steps = min(to_an_end, ceil((until_s - self.clock_s) / step_s))
            self.clock_s += steps * step_s
            for sample in self.running:
                sample.done += steps
            if steps == to_an_end:
                self.running = [sample for sample in self.running if sample.done < sample.length]
                self.finished_s = self.clock_s
                self.admit()
        self.clock_s = max(self.clock_s, until_s)

    def published(self) -> RankLoad:
        running = tuple(sample.published() for sample in self.running)
        waiting = tuple(sample.published() for sample in self.waiting)
        return RankLoad(self.rank, running, waiting, self.curve, self.slots - len(running))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a stage."""

    makespan_s: float
    moves: int
    """Moves that were carried out."""


def simulate(ranks: list[SimulatedRank], cost: MoveCost, policy: Policy | None) -> Outcome:
    """Run all samples to their end, with moves by ``policy`` every period; None: no sample moves.

    Reports at the end of a period decide the moves at the end of the next one.
    """
    now_s, current_round, num_moves = 0.0, 0, 0
    planned: tuple[SampleMove, ...] = ()
    while any(rank.running or rank.waiting for rank in ranks):
        rows = {rank.rank: min(len(rank.running) + len(rank.waiting), rank.slots) for rank in ranks}
        now_s += PERIOD_STEPS * max(rank.curve.seconds(rows[rank.rank]) for rank in ranks)
        current_round += 1
        for rank in ranks:
            rank.run_until(now_s)
        num_moves += sum(_carry_out(move, ranks, cost, current_round) for move in planned)
        planned = () if policy is None else policy(tuple(rank.published() for rank in ranks), current_round)
    return Outcome(max(rank.finished_s for rank in ranks), num_moves)


def _carry_out(move: SampleMove, ranks: list[SimulatedRank], cost: MoveCost, current_round: int) -> bool:
    """Move a sample unless it has finished meanwhile or no slot is free for it; return whether it moved."""
    source, target = ranks[move.source], ranks[move.target]
    for queue, into in ((source.waiting, target.waiting), (source.running, target.running)):
        for sample in [sample for sample in queue if sample.sample_id == move.sample_id]:
            if queue is source.running:
                if len(target.running) + len(target.waiting) >= target.slots:
                    return False
                source.clock_s += cost.stall_s
                target.clock_s += cost.stall_s + cost.handover(sample.published())[1]
            queue.remove(sample)
            into.append(sample)
            sample.last_moved_round = current_round
            return True
    return False


def fresh(ranks: list[SimulatedRank]) -> list[SimulatedRank]:
    """Return copies of the ranks before their first step."""
    return [replace(rank, waiting=[replace(sample) for sample in rank.waiting], running=[]) for rank in ranks]
