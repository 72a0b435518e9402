"""Forecast when a run ends, what it uses until then, and how far this may err. Pure.

Iterations take the mean seconds of the recent ones. The interval has two parts: a moving-block bootstrap, because
neighbouring iterations resemble each other (Künsch, Annals of Statistics 17, 1989), and the drift between the two
halves of what was measured, because responses grow while a model learns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

WARM_UP_ITERATIONS = 2
"""Iterations that are left out at the start of a session: libraries load, and buffers grow."""
MIN_ITERATIONS = 5
"""Iterations without which there is no forecast."""
RECENT_SHARE, MIN_RECENT = 0.5, 50
"""Fraction and least number of iterations, the latest ones, whose mean the remaining ones are expected to take. Fewer
follow changes sooner, and have a noisier mean."""
BLOCK_ITERATIONS = 10
"""Iterations of a bootstrap's block, fewer in short runs. Longer blocks keep slower changes, and need more data."""
RESAMPLES = 400
"""Bootstrap samples; more of them make the interval's ends steadier."""
COVERAGE = 0.9
"""Probability of the interval under the bootstrap."""
SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Interval:
    """An expected value with its bounds."""

    expected: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval of a multiple."""
        return Interval(factor * self.expected, factor * self.low, factor * self.high)

    def plus(self, value: float) -> Interval:
        """Return the interval of a sum with a known value."""
        return Interval(self.expected + value, self.low + value, self.high + value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a run, so far and until its end."""

    seconds: Interval
    """Wall time of the whole run."""
    device_hours: Interval
    """Device-hours of the whole run."""
    spent_s: float
    """Wall time so far."""
    spent_device_hours: float
    price: Interval | None = None
    """Price of the whole run; None without a price for a device-hour."""
    energy_kwh: Interval | None = None
    """Energy of the whole run's devices; None where it was not measured."""


def forecast_seconds(durations: Sequence[float], num_remaining: int) -> Interval | None:
    """Return the seconds of the remaining iterations; None if too few were measured.

    Args:
        durations: Seconds of the iterations so far, in order, with everything between two of them.
        num_remaining: Iterations to come.
    """
    measured = list(durations[WARM_UP_ITERATIONS:])
    if len(measured) < MIN_ITERATIONS:
        return None
    recent = measured[-max(MIN_RECENT, round(RECENT_SHARE * len(measured))) :]
    mean, half = fmean(recent), len(measured) // 2
    drift = abs(fmean(measured[half:]) - fmean(measured[:half]))
    means = sorted(_resampled_means(recent, num_remaining, random.Random(0)))
    tail = round((1 - COVERAGE) / 2 * len(means))
    low, high = means[tail], means[-1 - tail]
    return Interval(mean, max(min(measured), low - drift), high + drift).scaled(num_remaining)


def _resampled_means(values: Sequence[float], num_remaining: int, rng: random.Random) -> list[float]:
    """Return means of as many values as remain, drawn in blocks of neighbours, but not of more than were measured."""
    block = max(1, min(BLOCK_ITERATIONS, len(values) // 3))
    starts = range(len(values) - block + 1)
    count = max(1, min(num_remaining, len(values)) // block)
    return [
        fmean(value for first in rng.choices(starts, k=count) for value in values[first : first + block])
        for _ in range(RESAMPLES)
    ]


def forecast_cost(
    durations: Sequence[float],
    num_remaining: int,
    *,
    num_devices: int,
    price_per_device_hour: float | None = None,
    joules: float | None = None,
) -> Cost | None:
    """Return the cost of a run; None if too few iterations were measured.

    Args:
        durations: Seconds of the iterations so far, in order.
        num_remaining: Iterations to come.
        num_devices: Devices of the run.
        price_per_device_hour: In any currency.
        joules: Energy of all devices so far; the remaining iterations are expected to use as much in the same time.
    """
    remaining = forecast_seconds(durations, num_remaining) if num_remaining else Interval(0.0, 0.0, 0.0)
    spent_s = sum(durations)
    if remaining is None or not spent_s:
        return None
    seconds = remaining.plus(spent_s)
    hours = seconds.scaled(num_devices / SECONDS_PER_HOUR)
    return Cost(
        seconds=seconds,
        device_hours=hours,
        spent_s=spent_s,
        spent_device_hours=num_devices * spent_s / SECONDS_PER_HOUR,
        price=None if price_per_device_hour is None else hours.scaled(price_per_device_hour),
        energy_kwh=None if joules is None else seconds.scaled(joules / spent_s / JOULES_PER_KWH),
    )
