from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.report.runs.series import (
    Series,
    bin_edges,
    bin_means,
    collect_series,
    largest_triangles,
    trailing_mean,
)


def _naive_triangles(steps: list[float], values: list[float], limit: int) -> list[int]:
    """Choose points as Steinarsson describes it, with loops over buckets and points."""
    number = len(steps)
    edges = [int(one) for one in np.linspace(1, number - 1, limit - 1)] + [number]
    chosen = [0]
    for bucket in range(limit - 2):
        following = range(edges[bucket + 1], edges[bucket + 2])
        mean_x = sum(steps[at] for at in following) / len(following)
        mean_y = sum(values[at] for at in following) / len(following)
        x, y = steps[chosen[-1]], values[chosen[-1]]
        areas = {
            at: abs((x - mean_x) * (values[at] - y) - (x - steps[at]) * (mean_y - y)) / 2
            for at in range(edges[bucket], edges[bucket + 1])
        }
        chosen.append(max(areas, key=lambda at: areas[at]))
    return [*chosen, number - 1]


def test_downsampling_chooses_the_points_of_the_naive_algorithm() -> None:
    rng = np.random.default_rng(0)
    steps, values = np.arange(500.0), np.cumsum(rng.normal(size=500))

    chosen = largest_triangles(steps, values, 40)

    assert chosen.tolist() == _naive_triangles(steps.tolist(), values.tolist(), 40)


@given(number=st.integers(1, 300), limit=st.integers(3, 50))
def test_downsampling_keeps_both_ends_and_the_order(number: int, limit: int) -> None:
    chosen = largest_triangles(np.arange(float(number)), np.sin(np.arange(number)), limit)

    assert len(chosen) == min(number, limit)
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] == 0
    assert chosen[-1] == number - 1


def test_downsampling_keeps_a_single_spike() -> None:
    values = np.zeros(10_000)
    values[6789] = 1.0

    assert 6789 in largest_triangles(np.arange(10_000.0), values, 100)


def test_bins_average_known_values() -> None:
    edges = bin_edges(6, 3)  # 0, 2, 4

    means = bin_means(np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan]), edges)

    assert means[:2].tolist() == [2.0, 5.0]
    assert np.isnan(means[2])


def test_a_trailing_mean_begins_with_the_values_that_there_are() -> None:
    assert trailing_mean(np.array([2.0, 4.0, 6.0]), 2).tolist() == [2.0, 3.0, 5.0]


def test_the_last_value_of_a_step_counts_and_steps_are_sorted() -> None:
    found = collect_series([(2, {"reward": 5.0}), (1, {"reward": 1.0}), (2, {"reward": 7.0})])

    assert found["reward"].steps.tolist() == [1, 2]
    assert found["reward"].values.tolist() == [1.0, 7.0]


def test_the_final_mean_is_that_of_the_last_tenth_without_infinite_values() -> None:
    values = np.array([0.0] * 18 + [4.0, np.inf, 6.0])

    assert Series("x", np.arange(21.0), values).final_mean() == 5.0
