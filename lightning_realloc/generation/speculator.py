"""The loop of speculative decoding: draft, plan what to verify, learn from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.draft_planner import AcceptanceRates, Budget, plan_budget
from lightning_realloc.generation.drafting import Drafter
from lightning_realloc.generation.remaining_lengths import RemainingLengths
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.speculation import Speculation
from lightning_realloc.generation.step_costs import SpeculationCosts, effective_tokens
from lightning_realloc.generation.verification import NO_DRAFT, Draft, Verification

_EXPLORE_EVERY = 128
_LONGEST_REST = 64
_PATIENCE = 4
"""Steps in a row in which drafting does not pay before it rests."""
_LEAST_SURVIVAL = 0.02
_CHEAP = 0.01
"""Share of a step below which drafting in vain is not worth avoiding."""
_FEW = 4
"""Samples for which every draft may be as long as it likes: their padding costs little."""
_DRAFTING_RATE = 0.2
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


@dataclass(slots=True)
class _Observation:
    """Seconds of one step, to be agreed on before they are learnt from."""

    num_rows: int
    num_tokens: int
    width: int
    """Most tokens of one draft that were verified."""
    depth: int
    """Most tokens of one draft that were made."""
    drafted: bool
    """Whether drafting did not rest."""
    step_s: float
    drafting_s: float


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
        self._num_steps = self._unpaid = self._rests = self._rest = 0
        self._width = speculation.max_draft_tokens
        """Most tokens of one draft that were verified in the last step."""
        self._drafts: list[Draft] = []
        self._drafting_s = 0.0
        """Of this rank, in this step."""
        self._usual_drafting_s = 0.0
        """Agreed on, and so what decisions may depend on."""

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
        self._rest = 0
        self._anticipates = rule.anticipates
        self.drafter.begin(samples, rule, num_slots)
        return rule

    def propose(self, running: Sequence[Sample], *, is_tail: bool = False) -> list[Draft]:
        """Return what to verify behind each running sample's last token; empty drafts where that does not pay.

        ``is_tail``: no sample waits for a slot, so that the one which takes longest decides when all are done.
        """
        self._num_steps += 1
        begin = self.clock()
        if self._speculation.num_draft_tokens is not None:
            limits = self._limits(running, self._speculation.num_draft_tokens)
            self._drafts = self.drafter.propose(running, limits, self._rates, least_survival=0.0)
            self._drafting_s = self.clock() - begin
            chosen = self._drafts
        elif self._rest:
            self._rest -= 1
            self._drafts, self._drafting_s = [], 0.0
            return [NO_DRAFT] * len(running)
        else:
            depth = self._depth(len(running))
            planned = self.clock()
            limits = self._limits(running, depth)
            self._drafts = self.drafter.propose(running, limits, self._rates, least_survival=_LEAST_SURVIVAL)
            drafted = self.clock()
            self._drafting_s = drafted - planned
            chosen = self._choose(self._drafts, self._worth(running) if is_tail else None)
            self.stats.planning_s += self.clock() - drafted + planned - begin
        self.stats.drafting_s += self._drafting_s
        self.stats.drafted_tokens += sum(map(len, self._drafts))
        return chosen

    def learn(self, verified: Sequence[Draft], emitted: Sequence[Sequence[int]]) -> None:
        """Take the outcome of a step: the tokens that each sample got."""
        self.stats.verified_tokens += sum(map(len, verified))
        self.stats.accepted_tokens += sum(map(len, emitted)) - len(emitted)
        if self._speculation.num_draft_tokens is not None:
            return
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
        depth = max(map(len, self._drafts), default=0)
        lengths = [len(draft) for draft in verified]
        self._observations.append(
            _Observation(
                num_rows, num_rows + sum(lengths), max(lengths), depth, bool(self._drafts), seconds, self._drafting_s
            )
        )
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

    def _depth(self, num_rows: int) -> int:
        """Return how deep to draft: as deep as may be verified, or, by a model, as pays for its forwards."""
        most, drafting = self._speculation.max_draft_tokens, self._costs.drafting
        if not self.drafter.costs_a_forward:
            return most if num_rows <= _FEW else min(2 * self._width, most)
        if not drafting.known:
            return most
        drafting_s = float(drafting.seconds(num_rows))
        best, best_rate, survival, gain = 1, 0.0, 1.0, 1.0
        for depth in range(1, most + 1):
            survival *= self._rates(_BY_DEPTH[depth - 1])
            gain += survival
            rate = gain / (depth * drafting_s + self._costs.table(num_rows, depth)[depth * num_rows])
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _worth(self, running: Sequence[Sample]) -> list[float]:
        """Return what a token of each sample is worth beside one of the others: more where more are to come."""
        left = [self._lengths.expected(sample.prompt_index, len(sample.token_ids), max_new_tokens=sample.max_new_tokens)
                for sample in running]  # fmt: skip
        scale = len(left) / (sum(left) + len(left))
        return [scale * (tokens + 1.0) for tokens in left]

    def _choose(self, drafts: list[Draft], worth: Sequence[float] | None) -> list[Draft]:
        """Return what of each draft to verify, and note whether drafting pays."""
        num_rows = len(drafts)
        drafted = max(map(len, drafts))
        if not drafted:
            self._count_unpaid(num_rows)
            return drafts
        if not self._costs.plain.knows(num_rows):
            return [NO_DRAFT] * num_rows  # or it would stay unknown for as long as drafting seems to pay
        survivals = [list(accumulate(map(self._rates, draft.kinds), mul)) for draft in drafts]
        width, budget = self._best_budget(survivals, drafted, worth)
        step_s, num_verified = self._costs.table(num_rows, width), sum(budget.lengths)
        expected_tokens = budget.tokens_per_s * step_s[num_verified]
        # What the draft took counts for whether to draft again, no longer for what to make of this one.
        drafted_s = step_s[num_verified] + self._usual_drafting_s
        pays = num_verified and expected_tokens * step_s[0] > num_rows * drafted_s
        if pays:
            self._unpaid = self._rests = 0
            self._width = width
        else:
            self._count_unpaid(num_rows)
        if self._num_steps % _EXPLORE_EVERY == 0:
            return [draft.cut(0 if pays else 1) for draft in drafts]
        return [draft if length == len(draft) else draft.cut(length)
                for draft, length in zip(drafts, budget.lengths, strict=True)]  # fmt: skip

    def _best_budget(
        self, survivals: Sequence[Sequence[float]], drafted: int, worth: Sequence[float] | None
    ) -> tuple[int, Budget]:
        """Return the best budget and the most tokens of one draft in it.

        All samples pay for the longest draft, so where there are many, shorter ones than were drafted are tried, too.
        """
        widths = {drafted}
        if len(survivals) > _FEW:
            widths |= {min(width, drafted) for width in (max(self._width // 2, 1), self._width)}
        plans = []
        for width in sorted(widths):
            step_s = self._costs.table(len(survivals), width)
            plans.append((width, plan_budget([own[:width] for own in survivals], step_s, weights=worth)))
        return max(plans, key=lambda plan: plan[1].tokens_per_s)

    def _count_unpaid(self, num_rows: int) -> None:
        """Note that a draft did not pay; let drafting rest where that happens time and again and costs something."""
        if self._usual_drafting_s < _CHEAP * self._costs.table(num_rows, 1)[0]:
            return
        self._unpaid += 1
        if self._unpaid >= _PATIENCE:
            self._rest = min(2 ** (self._rests + 2), _LONGEST_REST)
            self._rests += 1
            self._unpaid = _PATIENCE - 1

    def _take_observations(self) -> None:
        seconds = [value for seen in self._observations for value in (seen.step_s, seen.drafting_s)]
        agreed = iter(seconds if self._agree is None else self._agree(seconds))
        for seen in self._observations:
            step_s, drafting_s = next(agreed), next(agreed)
            if seen.drafted:
                self._usual_drafting_s += _DRAFTING_RATE * (drafting_s - self._usual_drafting_s)
            if seen.num_tokens == seen.num_rows:
                self._costs.plain.observe(seen.num_rows, step_s)
            else:
                size = float(effective_tokens(seen.num_rows, seen.num_tokens, seen.width))
                self._costs.verifying.observe(size, step_s)
            if seen.depth and self.drafter.costs_a_forward:
                self._costs.drafting.observe(seen.num_rows, drafting_s / seen.depth)
        self._observations.clear()
