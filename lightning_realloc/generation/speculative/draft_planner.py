"""How far ahead to draft, and which drafted tokens of which samples are worth verifying.

The batch is over when its last sample is. So depths are compared by the expected seconds until then. Samples drift
apart while they draft, the more the deeper they do, and the last of many is far behind the mean and drafts alone at the
end: an estimate by mean tokens per second drafts too deep for many samples.

A token is verified where its chance to stand, times what a token of its sample is worth (see `draft_worth`), is no less
than what verifying it costs. Pure: seconds and outcomes are told, never measured here.

Source of the objective: expected accepted tokens against verification cost, RLHFSpec (arXiv:2512.04752). How many steps
reach a number of tokens: Wald's equation of renewal theory (Feller, "An Introduction to Probability Theory and Its
Applications" II, chapter XI). The mean overshoot is left out: drafts are cut off at the end, and a last step that goes
less far beyond it takes less as well. In simulated batches, seconds of depths that are about as good were off by 0.5 %
from each other so, and by 0.8 % with half of the overshoot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_realloc.generation.speculative.acceptance import DEPTH_MEMORY, LOOK_UP_MEMORY, DepthOutcome, DepthProfile
from lightning_realloc.generation.speculative.draft_worth import chances_to_be_last, token_worths
from lightning_realloc.generation.speculative.step_costs import SpeculationCosts, look_ups_of
from lightning_realloc.generation.speculative.unevenness import OF_LOOK_UPS, OF_MODELS, Unevenness, tokens_behind

PLAN_STEPS = 16
MOST_PLAN_STEPS = 64
"""For which a plan holds, and twice as many as the one before it if it drafts as deep. With half as many, planning took
0.4 % longer and gained nothing."""
TRY_STEPS = 4
"""The same of one that drafts though nothing seems to pay."""
HYSTERESIS = 0.01
"""Share by which a depth must promise to be faster than the one in use: estimates differ by chance alone."""
_START = 0.02
"""Share by which looked-up drafts must promise to be faster than none where nothing is drafted for so many samples:
what they would come to was mostly looked up, too, for some samples, which is off by 2 to 4 %."""
_STAY = 0.01
"""The same where they are in use: what promises less loses as like as not."""
_DOUBT = 0.08
_MOST_DOUBT = 0.03
"""Share by which a deeper looked-up draft may promise to be slower and is made all the same: over the root of how many
drafts of that depth were seen, at most. It tells of all shallower ones as well, and those of it hardly. Where eight
tokens of an earlier response were 5 % faster than five, one of two engines stayed with five for 20 generations."""
_MAY_BE_OFF = 0.1
"""Share by which a deeper draft may promise to be slower and is made now and then all the same."""
_SURE = 24
"""Drafts of that depth, of late, that say enough of it: a look takes a fifth of a step of 16 samples."""
_LOOK_EVERY = 8
_SURE_LOOK_EVERY = 32
"""Steps after which one is made, before and behind that: deep tokens that fell by chance a few times would else never
be drafted again."""
_OF_ROWS = 1
_SURE_OF_ROWS = 8
"""Steps of the same for each sample, if that is more: many tell as much at once, and take the last one ahead no more.
With 32 samples and first blocks a look in every 32 steps took 3 % of all seconds."""
LOOK_BACK_EVERY = 16
"""Steps of which one drafts half as deep, where that may be as good: steps of its size are seen else only when few
samples are left, whose contexts are long, and look up to a tenth dearer than they are. So 32 samples stayed with four
tokens of first blocks where two were 3 % faster."""
_FIRST_DEPTH = 4
"""Most tokens of a draft before it is known what any step that verifies takes: none looks dearer than a plain one then,
and the deepest draft would be tried first."""
_LEAST_SURVIVAL = 0.02
_NO_DRAFT = DepthOutcome(tokens=1.0, variance=0.0, drafted=0.0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What is drafted and verified until the next plan."""

    depth: int
    """Most tokens of one draft; 0: nothing is drafted."""
    best_draft: int
    """The best depth but 0."""
    plain_s: float
    """Seconds of a step without drafts."""
    row_s: float
    """Those of them that one sample adds."""
    worths: Sequence[float]
    """Of a drafted token of each sample that stands, in seconds."""
    token_s: float = 0.0
    """Seconds that one drafted token more takes; 0 where that is not known."""
    least_survivals: Sequence[float] = ()
    """For each sample, the chance to stand that a token needs; there are none where nothing is drafted."""
    is_try: bool = False
    """Whether nothing seems to pay: it is drafted all the same, for what that seems by may be wrong, or old."""
    is_untried: bool = False
    """Whether a deeper one failed, and no steps of about this size were seen: what drafting lost says nothing of it."""
    deeper: int = 0
    """Most tokens of a draft in one step of every `look_every`, where a token costs a forward: to see whether deeper
    ones stand by now."""
    look_every: int = _SURE_LOOK_EVERY
    shallower: int = 0
    """Most tokens of a draft in one step of every `LOOK_BACK_EVERY`, there; 0: in none."""

    def of(self, rows: Sequence[int]) -> DraftPlan:
        """Return the plan for some of its samples."""
        num_over = len(self.worths) - len(rows)
        least_survivals = self.least_survivals
        return replace(
            self,
            plain_s=self.plain_s - num_over * self.row_s,
            worths=[self.worths[row] for row in rows],
            least_survivals=[least_survivals[row] for row in rows] if least_survivals else (),
        )


class DraftPlanner:
    """Makes plans from what drafts came to and what steps cost; remembers which depth it chose for how many samples."""

    def __init__(self, max_depth: int, *, costs_a_forward: bool) -> None:
        """Plan up to ``max_depth``; ``costs_a_forward``: a token ahead takes a forward of a model, for all samples."""
        memory = DEPTH_MEMORY if costs_a_forward else LOOK_UP_MEMORY
        self.costs = SpeculationCosts(costs_a_forward=costs_a_forward)
        self.unevenness = Unevenness(OF_MODELS if costs_a_forward else OF_LOOK_UPS)
        self._costs_a_forward = costs_a_forward
        self._profiles = {acquainted: DepthProfile(max_depth, memory=memory) for acquainted in (False, True)}
        self._all_chosen: dict[bool, dict[int, int]] = {False: {}, True: {}}
        """Depth in use, by the power of two of the number of samples."""
        self.turn_to(acquainted=False)

    def turn_to(self, *, acquainted: bool) -> None:
        """Go on by what drafts came to for samples whose prompts were met before, or for others."""
        self.profile, self._chosen = self._profiles[acquainted], self._all_chosen[acquainted]

    def plan(self, left: Sequence[float], *, is_tail: bool, num_missed: int = 0, may_lose_s: float = 0.0) -> DraftPlan:
        """Return what to draft in the next steps.

        Args:
            left: Tokens that each sample is expected to get still.
            is_tail: No sample waits for a slot, so that the one which takes longest decides when all are done.
            num_missed: Tokens that the drafter's model reads before it can draft, beyond what it reads in every step.
            may_lose_s: Seconds that a plan may lose which drafts though nothing seems to pay. Where nothing was missed,
                some steps are tried instead, and no plan does.
        """
        num_rows = len(left)
        outcomes = (_NO_DRAFT, *self.profile.outcomes())
        if not self.costs.verifying.known:
            outcomes = outcomes[: 1 + _FIRST_DEPTH]
        steps_s = self._steps_s(num_rows, outcomes)
        catching_up_s = self.costs.catching_up_s(num_rows, num_missed)
        chances = chances_to_be_last(left) if is_tail else []
        if is_tail:
            seconds = self._tail_s(left, sum(chances), outcomes, steps_s)
        else:  # a waiting sample takes the slot of one that is over
            seconds = [max(left) * step_s / outcome.tokens for outcome, step_s in zip(outcomes, steps_s, strict=True)]
        seconds[1:] = [catching_up_s + drafting_s for drafting_s in seconds[1:]]
        key = num_rows.bit_length()
        in_use = self._chosen.get(key, 0)
        least = self._half_to_see(in_use, num_rows, outcomes, seconds[0], catching_up_s)
        margin = 0.0 if self._costs_a_forward else _STAY if in_use else _START
        depth = max(_fastest(seconds, in_use, margin), least)
        if depth and not self._costs_a_forward:
            depth = self._deepest_in_doubt(depth, seconds)
        self._chosen[key] = depth
        best_draft = min(range(1, len(seconds)), key=seconds.__getitem__)
        plain_s, row_s = self.costs.plain_s(num_rows)
        is_try = False
        if not depth and num_missed:
            lost_s = catching_up_s + TRY_STEPS * (steps_s[best_draft] - plain_s * outcomes[best_draft].tokens)
            is_try = lost_s <= may_lose_s
            depth = best_draft if is_try else 0
        if not depth and is_tail and num_rows > 1 and not self._costs_a_forward:
            # A few steps with drafts take none ahead who is behind: they save their rows, once they are over.
            return DraftPlan(0, best_draft, plain_s, row_s, [row_s] * num_rows)
        worths = _worths(chances, num_rows, plain_s, row_s)
        plan = DraftPlan(depth, best_draft, plain_s, row_s, worths, is_try=is_try)
        if not depth:
            return plan
        if depth < in_use and not self._knows(num_rows, depth, outcomes):  # to see what such steps take
            return replace(plan, least_survivals=_least_survivals(0.0, worths), is_untried=True)
        token_s = self._token_s(num_rows, depth, outcomes[depth])
        plan = replace(plan, token_s=token_s, least_survivals=_least_survivals(token_s, worths))
        return self._looking_around(plan, seconds) if self._costs_a_forward else plan

    def renew(self, plan: DraftPlan, left: Sequence[float], *, is_tail: bool) -> DraftPlan:
        """Return an earlier plan that drafts, made for about as many samples, for these: as deep, whatever was learnt
        since. That takes a tenth of making one."""
        num_rows = len(left)
        plain_s, row_s = self.costs.plain_s(num_rows)
        worths = _worths(chances_to_be_last(left) if is_tail else [], num_rows, plain_s, row_s)
        least_survivals = _least_survivals(plan.token_s, worths)
        return replace(plan, plain_s=plain_s, row_s=row_s, worths=worths, least_survivals=least_survivals)

    def _deepest_in_doubt(self, depth: int, seconds: Sequence[float]) -> int:
        """Return the deepest that may be as good as this depth, since too little is known of it."""
        return next(deeper for deeper in range(len(seconds) - 1, 0, -1)
                    if deeper == depth or seconds[deeper] <= (1.0 + self._doubt(deeper)) * seconds[depth])  # fmt: skip

    def _doubt(self, depth: int) -> float:
        return min(_DOUBT / math.sqrt(max(self.profile.num_tried(depth), 1.0)), _MOST_DOUBT)

    def _looking_around(self, plan: DraftPlan, seconds: Sequence[float]) -> DraftPlan:
        """Return the same with looks at the deepest draft that may be about as good, one token more at least, and at
        half of its own."""
        most_s = (1.0 + _MAY_BE_OFF) * seconds[plan.depth]
        depths = range(plan.depth, len(seconds))
        deeper = max(depth for depth in depths if depth <= plan.depth + 1 or seconds[depth] <= most_s)
        is_known = self.profile.num_tried(deeper) >= _SURE or seconds[deeper] > most_s
        least, of_rows = (_SURE_LOOK_EVERY, _SURE_OF_ROWS) if is_known else (_LOOK_EVERY, _OF_ROWS)
        look_every = max(least, of_rows * len(plan.worths))
        half = _half_of(plan.depth)
        shallower = half if seconds[half] <= most_s else 0
        return replace(plan, deeper=deeper, look_every=look_every, shallower=shallower)

    def _tail_s(
        self, left: Sequence[float], num_last: float, outcomes: Sequence[DepthOutcome], steps_s: Sequence[float]
    ) -> list[float]:
        """Return the expected seconds until the last sample is over, by depth; no other sample waits."""
        alone_s = steps_s if len(left) == 1 else self._steps_s(1, outcomes)
        token_s = min(step_s / outcome.tokens for outcome, step_s in zip(outcomes, alone_s, strict=True))
        longest, uneven = max(*left, 1.0), self.unevenness.share
        seconds = []
        for (tokens, variance, _), step_s, one_s in zip(outcomes, steps_s, alone_s, strict=True):
            behind = tokens_behind(num_last, tokens, variance, longest / tokens, uneven)
            seconds.append(remaining_s(tokens, step_s, min(one_s, step_s), left) + behind * token_s)
        return seconds

    def _half_to_see(
        self, in_use: int, num_rows: int, outcomes: Sequence[DepthOutcome], plain_s: float, catching_up_s: float
    ) -> int:
        """Return half of the depth in use, if it has to be seen before a shallower one is taken; else 0.

        What it takes is read off a line between smaller and larger steps, and seconds may leap in between, where
        another kernel takes over. It is not worth reading so many tokens first (``catching_up_s``) that this takes
        longer than the half may save of ``plain_s``, the seconds without drafts.
        """
        half = _half_of(in_use)
        might_pay = catching_up_s + plain_s / outcomes[half].tokens < plain_s
        return half if might_pay and not self._knows(num_rows, half, outcomes) else 0

    def _knows(self, num_rows: int, depth: int, outcomes: Sequence[DepthOutcome]) -> bool:
        """Return whether steps that draft so many tokens at most were seen, or such of about their size."""
        return self.costs.knows_verifying(num_rows, num_rows * outcomes[depth].drafted, depth)

    def _steps_s(self, num_rows: int, outcomes: Sequence[DepthOutcome]) -> list[float]:
        """Return the seconds of a step, by depth: of one that drafts so many tokens at most, and verifies them."""
        costs, token_s = self.costs, self.costs.drafting_s(num_rows)
        verifying_s = costs.verifying_s(num_rows)
        beside_s = costs.preparing_s + (costs.first_s(num_rows) if self._costs_a_forward else 0.0)
        seconds = [costs.plain_s(num_rows)[0]]
        for depth, outcome in enumerate(outcomes[1:], start=1):
            drafted = num_rows * outcome.drafted
            times = depth - 1 if self._costs_a_forward else look_ups_of(num_rows, drafted)
            seconds.append(verifying_s(drafted, depth) + times * token_s + beside_s)
        return seconds

    def _token_s(self, num_rows: int, depth: int, outcome: DepthOutcome) -> float:
        """Return those of them that one token more takes."""
        drafted = num_rows * outcome.drafted
        fewer = max(drafted / 2, min(drafted, 1.0))
        token_s = 0.0 if self._costs_a_forward else self.costs.drafting_s(num_rows)
        if drafted - fewer > 0.5:
            verifying_s = self.costs.verifying_s(num_rows)
            token_s += (verifying_s(drafted, depth) - verifying_s(fewer, depth)) / (drafted - fewer)
        return token_s


def _half_of(depth: int) -> int:
    """Return half of a depth, 0 of one token, rounded up: 2 is looked at on the way from any to 1."""
    return (depth + 1) // 2 if depth > 1 else 0


def _worths(chances: Sequence[float], num_rows: int, plain_s: float, row_s: float) -> list[float]:
    """Return what a token of each sample is worth: a step is saved by the last one, whose ``chances`` are known in the
    tail. Before it there are none, and no step is saved, whoever is ahead."""
    return token_worths(chances, plain_s, row_s) if chances else [plain_s / num_rows] * num_rows


def _least_survivals(token_s: float, worths: Sequence[float]) -> list[float]:
    """Return the chance to stand that a token of each sample needs where it takes ``token_s``."""
    return [max(token_s / worth, _LEAST_SURVIVAL) for worth in worths]


def _fastest(seconds: Sequence[float], in_use: int, margin: float) -> int:
    """Return the depth of least seconds, or the one in use where that is about as good.

    ``margin``: share by which any must be faster than none.
    """
    plain_s = seconds[0] / (1.0 + margin)
    with_margin = [plain_s, *seconds[1:]]
    best = min(range(len(seconds)), key=with_margin.__getitem__)
    if margin and 0 in (best, in_use):  # between some and none the margin decides
        return best
    return in_use if with_margin[in_use] <= (1.0 + HYSTERESIS) * with_margin[best] else best


def remaining_s(tokens: float, step_s: float, alone_s: float, left: Sequence[float]) -> float:
    """Return the seconds until all samples are over, if all get as many tokens as the mean and none waits.

    Args:
        tokens: Of a sample's step, as expected.
        step_s: Seconds of a step of all samples.
        alone_s: Those of a step of one sample.
        left: Tokens that each sample is expected to get still.
    """
    row_s = (step_s - alone_s) / max(len(left) - 1, 1)
    return ((alone_s - row_s) * max(*left, 1.0) + row_s * sum(left)) / tokens
