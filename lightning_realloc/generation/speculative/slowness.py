"""How much longer steps of one or more kinds take now than they did at first.

A machine that other work runs on gets slower for all kinds together, mostly, and a little for each on its own. So what
one kind of step takes tells of the others, but the less the longer those were not seen. That is a Kalman filter on the
logarithms of seconds, whose state is the slowness of each kind (Kalman, "A new approach to linear filtering and
prediction problems", Journal of Basic Engineering 82, 1960). Pure: seconds are told, never measured here.
"""

from __future__ import annotations

import math

TOGETHER = 1e-4
"""By which the variance of the slowness of all kinds together grows with every step: by 1 % it may change."""
APART = 4e-6
"""The same of each kind's own: what two kinds take beside each other may change by 6 % in 400 steps."""


class Slowness:
    """The slowness of some kinds of steps, all 1 at first."""

    def __init__(self, num_kinds: int = 1, *, together: float = TOGETHER) -> None:
        """Know that steps of all kinds take as long as they do."""
        self.factors = [1.0] * num_kinds
        self._covariance = [[0.0] * num_kinds for _ in range(num_kinds)]
        """Of their logarithms, as far as they are not known."""
        self._together = together

    def pass_step(self) -> None:
        """Take that a step passed, in which the machine may have changed."""
        for kind, row in enumerate(self._covariance):
            for other in range(len(row)):
                row[other] += self._together
            row[kind] += APART

    def variance(self, kind: int) -> float:
        """Return the variance of the logarithm of a kind's slowness."""
        return self._covariance[kind][kind]

    def learn(self, kind: int, surprise: float, doubt: float) -> None:
        """Take a step of this kind.

        Args:
            kind: Whose seconds were seen.
            surprise: Logarithm of its seconds over the expected ones.
            doubt: Variance of that; the kind's own included.
        """
        of_kind = self._covariance[kind][:]
        for other, shared in enumerate(of_kind):
            gain = shared / doubt
            self.factors[other] *= math.exp(surprise * gain)
            row = self._covariance[other]
            for each, covariance in enumerate(of_kind):
                row[each] -= gain * covariance
