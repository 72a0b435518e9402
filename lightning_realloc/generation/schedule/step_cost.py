"""Seconds of a step by its number of rows, exponentially weighted, with straight lines between measured sizes."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

STEP_COST_RATE = 0.1
"""Least weight of a new step in the mean of its size. Larger: follows a machine that slows down, but is noisier."""
DRIFT_RATE = 0.2
"""Share of a step's surprise that counts as a change of the machine, which slows steps of all sizes."""
MAX_STEP_RATIO = 1.5
"""Factor by which one step may differ from the mean of its size; more is a hiccup of the machine and is cut off."""


class StepCosts:
    """Seconds of a step by its number of rows, learnt from steps as they run.

    Sizes within about 19 % of each other share a mean. Beyond the smallest and the largest size seconds stay constant.
    """

    def __init__(self) -> None:
        """Start without observations."""
        self._means: dict[int, tuple[float, float, int]] = {}
        """Bucket -> mean rows, mean seconds over the drift, number of steps."""
        self._drift = 1.0
        """Seconds of a step now over those of the first steps."""

    @property
    def known(self) -> bool:
        """Whether any step was observed."""
        return bool(self._means)

    def observe(self, num_rows: float, seconds: float) -> None:
        """Take the seconds of one step."""
        bucket = round(4 * math.log2(num_rows))
        seconds = max(seconds, 1e-9) / self._drift
        rows, mean_s, count = self._means.get(bucket, (float(num_rows), seconds, 0))
        rate = max(STEP_COST_RATE, 1.0 / (count + 1))
        ratio = min(max(seconds / mean_s, 1.0 / MAX_STEP_RATIO), MAX_STEP_RATIO)
        self._drift *= ratio**DRIFT_RATE
        self._means[bucket] = rows + rate * (num_rows - rows), mean_s * (1.0 + rate * (ratio - 1.0)), count + 1

    def knots(self) -> list[tuple[float, float]]:
        """Return the measured sizes, ascending, and their seconds, which never fall."""
        means = [self._means[bucket] for bucket in sorted(self._means)]
        seconds = accumulate((self._drift * mean_s for _, mean_s, _ in means), max)
        return list(zip((rows for rows, _, _ in means), seconds, strict=True))

    def seconds(self, num_rows: float) -> float:
        """Return the expected seconds of a step of this size; 1 without observations."""
        knots = self.knots()
        if not knots:
            return 1.0
        above = bisect_left(knots, (num_rows, 0.0))
        if not 0 < above < len(knots):
            return knots[0 if not above else -1][1]
        (low, low_s), (high, high_s) = knots[above - 1], knots[above]
        return low_s + (num_rows - low) / (high - low) * (high_s - low_s)
