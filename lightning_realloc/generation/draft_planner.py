"""How far ahead to draft, and which drafted tokens of which samples are worth verifying.

The batch is over when its last sample is. So depths are compared by the expected seconds until then: the steps that the
last sample takes, and what each step costs. Samples drift apart while they draft, the more the deeper they do, and the
last of many is far behind the mean: an estimate by mean tokens per second drafts too deep for many samples.

A token is verified where its chance to stand, times what a token of its sample is worth (see `draft_worth`), is no less
than what verifying it costs. Pure: seconds and outcomes are told, never measured here.

Source of the objective: expected accepted tokens against verification cost, RLHFSpec (arXiv:2512.04752). The expected
largest of n normal variables: Blom, "Statistical Estimates and Transformed Beta-Variables" (1958).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from lightning_realloc.generation.acceptance import DepthOutcome, DepthProfile
from lightning_realloc.generation.draft_worth import COST_OF_TRYING, chances_to_be_last, token_worths
from lightning_realloc.generation.step_costs import SpeculationCosts, forwards_of, look_ups_of

PLAN_STEPS = 8
"""For which a plan holds."""
HYSTERESIS = 0.02
"""Share by which a depth must promise to be faster than the one in use: estimates differ by chance alone."""
_LEAST_SURVIVAL = 0.02
_CAUTION = 1.5
"""Chance times worth, in what it costs, from which a token that is looked up is verified: chances differ by sample, and
by a draft's kinds they are taken to be the same."""
_CATCHING_UP = 0.7
"""Share of their drifting apart that samples keep: drafts go to those that are behind."""
_TRIED_AGAIN = 64
"""Plans in a row by which nothing pays, after which one tries a token nevertheless, if that is cheap: times change."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What is drafted and verified until the next plan."""

    depth: int
    """Most tokens of one draft; 0: nothing is drafted."""
    worths: Sequence[float]
    """Of a token of each sample, in seconds."""
    least_survivals: Sequence[float]
    """For each sample, the chance to stand that a token needs."""


class DraftPlanner:
    """Makes plans from what drafts came to and what steps cost; remembers which depth it chose for how many samples."""

    def __init__(self, max_depth: int, *, costs_a_forward: bool) -> None:
        """Plan up to ``max_depth``; ``costs_a_forward``: a token ahead takes a forward of a model, for all samples."""
        self.profile = DepthProfile(max_depth)
        self.costs = SpeculationCosts()
        self._costs_a_forward = costs_a_forward
        self._chosen: dict[int, int] = {}
        """Depth in use, by the power of two of the number of samples."""
        self._num_idle = 0
        """Plans in a row by which nothing pays."""
        self._idle_s = 0.0
        """Seconds of plain steps that they stand for."""

    def plan(self, left: Sequence[float], *, is_tail: bool, num_missed: int = 0) -> DraftPlan:
        """Return what to draft in the next `PLAN_STEPS` steps.

        Args:
            left: Tokens that each sample is expected to get still.
            is_tail: No sample waits for a slot, so that the one which takes longest decides when all are done.
            num_missed: Tokens that the drafter's model reads before it can draft, beyond what it reads in every step.
        """
        num_rows = len(left)
        outcomes = self.profile.outcomes()
        plain_s, row_s = self.costs.plain_s(num_rows)
        steps_s = [self._step_s(num_rows, depth, outcome) for depth, outcome in enumerate(outcomes, start=1)]
        longest, fixed_s = max(*left, 1.0), plain_s - row_s * num_rows
        chances = chances_to_be_last(left) if is_tail else [1.0]
        num_last = sum(chances)
        catching_up_s = self.costs.catching_up_s(num_rows, num_missed)
        seconds = [longest * plain_s] + [
            catching_up_s + remaining_s(outcome, step_s, fixed_s, longest=longest, num_last=num_last)
            for outcome, step_s in zip(outcomes, steps_s, strict=True)
        ]
        depth = self._choose(num_rows, seconds)
        if not depth and self._is_time_to_try(plain_s, catching_up_s + PLAN_STEPS * steps_s[0]):
            depth = 1
        if not depth:
            return DraftPlan(0, (), ())
        if self._chosen[num_rows.bit_length()]:
            self._num_idle, self._idle_s = 0, 0.0
        outcome = outcomes[depth - 1]
        if is_tail:
            # A step saves as much less than a plain one's seconds as the last sample takes longer than the mean.
            kept = longest / outcome.tokens * steps_s[depth - 1] / seconds[depth]
            worths = [kept * worth for worth in token_worths(chances, plain_s, row_s)]
        else:  # a waiting sample takes the slot: no step is saved, whoever is ahead
            worths = [plain_s / num_rows] * num_rows
        token_s = self._token_s(num_rows, depth, outcome)
        if not self._costs_a_forward:
            token_s *= _CAUTION
        least = [max(token_s / worth, _LEAST_SURVIVAL) for worth in worths]
        return DraftPlan(depth, worths, least)

    def _choose(self, num_rows: int, seconds: Sequence[float]) -> int:
        """Return the depth of least seconds, or the one in use where that is about as good."""
        key = num_rows.bit_length()
        in_use = self._chosen.get(key, 0)
        best = min(range(len(seconds)), key=seconds.__getitem__)
        if seconds[in_use] <= (1.0 + HYSTERESIS) * seconds[best]:
            best = in_use
        self._chosen[key] = best
        return best

    def _is_time_to_try(self, plain_s: float, trying_s: float) -> bool:
        """Count a plan by which nothing pays; return whether it is time to see what a token comes to now."""
        self._num_idle += 1
        self._idle_s += PLAN_STEPS * plain_s
        if self._num_idle < _TRIED_AGAIN or trying_s - PLAN_STEPS * plain_s > COST_OF_TRYING * self._idle_s:
            return False
        self._num_idle, self._idle_s = 0, 0.0
        return True

    def _step_s(self, num_rows: int, depth: int, outcome: DepthOutcome) -> float:
        """Return the seconds of a step that drafts ``depth`` tokens at most, and verifies them."""
        drafted = num_rows * outcome.drafted
        drafting_s = self.costs.drafting_s(num_rows)
        times = forwards_of(depth) if self._costs_a_forward else look_ups_of(num_rows, drafted)
        return self.costs.verifying_s(num_rows, drafted, depth) + times * drafting_s

    def _token_s(self, num_rows: int, depth: int, outcome: DepthOutcome) -> float:
        """Return those of them that one token more takes."""
        drafted = num_rows * outcome.drafted
        fewer = max(drafted / 2, min(drafted, 1.0))
        token_s = 0.0 if self._costs_a_forward else self.costs.drafting_s(num_rows)
        if drafted - fewer > 0.5:
            more_s = self.costs.verifying_s(num_rows, drafted, depth) - self.costs.verifying_s(num_rows, fewer, depth)
            token_s += more_s / (drafted - fewer)
        return token_s


def remaining_s(outcome: DepthOutcome, step_s: float, fixed_s: float, *, longest: float, num_last: float) -> float:
    """Return the expected seconds until all samples are over.

    Args:
        outcome: What a sample's step comes to.
        step_s: Seconds of a step of all samples.
        fixed_s: Those of a plain step that no sample adds: they are spent until the last one is over.
        longest: Tokens that the sample with the most is expected to get still.
        num_last: How many samples may be the last one.
    """
    steps = longest / outcome.tokens
    behind = _CATCHING_UP * _largest_of(num_last) * math.sqrt(outcome.variance * steps) / outcome.tokens
    return steps * step_s + behind * fixed_s


def _largest_of(count: float) -> float:
    """Return the expected largest of so many standard normal variables."""
    return _largest_of_tenths(round(10 * count)) if count > 1.0 else 0.0


@cache
def _largest_of_tenths(tenths: int) -> float:
    count = tenths / 10
    return max(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), 0.0)
