"""The loop of speculative decoding: draft, plan what to verify, learn from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.acceptance import AcceptanceRates
from lightning_realloc.generation.draft_planner import PLAN_STEPS, DraftPlan, DraftPlanner
from lightning_realloc.generation.draft_worth import Payoff
from lightning_realloc.generation.drafting import Drafter
from lightning_realloc.generation.foresight import DraftOutcome, Foresight, limits_of
from lightning_realloc.generation.remaining_lengths import RemainingLengths
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.speculation import Speculation
from lightning_realloc.generation.step_costs import LEAST_S, effective_tokens, forwards_of, look_ups_of
from lightning_realloc.generation.verification import NO_DRAFT, Draft, Verification

_SETTLED = 6
"""Plain steps in a row after which another one takes as long as it does among its like: right behind verifying ones it
takes up to a fifth longer."""
_LOOK_AHEAD_EVERY = 16
"""Steps after which more is drafted than verified: so it is learnt whether deeper and unlikelier tokens stand."""
_FEW = 2
"""Samples that are learnt from in one step."""
_FEW_FOR = 8
"""Steps after which others of them are: what is done every so many steps must not see the same ones each time."""


@dataclass(slots=True)
class SpeculationStats:
    """What drafting came to in one generation."""

    drafted_tokens: int = 0
    verified_tokens: int = 0
    """Drafted tokens that the target read."""
    accepted_tokens: int = 0
    drafting_s: float = 0.0
    planning_s: float = 0.0


@dataclass(slots=True)
class _Observation:
    """Seconds of one step, to be agreed on before they are learnt from."""

    num_rows: int
    num_tokens: int
    width: int
    """Most tokens of one draft that were verified."""
    depth: int
    """Most tokens of one draft that were made."""
    num_drafted: int
    drafted: bool
    """Whether drafting did not rest."""
    is_settled: bool
    """Whether it is one of many plain steps in a row."""
    drafted_before: bool
    """Whether the step before it verified drafts, too: else a drafter first takes in what came since."""
    num_missed: int
    """Tokens that the drafter's model read first, since it had missed them."""
    gained_s: float
    """What its tokens were worth, if drafted."""
    step_s: float
    drafting_s: float
    """Where drafting rested, those of looking up what is not verified."""
    preparing_s: float
    """Of drafting, what is done once for a sample: it belongs to what drafting takes, and not to a token's price."""


class _Last(NamedTuple):
    """The step before this one."""

    running: Sequence[Sample] = ()
    emitted: Sequence[Sequence[int]] = ()
    depth: int = 0
    """Most tokens of one draft that it verified."""

    def is_resumed(self, row: int, sample: Sample) -> bool | None:
        """Return whether a draft for this sample goes on where one stood to the last token that it might have had.

        None where that is not known, since nothing was drafted for this sample.
        """
        if not self.depth or row >= len(self.running) or self.running[row] is not sample:
            return None
        return len(self.emitted[row]) > self.depth


class Speculator:
    """Drafts for the running samples in every step, and learns what drafts and steps come to. One per engine.

    Ranks that share a tensor-parallel model decide alike: they run the same samples, and ``agree`` gives all of them
    one rank's measured seconds.
    """

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        *,
        agree: Callable[[Sequence[float]], Sequence[float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Draft with ``drafter``; ``clock`` tells seconds."""
        self.clock = clock
        self.stats = SpeculationStats()
        self.drafter = drafter
        self._speculation = speculation
        self._agree = agree
        self._rates = AcceptanceRates()
        self._planner = DraftPlanner(speculation.most_ahead, costs_a_forward=drafter.costs_a_forward)
        self._observations: list[_Observation] = []
        self._foresight = Foresight(drafter, speculation.max_draft_tokens)
        self._outcomes: list[DraftOutcome] = []
        """To be learnt from before the next plan."""
        self._payoff = Payoff()
        self._lengths = RemainingLengths()
        self._num_steps = 0
        self._drafts: list[Draft] = []
        self._limits: Sequence[int] = ()
        """Most tokens that each of them might have had."""
        self._plan: DraftPlan | None = None
        self._plan_rows = self._plan_until = 0
        """Number of samples that the plan is for, and of the first step that needs another one."""
        self._worths: Sequence[float] = ()
        """Of a token of each sample, in this step; none where nothing is drafted."""
        self._running: Sequence[Sample] = ()
        """The samples of this step."""
        self._depth = 0
        """Most tokens of one draft that it verifies."""
        self._last = _Last()
        self._gained_s = self._drafting_s = self._preparing_s = 0.0
        self._num_missed = 0
        """Tokens that the drafter's model has to read before it can draft, beyond what it reads in every step."""
        self._num_plain = 0
        """Steps in a row that verified nothing."""
        self._drafted_before = False

    def begin(self, samples: Sequence[Sample], params: SamplingParams, num_slots: int) -> Verification:
        """Start a generation; return its verification rule.

        Raises:
            GenerationError: where the rule must not know of tokens that it leaves out, and the drafter's estimates do.
        """
        rule = self._speculation.rule(params)
        adapts = self._speculation.num_draft_tokens is None
        if adapts and self.drafter.anticipates and not rule.anticipates:
            raise GenerationError(
                f"verification='reject' keeps the distribution only where a draft's length does not depend on the "
                f"tokens it leaves out, and the estimates of {type(self.drafter).__name__} do; use "
                f"verification='match', or a fixed num_draft_tokens"
            )
        self.stats = SpeculationStats()
        self._lengths = self._lengths.for_next()
        self._plan = None
        self._plan_rows = 0
        self._last = _Last()
        self._anticipates = rule.anticipates
        self._foresight.begin()
        self.drafter.begin(samples, rule, num_slots)
        return rule

    def propose(self, running: Sequence[Sample], *, is_tail: bool = False, reads_prompts: bool = False) -> list[Draft]:
        """Return what to verify behind each running sample's last token; empty drafts where that does not pay.

        ``is_tail``: no sample waits for a slot, so that the one which takes longest decides when all are done.
        ``reads_prompts``: so does this step, and how long it takes will say nothing about drafting.
        """
        self._num_steps += 1
        self._running = running
        if self._speculation.num_draft_tokens is not None:
            chosen = self._draft_fixed(running, self._speculation.num_draft_tokens)
        elif self._rests(len(running)) or (reads_prompts and not self._payoff.pays(len(running))):
            self._take_no_drafts()
            if not reads_prompts:  # such a step is not timed
                self._foresee(running)
            chosen = [NO_DRAFT] * len(running)
        else:
            chosen = self._draft_what_pays(running, is_tail)
        self.stats.drafted_tokens += sum(map(len, self._drafts))
        return chosen

    def learn(self, verified: Sequence[Draft], emitted: Sequence[Sequence[int]]) -> None:
        """Take the outcome of a step: the tokens that each sample got."""
        self.stats.verified_tokens += sum(map(len, verified))
        self.stats.accepted_tokens += sum(map(len, emitted)) - len(emitted)
        if self._speculation.num_draft_tokens is not None:
            return
        self._drafted_before = not self._num_plain
        if any(map(len, verified)):
            self._num_plain = 0
            self._foresight.rest()
        else:
            self._num_plain += 1
        if self._worths:
            self._gained_s = sum(worth * len(own) for worth, own in zip(self._worths, emitted, strict=True))
        # What a draft was cut off from tells something, too: a token there was right where the target drew the same.
        # Learnt later, many at once: right behind a forward the same takes twice as long.
        self._outcomes += [
            DraftOutcome(self._drafts[row].without_laws(), emitted[row], self._limits[row],
                         self._last.is_resumed(row, self._running[row]))
            for row in self._few(len(self._drafts))
        ]  # fmt: skip
        self._last = _Last(self._running, emitted, self._depth)

    def time_step(self, verified: Sequence[Draft], seconds: float) -> None:
        """Take the seconds of a step that read no prompts, drafting aside."""
        if self._speculation.num_draft_tokens is not None:
            return
        num_rows = len(verified)
        drafted = [len(draft) for draft in self._drafts]
        lengths = [len(draft) for draft in verified]
        self._observations.append(
            _Observation(
                num_rows, num_rows + sum(lengths), max(lengths), max(drafted, default=0), sum(drafted),
                bool(self._worths), self._num_plain > _SETTLED, self._drafted_before, self._num_missed, self._gained_s,
                seconds, self._drafting_s, self._preparing_s,
            )
        )  # fmt: skip
        self._preparing_s = 0.0
        # Several at once, as outcomes are, and ranks agree on them together; what may not pay is judged step by step.
        is_doubtful = self._agree is None and not self._payoff.pays(num_rows)
        if is_doubtful or len(self._observations) >= PLAN_STEPS:
            self._take_observations()

    def finished(self, sample: Sample) -> None:
        """Take a sample that has its last token."""
        num_tokens = len(sample.token_ids)
        self._lengths.finish(sample.prompt_index, num_tokens, is_cut=num_tokens >= sample.max_new_tokens)
        begin = self.clock()
        self.drafter.finished(sample)
        self._preparing_s += self.clock() - begin

    def end(self) -> None:
        """End the generation."""
        self.drafter.end()

    def _draft_fixed(self, running: Sequence[Sample], depth: int) -> list[Draft]:
        begin = self.clock()
        limits = limits_of(running, depth)
        self._drafts = self.drafter.propose(running, limits, self._rates, [0.0] * len(running))
        self.stats.drafting_s += self.clock() - begin
        return self._drafts

    def _draft_what_pays(self, running: Sequence[Sample], is_tail: bool) -> list[Draft]:
        """Draft by the plan that holds, or by a new one."""
        begin = self.clock()
        most_in_a_step = len(running) * (1 + self._speculation.max_draft_tokens)
        self._num_missed = max(self.drafter.num_unread(running) - most_in_a_step, 0)
        if self._held_plan(len(running)) is None:
            self._take_outcomes()
            self._plan = self._planner.plan(self._left(running), is_tail=is_tail, num_missed=self._num_missed)
            self._plan_rows, self._plan_until = len(running), self._num_steps + PLAN_STEPS
            if self._plan.is_untried:
                self._payoff.forgive(len(running))
        assert self._plan is not None, "made above"
        planned = self.clock()
        self.stats.planning_s += planned - begin
        # Where the drafter's model has to catch up first, trying is dear: the planner alone says when.
        if not self._plan.depth and (self._num_missed or not self._payoff.tries_again(len(running))):
            self._take_no_drafts()
            return [NO_DRAFT] * len(running)
        self.drafter.prepare(running)
        prepared = self.clock()
        chosen = self._draft_by(self._plan, running)
        end = self.clock()
        self.stats.drafting_s += end - planned
        self._preparing_s += prepared - planned
        self._drafting_s = end - prepared
        return chosen

    def _draft_by(self, plan: DraftPlan, running: Sequence[Sample]) -> list[Draft]:
        """Return what to verify of what is drafted; now and then, that is less."""
        num_rows, depth, least = len(running), plan.depth, plan.least_survivals
        if not depth:  # or what verifying takes would never be learnt anew
            depth, least = 1, [0.0] * num_rows
        self._depth = depth
        looks_ahead = self._anticipates and not self.drafter.costs_a_forward and not self._num_steps % _LOOK_AHEAD_EVERY
        most = depth
        if looks_ahead:
            most, least = min(2 * depth, self._speculation.max_draft_tokens), [0.0] * num_rows
        self._limits = limits_of(running, most)
        self._worths = plan.worths or [self._planner.costs.plain_s(num_rows)[0] / num_rows] * num_rows
        self._drafts = self.drafter.propose(running, self._limits, self._rates, least)
        return [draft.cut(depth) if len(draft) > depth else draft for draft in self._drafts]

    def _take_no_drafts(self) -> None:
        self._drafts, self._worths, self._depth, self._drafting_s, self._num_missed = [], (), 0, 0.0, 0

    def _foresee(self, running: Sequence[Sample]) -> None:
        """Look up what some samples might get next: whether it would have stood is learnt without verifying it."""
        if self.drafter.costs_a_forward or not self._anticipates or not self._foresight.is_due(self._num_steps):
            return
        begin = self.clock()
        self._take_outcomes()
        self._foresight.look(self._num_steps, [running[row] for row in self._few(len(running))], self._rates)
        self._drafting_s = self.clock() - begin
        self.stats.drafting_s += self._drafting_s

    def _take_outcomes(self) -> None:
        """Learn from what drafts came to since the last time, and from what was foreseen, as far as it is known."""
        for outcome in (*self._outcomes, *self._foresight.take_outcomes()):
            outcome.teach(self._rates, self._planner.profile)
        self._outcomes.clear()

    def _few(self, num_rows: int) -> range:
        """Return samples to learn from in this step, others in every step."""
        stride = max(-(-num_rows // _FEW), 1)
        return range((self._num_steps + self._num_steps // _FEW_FOR) % stride, num_rows, stride)

    def _rests(self, num_rows: int) -> bool:
        """Return whether nothing is drafted in this step."""
        if not self._planner.costs.plain.knows(num_rows):
            return True
        plan = self._held_plan(num_rows)
        return self._payoff.rests(num_rows) or (plan is not None and not plan.depth)

    def _held_plan(self, num_rows: int) -> DraftPlan | None:
        """Return the plan that still holds; None where it is time for another one."""
        return self._plan if self._plan_rows == num_rows and self._num_steps < self._plan_until else None

    def _left(self, running: Sequence[Sample]) -> list[float]:
        """Return how many tokens each sample is expected to get still."""
        expected = self._lengths.expected
        return [expected(sample.prompt_index, len(sample.token_ids), max_new_tokens=sample.max_new_tokens)
                for sample in running]  # fmt: skip

    def _take_observations(self) -> None:
        seconds = [value for seen in self._observations for value in (seen.step_s, seen.drafting_s, seen.preparing_s)]
        agreed = iter(seconds if self._agree is None else self._agree(seconds))
        costs = self._planner.costs
        for seen in self._observations:
            step_s, drafting_s, preparing_s = max(next(agreed), LEAST_S), max(next(agreed), 0.0), next(agreed)
            if seen.drafted and not seen.num_missed:  # what is missed is read once, however long drafting goes on
                self._payoff.learn(seen.num_rows, seen.gained_s, step_s + drafting_s + max(preparing_s, 0.0))
            elif not seen.drafted:
                self._foresight.spend(drafting_s, step_s)
            if seen.num_tokens > seen.num_rows:
                size = effective_tokens(seen.num_rows, seen.num_tokens, seen.width)
                costs.verifying.observe(size, step_s)
            elif seen.is_settled or not costs.plain.knows(seen.num_rows):
                costs.plain.observe(seen.num_rows, step_s)
            if seen.num_missed:
                if seen.num_drafted:
                    usual_s = forwards_of(seen.depth) * costs.drafting_s(seen.num_rows)
                    costs.catching_up.observe(seen.num_missed, drafting_s - usual_s)
            elif seen.num_drafted and seen.drafted_before:
                by_forwards = self.drafter.costs_a_forward
                times = forwards_of(seen.depth) if by_forwards else look_ups_of(seen.num_rows, seen.num_drafted)
                costs.drafting.observe(seen.num_rows, drafting_s / times)
        self._observations.clear()
