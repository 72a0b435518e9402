"""Values over iterations, and fewer points of them for charts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MAX_POINTS = 600
"""Points of a line in a chart; more make larger files, and a screen shows no more of them."""
MAX_BINS = 300
"""Points of a stacked area or an envelope; more make larger files."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the iterations that logged it."""

    name: str
    steps: Values
    """Shape [N], ascending."""
    values: Values
    """Shape [N]; NaN or infinite where the run logged such a value."""

    def finite(self) -> Series:
        """Return the points with finite values."""
        kept = np.isfinite(self.values)
        return Series(self.name, self.steps[kept], self.values[kept])

    def part(self, begin: float, end: float) -> Values:
        """Return the finite values between two fractions of the run, at least one unless there are none."""
        values = self.finite().values
        first = min(int(begin * len(values)), max(0, len(values) - 1))
        return values[first : max(first + 1, round(end * len(values)))]

    @property
    def is_constant(self) -> bool:
        """Whether all finite values are equal, or there are none: a chart would say nothing. One value alone is not."""
        values = self.finite().values
        return not len(values) or (len(values) > 1 and float(np.ptp(values)) == 0.0)

    def final_mean(self) -> float:
        """Return the mean of the last tenth; NaN without finite values."""
        values = self.part(0.9, 1.0)
        return float(values.mean()) if len(values) else float("nan")


def collect_series(points: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, Series]:
    """Return the series of all metrics, given each row's step and values; the last value of a step counts."""
    found: dict[str, dict[float, float]] = {}
    for step, values in points:
        for name, value in values.items():
            found.setdefault(name, {})[step] = value
    series = {}
    for name, by_step in found.items():
        points_of_metric = np.array(sorted(by_step.items()), dtype=np.float64)
        series[name] = Series(name, points_of_metric[:, 0], points_of_metric[:, 1])
    return series


def largest_triangles(steps: Values, values: Values, limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """Return the indices of at most ``limit`` points that keep a line's shape, the first and the last included.

    Every bucket of points gives the one that spans the largest triangle with the point chosen before and the mean of
    the next bucket. Values must be finite.

    Source: Steinarsson, "Downsampling Time Series for Visual Representation" (2013), section 4.2 (LTTB).
    """
    number = len(steps)
    if number <= limit:
        return np.arange(number)
    edges = np.linspace(1, number - 1, limit - 1).astype(np.int64)
    counts = np.diff(edges, append=number)
    mean_steps, mean_values = (np.add.reduceat(one, edges) / counts for one in (steps, values))
    chosen = [0]
    for bucket, (begin, end) in enumerate(pairwise(edges.tolist())):
        last_x, last_y = steps[chosen[-1]], values[chosen[-1]]
        next_x, next_y = mean_steps[bucket + 1], mean_values[bucket + 1]
        inside = slice(begin, end)
        areas = np.abs((last_x - next_x) * (values[inside] - last_y) - (last_x - steps[inside]) * (next_y - last_y))
        chosen.append(begin + int(areas.argmax()))
    return np.array([*chosen, number - 1])


def trailing_mean(values: Values, window: int) -> Values:
    """Return the mean of each value and up to ``window - 1`` before it."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


def bin_edges(number: int, limit: int = MAX_BINS) -> NDArray[np.int64]:
    """Return the beginnings of at most ``limit`` bins of about equal numbers of points."""
    bins = min(number, limit)
    return (np.arange(bins) * number // max(1, bins)).astype(np.int64)


def bin_means(values: Values, edges: NDArray[np.int64]) -> Values:
    """Return each bin's mean along the last axis, NaN left out; NaN for a bin without any other value."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges, axis=-1)
    counts = np.add.reduceat(known.astype(np.float64), edges, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Return values with some significant digits; None for those that are not finite."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
