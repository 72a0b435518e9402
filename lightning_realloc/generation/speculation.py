"""Speculative decoding: what a user chooses, and the loop that drafts, plans what to verify and learns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal, get_args

import numpy as np

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.draft_planner import AcceptanceRates, StepCosts, plan_budget
from lightning_realloc.generation.drafting import Drafter
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.verification import (
    NO_DRAFT,
    Draft,
    GumbelDraws,
    KeyedDraws,
    Rejection,
    Verification,
)

DrafterName = Literal["ngram", "history", "model", "blocks", "none"]
VerificationName = Literal["match", "gumbel", "reject"]

_EXPLORE_EVERY = 64
_LONGEST_REST = 64
_PATIENCE = 4
"""Steps in a row in which drafting does not pay before it rests."""
_LEAST_SURVIVAL = 0.05
_AGREE_EVERY = 16
_BY_DEPTH = tuple(("depth", depth) for depth in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How tokens are drafted and verified. Responses follow the model's distribution whatever is chosen here."""

    drafter: DrafterName = "history"
    """``"ngram"``: as the sample's own text went on before; ``"history"``: as earlier responses to its prompt and
    finished siblings did; ``"model"``: ``draft_model``; ``"blocks"``: the model's own first ``draft_blocks``."""
    verification: VerificationName = "match"
    """``"match"``: the same tokens as without speculation; ``"gumbel"``: the same in whatever is drafted, and model
    drafters hit more often; ``"reject"``: the right distribution only, other tokens with other drafts."""
    num_draft_tokens: int | None = None
    """None: as many as pay in each step; a number: always so many."""
    max_draft_tokens: int = 8
    """Most tokens drafted ahead of one sample in a step."""
    draft_model: str | None = None
    """Name or folder of a causal language model with the same tokenizer."""
    draft_blocks: int | None = None

    def __post_init__(self) -> None:
        _choice("drafter", self.drafter, get_args(DrafterName))
        _choice("verification", self.verification, get_args(VerificationName))
        for name, least in (("num_draft_tokens", 0), ("max_draft_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise GenerationError(f"{name}={value} must be at least {least}")
        for name, drafter in (("draft_model", "model"), ("draft_blocks", "blocks")):
            given, wanted = getattr(self, name) is not None, self.drafter == drafter
            if given != wanted:
                raise GenerationError(
                    f"drafter={self.drafter!r} {'needs' if wanted else 'has no use for'} {name}; "
                    f"{'set it, or use another drafter' if wanted else f'leave it out, or set drafter={drafter!r}'}"
                )

    def rule(self, params: SamplingParams) -> Verification:
        """Return the verification rule for responses drawn as ``params`` say."""
        rules: dict[str, type[Verification]] = {"match": KeyedDraws, "gumbel": GumbelDraws, "reject": Rejection}
        return rules[self.verification](params)  # type: ignore[call-arg]


def _choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise GenerationError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


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
    depth: int
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
        self._plain = StepCosts()
        self._verifying = StepCosts()
        self._drafting = StepCosts()
        self._observations: list[_Observation] = []
        self._num_steps = self._unpaid = self._rests = 0
        self._rest = 0
        self._drafts: list[Draft] = []
        self._drafting_s = 0.0

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
        self._anticipates = rule.anticipates
        self.drafter.begin(samples, rule, num_slots)
        return rule

    def propose(self, running: Sequence[Sample]) -> list[Draft]:
        """Return what to verify behind each running sample's last token; empty drafts where that does not pay."""
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
            depth = self._depth(len(running)) if self.drafter.costs_a_forward else self._speculation.max_draft_tokens
            planned = self.clock()
            limits = self._limits(running, depth)
            self._drafts = self.drafter.propose(running, limits, self._rates, least_survival=_LEAST_SURVIVAL)
            drafted = self.clock()
            self._drafting_s = drafted - planned
            chosen = self._choose(self._drafts)
            self.stats.planning_s += self.clock() - drafted + planned - begin
        self.stats.drafting_s += self._drafting_s
        self.stats.drafted_tokens += sum(map(len, self._drafts))
        return chosen

    def learn(self, verified: Sequence[Draft], emitted: Sequence[Sequence[int]]) -> None:
        """Take the outcome of a step: the tokens that each sample got."""
        self.stats.verified_tokens += sum(map(len, verified))
        self.stats.accepted_tokens += sum(map(len, emitted)) - len(emitted)
        # What a draft was cut off from tells something, too: a token there was right where the target drew the same.
        for draft, tokens in zip(self._drafts if self._anticipates else verified, emitted, strict=False):
            if len(draft):
                known = min(len(draft), len(tokens))
                stood = next((i for i in range(known) if draft.tokens[i] != tokens[i]), known)
                self._rates.learn(draft.kinds[:known], stood)
                self._rates.learn(_BY_DEPTH[:known], stood)

    def time_step(self, verified: Sequence[Draft], seconds: float) -> None:
        """Take the seconds of a step that read no prompts, drafting aside."""
        num_rows = len(verified)
        depth = max(map(len, self._drafts), default=0)
        num_tokens = num_rows + sum(map(len, verified))
        self._observations.append(_Observation(num_rows, num_tokens, depth, seconds, self._drafting_s))
        if self._agree is None or len(self._observations) >= _AGREE_EVERY:
            self._take_observations()

    def end(self) -> None:
        """End the generation."""
        self.drafter.end()

    def _limits(self, running: Sequence[Sample], most: int) -> list[int]:
        """Return how many tokens may be drafted for each sample; its last one is never a draft's."""
        return [min(most, sample.max_new_tokens - len(sample.token_ids) - 1) for sample in running]

    def _depth(self, num_rows: int) -> int:
        """Return how deep to draft where every token ahead costs a forward of the drafter's."""
        most = self._speculation.max_draft_tokens
        if not self._drafting.known:
            return most
        depths = np.arange(1, most + 1)
        gains = 1.0 + np.cumsum(np.cumprod([self._rates(kind) for kind in _BY_DEPTH[:most]]))
        costs = self._verify_seconds(num_rows)(num_rows * (1 + depths)) + depths * self._drafting.seconds(num_rows)
        return int(depths[(gains / costs).argmax()])

    def _choose(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Return what of each draft to verify, and note whether drafting pays."""
        if not any(map(len, drafts)):
            self._count_unpaid()
            return list(drafts)
        num_rows = len(drafts)
        survivals = [list(accumulate(map(self._rates, draft.kinds), mul)) for draft in drafts]
        plain_s, seconds_of = self._plain_seconds(num_rows), self._verify_seconds(num_rows)
        budget = plan_budget(survivals, seconds_of, plain_s)
        num_tokens = num_rows + sum(budget.lengths)
        expected = budget.tokens_per_s * float(seconds_of(np.array(num_tokens)))
        pays = num_tokens > num_rows and expected * plain_s > num_rows * (
            expected / budget.tokens_per_s + self._drafting_s
        )
        if pays:
            self._unpaid = self._rests = 0
        else:
            self._count_unpaid()
        if self._num_steps % _EXPLORE_EVERY == 0:
            return [draft.cut(0 if pays else 1) for draft in drafts]
        return [draft.cut(length) for draft, length in zip(drafts, budget.lengths, strict=True)]

    def _count_unpaid(self) -> None:
        self._unpaid += 1
        if self._unpaid >= _PATIENCE:
            self._rest = min(2 ** (self._rests + 2), _LONGEST_REST)
            self._rests += 1
            self._unpaid = _PATIENCE - 1

    def _plain_seconds(self, num_rows: int) -> float:
        costs = self._plain if self._plain.known else self._verifying
        return float(costs.seconds(num_rows))

    def _verify_seconds(self, num_rows: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return the seconds of steps by size; those smaller than any tried lie between a plain step and that."""
        plain_s = self._plain_seconds(num_rows)
        smallest = self._verifying.smallest

        def seconds_of(sizes: np.ndarray) -> np.ndarray:
            if smallest is None:
                return np.full(sizes.shape, plain_s)
            known = self._verifying.seconds(np.maximum(sizes, smallest))
            if smallest <= num_rows:
                return known
            share = np.clip((sizes - num_rows) / (smallest - num_rows), 0.0, 1.0)
            return np.asarray(np.minimum(plain_s, known) * (1.0 - share) + known * share)

        return seconds_of

    def _take_observations(self) -> None:
        seconds = [value for seen in self._observations for value in (seen.step_s, seen.drafting_s)]
        agreed = iter(seconds if self._agree is None else self._agree(seconds))
        for seen in self._observations:
            step_s, drafting_s = next(agreed), next(agreed)
            (self._plain if seen.num_tokens == seen.num_rows else self._verifying).observe(seen.num_tokens, step_s)
            if seen.depth and self.drafter.costs_a_forward:
                self._drafting.observe(seen.num_rows, drafting_s / seen.depth)
        self._observations.clear()
