"""How many drafted tokens of which samples are worth verifying in this step.

Every drafted token has a chance to stand, which cannot exceed that of the token before it, and every token more makes
the step longer. The plan is the set of tokens with the most expected tokens per second; it may be empty. Pure: seconds
and outcomes are told, never measured here.

Source of the rule: expected accepted tokens against verification cost, as RLHFSpec (arXiv:2512.04752) states its
objective; a set chosen by survival over all samples, as in vLLM's adaptive verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

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
        self._stood: dict[object, float] = {}
        self._tried: dict[object, float] = {}
        self._all_stood, self._all_tried = _START * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def __call__(self, kind: object) -> float:
        """Return the chance that a token of this kind stands, given that those before it do."""
        overall = self._all_stood / self._all_tried
        tried = self._tried.get(kind, 0.0)
        return (self._stood.get(kind, 0.0) + _PRIOR_WEIGHT * overall) / (tried + _PRIOR_WEIGHT)

    def learn(self, kinds: Sequence[object], stood: int) -> None:
        """Take the outcome of a draft whose first ``stood`` tokens stood; those behind the first fallen say nothing."""
        for index, kind in enumerate(kinds[: stood + 1]):
            won = float(index < stood)
            self._stood[kind] = _MEMORY * self._stood.get(kind, 0.0) + won
            self._tried[kind] = _MEMORY * self._tried.get(kind, 0.0) + 1.0
            self._all_stood = _MEMORY * self._all_stood + won
            self._all_tried = _MEMORY * self._all_tried + 1.0


class StepCosts:
    """Seconds of a step by its number of tokens, learnt from steps as they run.

    Sizes of about the same logarithm share a mean. Between two of them the seconds are interpolated; beyond the largest
    one they are taken to stay as they are, so that a size never tried is tried once it could pay. A machine that gets
    slower or faster moves all means at once.
    """

    def __init__(self, *, rate: float = 0.15, drift_rate: float = 0.1) -> None:
        """Weigh a new observation of a size by ``rate``, and of the machine's speed by ``drift_rate``."""
        self._rate = rate
        self._drift_rate = drift_rate
        self._scale = 1.0
        self._means: dict[int, tuple[float, float]] = {}
        """By bucket: mean size, and mean seconds divided by the scale."""
        self._curve: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._means)

    @property
    def smallest(self) -> float | None:
        """The smallest size that was observed."""
        return min(size for size, _ in self._means.values()) if self._means else None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the seconds of one step."""
        bucket = round(4 * np.log2(num_tokens))
        if self._means:
            ratio = min(max(seconds / float(self.seconds(num_tokens)), 1 / 3), 3.0)
            if bucket in self._means:
                self._scale *= ratio**self._drift_rate
        size, mean = self._means.get(bucket, (float(num_tokens), seconds / self._scale))
        observed = min(seconds / self._scale, 3.0 * mean)  # one hiccup must not hide a size for long
        self._means[bucket] = (
            size + self._rate * (num_tokens - size), mean + self._rate * (observed - mean)
        )  # fmt: skip
        self._curve = None

    def seconds(self, num_tokens: float | np.ndarray) -> np.ndarray:
        """Return the expected seconds of steps of these sizes; 1 where nothing is known."""
        if not self._means:
            return np.ones_like(np.asarray(num_tokens, dtype=float))
        if self._curve is None:
            sizes, means = np.array(sorted(self._means.values())).T
            # Larger steps do not take less time: the mean of the two nearest rising sequences around what was seen.
            rising = (np.maximum.accumulate(means) + np.minimum.accumulate(means[::-1])[::-1]) / 2
            self._curve = sizes, rising
        return np.asarray(self._scale * np.interp(num_tokens, *self._curve))


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of each draft to verify."""

    lengths: tuple[int, ...]
    tokens_per_s: float
    """Expected."""


def plan_budget(
    survivals: Sequence[Sequence[float]],
    seconds_of: Callable[[np.ndarray], np.ndarray],
    plain_seconds: float,
    *,
    weights: Sequence[float] | None = None,
    margin: float = MARGIN,
) -> Budget:
    """Return how many tokens of each draft to verify for the most expected tokens per second.

    Args:
        survivals: For every sample, the chance that its first, first two, first three … drafted tokens stand.
        seconds_of: Seconds of a step with so many tokens in all.
        plain_seconds: Of a step that verifies nothing.
        weights: What a token of each sample is worth; by default 1.
        margin: Share by which a plan must beat verifying nothing.
    """
    num_rows = len(survivals)
    worth = weights or [1.0] * num_rows
    slots = sorted(
        ((chance * worth[row], -row, -place) for row, own in enumerate(survivals) for place, chance in enumerate(own)),
        reverse=True,
    )
    nothing = Budget((0,) * num_rows, sum(worth) / plain_seconds)
    if not slots:
        return nothing
    gains = sum(worth) + np.fromiter(accumulate(slot[0] for slot in slots), dtype=float, count=len(slots))
    rates = gains / seconds_of(np.arange(num_rows + 1, num_rows + 1 + len(slots)))
    best = int(rates.argmax())
    if rates[best] < (1.0 + margin) * nothing.tokens_per_s:
        return nothing
    lengths = [0] * num_rows
    for _, row, _ in slots[: best + 1]:
        lengths[-row] += 1
    return Budget(tuple(lengths), float(rates[best]))
