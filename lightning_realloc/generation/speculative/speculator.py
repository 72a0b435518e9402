"""The loop of speculative decoding: draft, verify what the plan says, hand what came of it to the learner."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import SamplingParams
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor
from lightning_realloc.generation.speculative.config import Speculation
from lightning_realloc.generation.speculative.draft_learner import DraftLearner
from lightning_realloc.generation.speculative.draft_planner import LOOK_BACK_EVERY, DraftPlan, DraftPlanner
from lightning_realloc.generation.speculative.draft_step import DraftStep
from lightning_realloc.generation.speculative.draft_worth import Payoff
from lightning_realloc.generation.speculative.drafting import Chance, Drafter, check_drafts
from lightning_realloc.generation.speculative.foresight import DraftOutcome, Foresight, limits_of
from lightning_realloc.generation.speculative.held_plan import HeldPlan
from lightning_realloc.generation.speculative.verify import NO_DRAFT, Draft, Verification

_LOOK_AHEAD_EVERY = 8
_AHEAD_OF_ROWS = 2
"""Steps after which more is drafted than verified, and so many more for each sample that runs at most: so it is learnt
whether deeper and unlikelier tokens stand. Many samples tell as much at once, and take the last one ahead no more."""


@dataclass(slots=True)
class SpeculationStats:
    """What drafting came to in one generation."""

    drafted_tokens: int = 0
    verified_tokens: int = 0
    """Drafted tokens that the target read."""
    accepted_tokens: int = 0
    drafting_s: float = 0.0
    planning_s: float = 0.0


class Speculator:
    """Drafts for the running samples in every step. One per engine: what it learnt outlives a generation.

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
        vocabulary: int | None = None,
    ) -> None:
        """Draft with ``drafter``; ``clock`` tells seconds; ``vocabulary``: how many tokens the target knows."""
        self.clock = clock
        self._vocabulary = vocabulary
        self._needs_laws = False
        # The package's own drafters are right, and asking in every step would take as long as planning does.
        is_own = type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]
        self._propose = drafter.propose if is_own else self._propose_checked
        self.stats = SpeculationStats()
        self.drafter = drafter
        self.drafter.clock = clock
        self._speculation = speculation
        self._planner = DraftPlanner(speculation.most_ahead, costs_a_forward=drafter.costs_a_forward)
        self._foresight = Foresight(drafter, speculation.max_draft_tokens, propose=self._propose)
        self._payoff = Payoff()
        self._learner = DraftLearner(
            self._planner, self._payoff, self._foresight, costs_a_forward=drafter.costs_a_forward, agree=agree
        )
        self._lengths = LengthPredictor()
        self._num_steps = 0
        self._step = DraftStep(0, ())
        self._held = HeldPlan()
        self._is_acquainted = False
        self._foreseeing_s = 0.0
        """Of this step, behind its forward: what drafts for samples that are over would have come to."""
        self._preparing_s = 0.0
        """Since the last step whose seconds were taken."""

    @property
    def adapts(self) -> bool:
        """Whether it decides by measured seconds how much to draft."""
        return self._speculation.num_draft_tokens is None

    def begin(self, samples: Sequence[Sample], params: SamplingParams, num_slots: int) -> Verification:
        """Start a generation; return its verification rule.

        Raises:
            GenerationError: where the rule must not know of tokens that it leaves out, and the drafter's estimates do.
        """
        rule = self._speculation.rule(params)
        if self.adapts and self.drafter.anticipates and not rule.anticipates:
            raise GenerationError(
                f"verification='reject' keeps the distribution only where a draft's length does not depend on the "
                f"tokens it leaves out, and the estimates of {type(self.drafter).__name__} do; use "
                f"verification='match', or a fixed num_draft_tokens"
            )
        self.stats = SpeculationStats()
        self._lengths = self._lengths.decayed()
        # Where drafts cost a forward, nobody looked what they come to by now.
        self._held.release(and_forget_idle=self.drafter.costs_a_forward)
        self._turn_to(acquainted=self.drafter.is_acquainted(samples))
        self._learner.begin()
        self._needs_laws = not rule.anticipates
        self._may_foresee = self.adapts and rule.anticipates and not self.drafter.costs_a_forward
        self.drafter.begin(samples, rule, num_slots)
        return rule

    def propose(
        self, running: Sequence[Sample], *, is_tail: bool = False, being_read: Collection[int] = ()
    ) -> Sequence[Draft]:
        """Return what to verify behind each running sample's last token; empty drafts where that does not pay.

        ``is_tail``: no sample waits for a slot, so that the one which takes longest decides when all are done.
        ``being_read``: slots whose prompts this step reads; how long it takes will say nothing about drafting.
        """
        self._num_steps += 1
        self._foreseeing_s = 0.0
        step = self._step = DraftStep(self._num_steps, running, being_read)
        self._learner.begin_step(step)
        if self._speculation.num_draft_tokens is not None:
            chosen = self._draft_fixed(step, self._speculation.num_draft_tokens)
        else:
            chosen = self._draft_what_pays(step, is_tail)
        self.stats.drafted_tokens += sum(map(len, step.drafts))
        return chosen

    def learn(self, verified: Sequence[Draft], emitted: Sequence[Sequence[int]]) -> None:
        """Take the outcome of a step: the tokens that each sample got."""
        step = self._step
        lengths = [len(draft) for draft in verified] if step.drafts else ()
        num_verified = sum(lengths)
        if num_verified:
            self.stats.verified_tokens += num_verified
            self.stats.accepted_tokens += sum(map(len, emitted)) - len(emitted)
        if not self.adapts:
            return
        step.emitted, step.lengths = emitted, lengths
        if num_verified and not step.is_try:
            self._foresight.rest()
        self._learner.keep_outcome(step)

    def time_step(self, seconds: float) -> None:
        """Take the seconds of the step that was learnt from last, if it read no prompts, drafting aside."""
        if not self.adapts:
            return
        step = self._step
        step.seconds = seconds - self._foreseeing_s
        step.preparing_s, self._preparing_s = self._preparing_s, 0.0
        if self._learner.keep_seconds(step):
            begin = self.clock()
            self._learner.learn_seconds()
            taken_s = self.clock() - begin
            self.stats.planning_s += taken_s
            self._preparing_s += taken_s

    def finished(self, sample: Sample) -> None:
        """Take a sample that has its last token."""
        self._lengths.finish(sample.prompt_number, len(sample.token_ids), is_cut=sample.is_full)
        # In a step with drafts, its seconds would be taken for theirs.
        if self._may_foresee and not self._step.depth and self._foresight.heeds_end_of(sample):
            begin = self.clock()
            self._foreseeing_s += self._take_foreseen(self._foresight.finish(sample, self._learner.rates), begin)
        self.drafter.finished(sample)

    def end(self, *, has_failed: bool = False) -> None:
        """End the generation."""
        begin = self.clock()
        self._learner.end()
        self.stats.planning_s += self.clock() - begin
        self.drafter.end(has_failed=has_failed)

    def _turn_to(self, *, acquainted: bool) -> None:
        """Go on by what was learnt of samples whose prompts were met before, or of others."""
        self._planner.turn_to(acquainted=acquainted)
        self._payoff.turn_to(acquainted=acquainted)
        self._foresight.begin(acquainted=acquainted)
        if acquainted != self._is_acquainted:
            self._is_acquainted = acquainted
            self._held.forget()

    def _draft_fixed(self, step: DraftStep, depth: int) -> Sequence[Draft]:
        begin = self.clock()
        limits = self._limits(step, depth)
        step.drafts = self._propose(step.running, limits, self._learner.rates, [0.0] * len(limits))
        self.stats.drafting_s += self.clock() - begin
        return step.drafts

    def _draft_what_pays(self, step: DraftStep, is_tail: bool) -> Sequence[Draft]:
        """Draft by the plan that holds, or by a new one; nothing where drafting rests."""
        begin = self.clock()
        num_rows = len(step.running)
        rests = not self._planner.costs.plain.knows(num_rows) or self._payoff.rests(num_rows)
        if rests:
            self._held.expire(step)
        plan = self._held.of(step)
        is_idle = plan is not None and not plan.depth and not self._held.tries(step)
        if rests or is_idle or (step.being_read and not self._payoff.pays(num_rows)):
            self._foresee(step)
            return [NO_DRAFT] * num_rows
        most_in_a_step = num_rows * (1 + self._speculation.max_draft_tokens)
        num_missed = max(self.drafter.num_unread(step.running) - most_in_a_step, 0)
        if plan is None:
            plan = self._make_plan(step, num_missed, is_tail)
        planned = self.clock()
        self.stats.planning_s += planned - begin
        step.is_try = plan.is_try or not plan.depth
        # Where the drafter's model has to catch up first, one step tells too little for what it takes.
        if not plan.depth and (num_missed or not self._held.tries(step)):
            self._foresee(step)
            return [NO_DRAFT] * num_rows
        self.drafter.prepare(step.running)
        prepared = self.clock()
        step.num_missed = num_missed
        chosen = self._draft_by(plan, step)
        end = self.clock()
        self.stats.drafting_s += end - planned
        self._preparing_s += prepared - begin
        step.drafting_s, step.first_s = end - prepared, self.drafter.first_s
        return chosen

    def _make_plan(self, step: DraftStep, num_missed: int, is_tail: bool) -> DraftPlan:
        """Return another plan: the earlier one for about as many samples, or one from what is known by now."""
        num_rows, earlier = len(step.running), self._held.earlier(step)
        if earlier is not None and not earlier.depth:
            self._held.resume(earlier, step)
            return earlier
        left = self._left(step.running)
        if earlier is not None and not num_missed and not self._payoff.is_doubtful(num_rows):
            plan = self._planner.renew(earlier, left, is_tail=is_tail)
            self._held.resume(plan, step)
            return plan
        self._learner.learn_before_plan()
        plan = self._planner.plan(left, is_tail=is_tail, num_missed=num_missed, may_lose_s=self._payoff.saved_s)
        self._held.hold(plan, step, may_try=self._payoff.saved_s >= 0.0)
        self._foresight.depth = plan.best_draft
        if plan.is_untried:
            self._payoff.forgive(num_rows)
        return plan

    def _draft_by(self, plan: DraftPlan, step: DraftStep) -> Sequence[Draft]:
        """Return what to verify of what is drafted; now and then, that is less."""
        num_rows = len(step.running)
        step.plan, step.depth, least = plan, plan.depth, plan.least_survivals
        if not plan.depth:
            step.depth, least = plan.best_draft, [0.0] * num_rows
        elif plan.deeper > plan.depth and not step.number % plan.look_every:
            step.depth, step.looks, least = plan.deeper, True, [0.0] * num_rows
        elif plan.shallower and step.number % LOOK_BACK_EVERY == LOOK_BACK_EVERY // 2:
            step.depth = plan.shallower
        most = step.depth
        look_every = _LOOK_AHEAD_EVERY + _AHEAD_OF_ROWS * self._learner.most_rows
        if self._may_foresee and not step.number % look_every:
            most, least = min(2 * most, self._speculation.max_draft_tokens), [0.0] * num_rows
            step.looks = True
        step.limits = self._limits(step, most)
        step.drafts = self._propose(step.running, step.limits, self._learner.rates, least)
        if most == step.depth:
            return step.drafts
        step.begins = [len(sample.token_ids) for sample in step.running]
        return [draft.cut(step.depth) if len(draft) > step.depth else draft for draft in step.drafts]

    def _propose_checked(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> Sequence[Draft]:
        drafts = self.drafter.propose(running, limits, chance, least_survivals)
        check_drafts(drafts, limits, self.drafter, vocabulary=self._vocabulary, need_laws=self._needs_laws)
        return drafts

    def _limits(self, step: DraftStep, most: int) -> list[int]:
        """Return how many tokens may be drafted for each sample."""
        limits = limits_of(step.running, most)
        if step.being_read and self.drafter.reads_target_cache:
            return [0 if slot in step.being_read else limit for slot, limit in enumerate(limits)]
        return limits

    def _foresee(self, step: DraftStep) -> None:
        """Learn what drafts would have come to that were not made."""
        if not self._may_foresee:
            return
        if step.being_read or not self._foresight.is_due(step.number):  # steps that read prompts are not timed
            return
        begin = self.clock()
        self._take_foreseen(self._foresight.look(step.number, step.running, self._learner.rates), begin)

    def _take_foreseen(self, outcomes: Sequence[DraftOutcome], begin: float) -> float:
        """Learn from drafts that were not made; count and return the seconds since ``begin`` as those of this step."""
        self._learner.teach(outcomes)
        foreseeing_s = self.clock() - begin
        self._step.drafting_s += foreseeing_s
        self.stats.drafting_s += foreseeing_s
        return foreseeing_s

    def _left(self, running: Sequence[Sample]) -> list[float]:
        """Return how many tokens each sample is expected to get still."""
        expected = self._lengths.expected
        places = [(len(sample.token_ids), sample.max_new_tokens) for sample in running]
        # Of no prompt anything is known that is not of all.
        left = {place: expected(0, place[0], max_new_tokens=place[1]) for place in set(places)}
        return [left[place] for place in places]
