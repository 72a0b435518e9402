"""The loop of speculative decoding: draft, plan what to verify, learn from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.draft_planner import AcceptanceRates, Budget, plan_budget
from lightning_realloc.generation.draft_worth import Payoff, token_worths
from lightning_realloc.generation.drafting import Drafter
from lightning_realloc.generation.remaining_lengths import RemainingLengths
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.speculation import Speculation
from lightning_realloc.generation.step_costs import SpeculationCosts, effective_tokens
from lightning_realloc.generation.verification import NO_DRAFT, Draft, Verification

_SETTLED = 6
"""Plain steps in a row after which another one takes as long as it does among its like: right behind verifying ones it
takes up to a fifth longer."""
_PLAN_EVERY = 8
"""Steps after which a plan is made anew; until then its price and width hold."""
_LEAST_SURVIVAL = 0.02
_DOUBT = 0.5
"""Share of the chance a token must have to pay, down to which it is drafted: an estimate may be too low."""
_FEW = 4
"""Samples for which every draft may be as long as it likes: their padding costs little."""
_ABOUT = 0.01
"""Share by which two depths are about as good."""
_AGREE_EVERY = 16
_BY_DEPTH = tuple(("depth", depth) for depth in range(256))


@dataclass(slots=True)
class SpeculationStats:
    """What drafting came to in one generation."""

    drafted_tokens: int = 0
    verified_tokens: int = 0
    """Drafted tokens that the target read."""
    accepted_tokens: int = 0
    drafting_s: float = 0.0
    planning_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is drafted and verified until the next plan."""

    num_rows: int
    until: int
    """Number of the first step that needs another one."""
    depth: int
    """Most tokens of one draft; 0: nothing is drafted."""
    worths: Sequence[float]
    """Of a token of each sample, in seconds."""
    least_survivals: Sequence[float]
    """For each sample, the chance to stand that a token needs."""


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
    gained_s: float
    """What its tokens were worth, if drafted."""
    step_s: float
    preparing_s: float
    """Of drafting and planning."""


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
        self._costs = SpeculationCosts()
        self._observations: list[_Observation] = []
        self._payoff = Payoff()
        self._num_steps = 0
        self._width = speculation.max_draft_tokens
        """Most tokens of one draft that were verified in the last step."""
        self._drafts: list[Draft] = []
        self._plan: _Plan | None = None
        self._worths: Sequence[float] = ()
        """Of a token of each sample, in this step; none where nothing is drafted."""
        self._gained_s = self._preparing_s = 0.0
        self._num_plain = 0
        """Steps in a row that verified nothing."""

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
        self._lengths = RemainingLengths()
        self._plan = None
        self._anticipates = rule.anticipates
        self.drafter.begin(samples, rule, num_slots)
        return rule

    def propose(self, running: Sequence[Sample], *, is_tail: bool = False) -> list[Draft]:
        """Return what to verify behind each running sample's last token; empty drafts where that does not pay.

        ``is_tail``: no sample waits for a slot, so that the one which takes longest decides when all are done.
        """
        self._num_steps += 1
        if self._speculation.num_draft_tokens is not None:
            chosen = self._draft_fixed(running, self._speculation.num_draft_tokens)
        elif self._rests(len(running)):
            self._drafts, self._worths, self._preparing_s = [], (), 0.0
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
        self._num_plain = 0 if any(map(len, verified)) else self._num_plain + 1
        if self._worths:
            self._gained_s = sum(worth * len(own) for worth, own in zip(self._worths, emitted, strict=True))
        # What a draft was cut off from tells something, too: a token there was right where the target drew the same.
        told = self._drafts if self._anticipates else verified
        few = range(self._num_steps % -(-len(told) // _FEW), len(told), -(-len(told) // _FEW)) if told else ()
        for row in few:  # of many samples some are enough, others in every step
            draft, tokens = told[row], emitted[row]
            if len(draft):
                known = min(len(draft), len(tokens))
                stood = next((i for i in range(known) if draft.tokens[i] != tokens[i]), known)
                self._rates.learn(draft.kinds[:known], stood)
                if self.drafter.costs_a_forward:
                    self._rates.learn(_BY_DEPTH[:known], stood)

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
                bool(self._worths), self._num_plain > _SETTLED, self._gained_s, seconds, self._preparing_s,
            )
        )  # fmt: skip
        if self._agree is None or len(self._observations) >= _AGREE_EVERY:
            self._take_observations()

    def finished(self, sample: Sample) -> None:
        """Take a sample that has its last token."""
        self._lengths.finish(sample.prompt_index, len(sample.token_ids))
        self.drafter.finished(sample)

    def end(self) -> None:
        """End the generation."""
        self.drafter.end()

    def _limits(self, running: Sequence[Sample], most: int) -> list[int]:
        """Return how many tokens may be drafted for each sample; its last one is never a draft's."""
        return [min(most, sample.max_new_tokens - len(sample.token_ids) - 1) for sample in running]

    def _draft_fixed(self, running: Sequence[Sample], depth: int) -> list[Draft]:
        begin = self.clock()
        limits = self._limits(running, depth)
        self._drafts = self.drafter.propose(running, limits, self._rates, [0.0] * len(running))
        self.stats.drafting_s += self.clock() - begin
        return self._drafts

    def _draft_what_pays(self, running: Sequence[Sample], is_tail: bool) -> list[Draft]:
        """Draft by the plan that holds, or draft all that may pay and make a plan of that."""
        arrived = self.clock()
        self.drafter.prepare(running)
        begin = self.clock()
        held = self._held_plan(len(running))
        plan = self._new_plan(running, is_tail) if held is None else held
        self._worths = plan.worths
        planned = self.clock()
        limits = self._limits(running, plan.depth)
        self._drafts = self.drafter.propose(running, limits, self._rates, plan.least_survivals)
        drafted = self.clock()
        chosen = self._choose(self._drafts, plan) if held is None else self._drafts
        end = self.clock()
        self.stats.drafting_s += begin - arrived + drafted - planned
        self.stats.planning_s += planned - begin + end - drafted
        self._preparing_s = end - begin
        return chosen

    def _rests(self, num_rows: int) -> bool:
        """Return whether nothing is drafted in this step."""
        if not self._costs.plain.knows(num_rows):
            return True
        plan = self._held_plan(num_rows)
        return self._payoff.rests(num_rows) or (plan is not None and not plan.depth)

    def _held_plan(self, num_rows: int) -> _Plan | None:
        """Return the plan that still holds; None where it is time for another one."""
        plan = self._plan
        return plan if plan is not None and plan.num_rows == num_rows and self._num_steps < plan.until else None

    def _new_plan(self, running: Sequence[Sample], is_tail: bool) -> _Plan:
        """Return a plan to draft all that may pay."""
        num_rows = len(running)
        plain_s, row_s, token_s = self._costs.marginal(num_rows)
        # Without a tail a waiting sample takes the slot: no step is saved, whoever is ahead.
        worths = token_worths(self._left(running), plain_s, row_s) if is_tail else [plain_s / num_rows] * num_rows
        if not self.drafter.costs_a_forward:
            token_s += self._drafting_s(num_rows)
        least = [max(_DOUBT * token_s / worth, _LEAST_SURVIVAL) for worth in worths]
        return _Plan(num_rows, self._num_steps + _PLAN_EVERY, self._depth(num_rows), worths, least)

    def _depth(self, num_rows: int) -> int:
        """Return how deep to draft: as deep as may be verified, or, by a model, as pays for its forwards."""
        most, drafting = self._speculation.max_draft_tokens, self._costs.drafting
        if not self.drafter.costs_a_forward or not drafting.known:
            return most
        drafting_s = float(drafting.seconds(num_rows))
        rates, survival, gain = [], 1.0, 1.0
        for depth in range(1, most + 1):
            survival *= self._rates(_BY_DEPTH[depth - 1])
            gain += survival
            rates.append(gain / (depth * drafting_s + self._costs.table(num_rows, depth)[depth * num_rows]))
        enough = max(rates) / (1.0 + _ABOUT)  # of depths about as good the least: samples stay closer together
        return 1 + next(index for index, rate in enumerate(rates) if rate >= enough)

    def _drafting_s(self, num_rows: int) -> float:
        """Return the seconds of drafting one token: for all samples by a model's forward, or for one by looking up."""
        return float(self._costs.drafting.seconds(num_rows)) if self._costs.drafting.known else 0.0

    def _left(self, running: Sequence[Sample]) -> list[float]:
        """Return how many tokens each sample is expected to get still."""
        expected = self._lengths.expected
        return [expected(sample.prompt_index, len(sample.token_ids), max_new_tokens=sample.max_new_tokens)
                for sample in running]  # fmt: skip

    def _choose(self, drafts: list[Draft], plan: _Plan) -> list[Draft]:
        """Return what of each draft to verify, and let the next steps go by it."""
        self._plan = plan
        drafted = max(map(len, drafts))
        if not drafted:
            return drafts
        survivals = [list(accumulate(map(self._rates, draft.kinds), mul)) for draft in drafts]
        width, budget = self._best_budget(survivals, drafted, plan.worths)
        lengths: Sequence[int] = budget.lengths
        if not any(lengths):
            self._plan = replace(plan, depth=0)
            if self._payoff.tries_again(len(drafts)):
                lengths = [1] * len(drafts)  # or what verifying takes would never be learnt anew
        else:
            least = plan.least_survivals
            if budget.price is not None:
                least = [max(budget.price / worth, _LEAST_SURVIVAL) for worth in plan.worths]
            self._width = width
            self._plan = replace(plan, depth=width if width < drafted else plan.depth, least_survivals=least)
        return [draft if length >= len(draft) else draft.cut(length)
                for draft, length in zip(drafts, lengths, strict=True)]  # fmt: skip

    def _best_budget(
        self, survivals: Sequence[Sequence[float]], drafted: int, worths: Sequence[float]
    ) -> tuple[int, Budget]:
        """Return the best budget and the most tokens of one draft in it.

        All samples pay for the longest draft, so where there are many, shorter ones than were drafted are tried, too.
        """
        widths = {drafted}
        if len(survivals) > _FEW:
            widths |= {min(width, drafted) for width in (max(self._width // 2, 1), self._width)}
        plans, drafting_s = [], self._drafting_s(len(survivals))
        for width in sorted(widths):
            step_s = self._costs.table(len(survivals), width)
            # With what it takes to draft: that was spent on these drafts, but will be on the next ones, too.
            if self.drafter.costs_a_forward:
                step_s = [step_s[0], *(seconds + drafted * drafting_s for seconds in step_s[1:])]
            else:
                step_s = [seconds + count * drafting_s for count, seconds in enumerate(step_s)]
            plans.append((width, plan_budget([own[:width] for own in survivals], step_s, weights=worths)))
        return max(plans, key=lambda plan: plan[1].tokens_per_s)

    def _take_observations(self) -> None:
        seconds = [value for seen in self._observations for value in (seen.step_s, seen.preparing_s)]
        agreed = iter(seconds if self._agree is None else self._agree(seconds))
        for seen in self._observations:
            step_s, preparing_s = next(agreed), next(agreed)
            if seen.drafted:
                self._payoff.learn(seen.num_rows, seen.gained_s, step_s + preparing_s)
            if seen.num_tokens > seen.num_rows:
                size = float(effective_tokens(seen.num_rows, seen.num_tokens, seen.width))
                self._costs.verifying.observe(size, step_s)
            elif seen.is_settled or not self._costs.plain.knows(seen.num_rows):
                self._costs.plain.observe(seen.num_rows, step_s)
            if seen.num_drafted:
                times = seen.depth if self.drafter.costs_a_forward else seen.num_drafted
                self._costs.drafting.observe(seen.num_rows, preparing_s / times)
        self._observations.clear()
