"""How many drafted tokens of which samples are worth verifying in this step.

Every drafted token has a chance to stand, which cannot exceed that of the token before it, and every token more makes
the step longer. The plan is the set of tokens with the most expected tokens per second; it may be empty. Pure: seconds
and outcomes are told, never measured here.

Source of the rule: expected accepted tokens against verification cost, as RLHFSpec (arXiv:2512.04752) states its
objective; a set chosen by survival over all samples, as in vLLM's adaptive verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.03
"""Share by which verifying must promise to be faster than not to."""
_MEMORY = 0.99
_PRIOR_WEIGHT = 2.0
_START = 0.5
"""Chance of a drafted token nothing is known about."""


class AcceptanceRates:
    """How often drafted tokens of each kind stood, of late."""

    def __init__(self) -> None:
        """Know nothing: every kind has the chance 0.5."""
        self._counts: dict[object, list[float]] = {}
        """Stood and tried, older ones counting less."""
        self._all = [_START * _PRIOR_WEIGHT, _PRIOR_WEIGHT]
        self._chances: dict[object, float] = {}
        """As last learnt."""

    def __call__(self, kind: object) -> float:
        """Return the chance that a token of this kind stands, given that those before it do."""
        chance = self._chances.get(kind)
        return self._all[0] / self._all[1] if chance is None else chance

    def learn(self, kinds: Sequence[object], stood: int) -> None:
        """Take the outcome of a draft whose first ``stood`` tokens stood; those behind the first fallen say nothing."""
        for index, kind in enumerate(kinds[: stood + 1]):
            counts = self._counts.get(kind)
            if counts is None:
                counts = self._counts[kind] = [0.0, 0.0]
            won = index < stood
            for pair in (counts, self._all):
                pair[0] = _MEMORY * pair[0] + won
                pair[1] = _MEMORY * pair[1] + 1.0
            overall = self._all[0] / self._all[1]
            self._chances[kind] = (counts[0] + _PRIOR_WEIGHT * overall) / (counts[1] + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of each draft to verify."""

    lengths: tuple[int, ...]
    tokens_per_s: float
    """Expected."""
    price: float | None
    """Chance to stand, times weight, between those of the last token in the plan and the first one that is not; None
    where all are in it, or none."""


def plan_budget(
    survivals: Sequence[Sequence[float]],
    step_s: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    margin: float = MARGIN,
) -> Budget:
    """Return how many tokens of each draft to verify for the most expected tokens per second.

    Args:
        survivals: For every sample, the chance that its first, first two, first three … drafted tokens stand.
        step_s: Seconds of a step that verifies 0, 1, 2 … drafted tokens, up to as many as were drafted.
        weights: What a token of each sample is worth; by default 1.
        margin: Share by which a plan must beat verifying nothing.
    """
    num_rows = len(survivals)
    if weights is None:
        gain = float(num_rows)
        slots = [(chance, -row) for row, own in enumerate(survivals) for chance in own]
    else:
        gain = sum(weights)
        slots = [(chance * weight, -row) for row, (own, weight) in enumerate(zip(survivals, weights, strict=True))
                 for chance in own]  # fmt: skip
    slots.sort(reverse=True)
    best, rate = 0, (1.0 + margin) * gain / step_s[0]
    best_rate = gain / step_s[0]
    for count, (chance, _) in enumerate(slots, start=1):
        gain += chance
        if gain > rate * step_s[count]:
            best, rate = count, gain / step_s[count]
            best_rate = rate
    lengths = [0] * num_rows
    for _, row in slots[:best]:
        lengths[-row] += 1
    price = (slots[best - 1][0] + slots[best][0]) / 2 if 0 < best < len(slots) else None
    return Budget(tuple(lengths), best_rate, price)
