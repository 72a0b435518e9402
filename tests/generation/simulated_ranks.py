"""Data-parallel generation ranks played through event by event, to try what moves of samples are worth.

Independent of what it tests: it counts whole steps of the true lengths, which the policy never sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, erfc, exp, log, sqrt

from lightning_realloc.generation.rebalance.balance import Choice
from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, SampleMove, StepCurve

PERIOD_STEPS = 16
PROMPT_TOKENS = 128

Policy = Callable[[tuple[RankLoad, ...], int], tuple[SampleMove, ...]]
"""Published loads and the current step -> moves."""
StagePolicy = Callable[[tuple[RankLoad, ...], int], Choice]
"""The same -> moves, and ranks that generate no more."""


@dataclass(slots=True)
class SimulatedSample:
    """A response with its true length, and what is known of it: a log-normal distribution, cut at ``longest``."""

    sample_id: int
    length: int
    median: float
    noise: float
    """Standard deviation of the length's logarithm; 0: the length is known."""
    longest: int
    done: int = 0
    last_moved_step: int | None = None

    def published(self) -> LiveSample:
        """Return what its rank tells of it: the expected remaining length, given that it is not over yet."""
        context = PROMPT_TOKENS + self.done
        return LiveSample(self.sample_id, context, self._expected() - self.done, self.last_moved_step)

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
    """When its last sample so far ended."""
    finished_tokens: int = 0
    """Prompts included."""

    def admit(self) -> None:
        begun = max(self.slots - len(self.running), 0)
        self.running += self.waiting[:begun]
        del self.waiting[:begun]

    def run_until(self, until_s: float) -> None:
        """Take steps until the clock has passed ``until_s``; without rows it passes idly."""
        self.admit()
        while self.running and self.clock_s < until_s:
            step_s = self.curve.seconds(len(self.running))
            to_an_end = min(sample.length - sample.done for sample in self.running)
            steps = min(to_an_end, ceil((until_s - self.clock_s) / step_s))
            self.clock_s += steps * step_s
            for sample in self.running:
                sample.done += steps
            if steps == to_an_end:
                ended = (sample for sample in self.running if sample.done == sample.length)
                self.finished_tokens += sum(PROMPT_TOKENS + sample.length for sample in ended)
                self.running = [sample for sample in self.running if sample.done < sample.length]
                self.finished_s = self.clock_s
                self.admit()
        self.clock_s = max(self.clock_s, until_s)

    def published(self, call_s_per_token: float = 0.0) -> RankLoad:
        running = tuple(sample.published() for sample in self.running)
        waiting = tuple(sample.published() for sample in self.waiting)
        load = RankLoad(self.rank, running, waiting, self.curve, self.slots - len(running))
        return replace(load, waiting_call_s=call_s_per_token * self.finished_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage went."""

    makespan_s: float
    moves: int
    """Carried out."""
    stage_s: float
    """With the calls that wait for samples: those that freed ranks did not make meanwhile come after, on all ranks."""


def simulate(ranks: list[SimulatedRank], cost: MoveCost, policy: Policy | None) -> Outcome:
    """Run all samples to their end, asking ``policy`` every period; None: nobody moves."""

    def choose(loads: tuple[RankLoad, ...], step: int) -> Choice:
        return Choice("none", () if policy is None else policy(loads, step), (), 0.0)

    return simulate_stage(ranks, cost, choose)


def simulate_stage(
    ranks: list[SimulatedRank], cost: MoveCost, policy: StagePolicy, *, call_s_per_token: float = 0.0
) -> Outcome:
    """Run all samples to their end, and calls that take so long for each of their tokens.

    What the ranks publish at the end of a period decides the moves at the end of the next one.
    """
    now_s, step, num_moves = 0.0, 0, 0
    planned = Choice("none", (), (), 0.0)
    freed: dict[int, float] = {}
    while any(rank.running or rank.waiting for rank in ranks):
        rows = {rank.rank: min(len(rank.running) + len(rank.waiting), rank.slots) for rank in ranks}
        now_s += PERIOD_STEPS * max(rank.curve.seconds(rows[rank.rank]) for rank in ranks)
        step += PERIOD_STEPS
        for rank in ranks:
            rank.run_until(now_s)
        num_moves += sum(_carry_out(move, ranks, cost, step) for move in planned.moves)
        freed |= {rank: ranks[rank].clock_s for rank in planned.freed}
        planned = policy(tuple(rank.published(call_s_per_token) for rank in ranks if rank.rank not in freed), step)
    makespan_s = max(rank.finished_s for rank in ranks)
    left_s = sum(call_s_per_token * rank.finished_tokens for rank in ranks)
    for rank, since_s in freed.items():
        left_s -= min(max(makespan_s - since_s, 0.0), call_s_per_token * ranks[rank].finished_tokens)
    return Outcome(makespan_s, num_moves, makespan_s + left_s / len(ranks))


def _carry_out(move: SampleMove, ranks: list[SimulatedRank], cost: MoveCost, step: int) -> bool:
    """Move a sample unless it has ended meanwhile or no slot is left for it; return whether it moved."""
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
            sample.last_moved_step = step
            return True
    return False


def fresh(ranks: list[SimulatedRank]) -> list[SimulatedRank]:
    """Return ranks that have not begun, with the same samples."""
    return [replace(rank, waiting=[replace(sample) for sample in rank.waiting], running=[]) for rank in ranks]
