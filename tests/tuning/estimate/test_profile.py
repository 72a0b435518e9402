"""Profiles survive saving, and interpolation never decreases with size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.tuning.estimate.profile import Curve, PassKey, PassTimes, ProfileTable, Surface

samples = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, max_size=8)


def table() -> ProfileTable:
    surface = Surface.from_samples([(8, 16, 0.5), (64, 16, 2.0), (8, 32, 0.75), (64, 32, 3.0)])
    return ProfileTable(
        machine={"device": "cpu", "torch": "2.13.0"},
        passes={PassKey("llama", "train_last", ParallelDims(dp=2, tp=2)): PassTimes(surface, surface)},
        optimizer={"llama": Curve(((10.0, 0.5),))},
        moves={"push": Curve(((1.0, 0.25), (3.0, 0.5)))},
        crowding={1: Curve(((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))), 2: Curve(((2.0, 1.0), (4.0, 3.0)))},
        offload=Curve(((1.0, 0.125), (2.0, 0.25))),
        seconds=1.25,
    )


@given(samples, st.floats(0, 2000), st.floats(0, 2000))
def test_a_curve_never_decreases(points: list[tuple[int, float]], one: float, other: float) -> None:
    curve = Curve.from_samples(points)
    assert curve(min(one, other)) <= curve(max(one, other)) + 1e-9


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=2, max_size=6, unique_by=lambda p: p[0]))
def test_no_other_non_decreasing_curve_is_nearer_to_the_samples(points: list[tuple[int, float]]) -> None:
    """Compare with every monotone step function of means; pooling gives the least squares."""
    points = sorted(points)
    fitted = [seconds for _, seconds in Curve.from_samples(points).points]
    error = sum((a - b) ** 2 for a, (_, b) in zip(fitted, points, strict=True))
    for candidate in _rising_step_functions([seconds for _, seconds in points]):
        assert error <= sum((a - b) ** 2 for a, (_, b) in zip(candidate, points, strict=True)) + 1e-9


def _rising_step_functions(values: Sequence[float]) -> list[list[float]]:
    """Return every division into runs with rising means, among them the best non-decreasing function."""
    found: list[list[float]] = []
    for cuts in range(2 ** (len(values) - 1)):
        runs: list[list[float]] = [[]]
        for index, value in enumerate(values):
            runs[-1].append(value)
            if cuts >> index & 1:
                runs.append([])
        means = [sum(run) / len(run) for run in runs if run]
        if means == sorted(means):
            found.append([mean for run, mean in zip((r for r in runs if r), means, strict=True) for _ in run])
    return found


def test_a_curve_passes_through_its_points_and_extrapolates() -> None:
    curve = Curve.from_samples([(10, 1.0), (20, 3.0), (40, 4.0)])
    assert [curve(size) for size in (10, 15, 20, 30, 40)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert curve(80) == 6.0  # 0.05 per unit, as from 20 to 40
    assert curve(0) == 0.0  # 0.2 per unit from 10 downwards would be -1
    assert Curve(((4.0, 2.0),))(6) == 3.0


def test_a_surface_is_linear_between_its_curves() -> None:
    surface = Surface.from_samples([(1, 10, 1.0), (2, 10, 2.0), (1, 20, 3.0), (2, 20, 6.0)])
    assert surface(1, 15) == 2.0
    assert surface(2, 20) == 6.0
    assert surface(1.5, 10) == 1.5
    assert surface(2, 30) == 10.0  # 6, plus the difference between the curves


def test_a_saved_table_is_read_back() -> None:
    assert ProfileTable.from_json(table().to_json()) == table()


def test_degrees_are_written_by_name() -> None:
    assert json.loads(table().to_json())["passes"][0]["dims"] == "dp2.tp2"


def by_position(degrees: list[int]) -> str:
    """Return the table in format 1, which listed the degrees of pp, dp, fsdp and tp."""
    content = json.loads(table().to_json())
    content["format"], content["passes"][0]["dims"] = 1, degrees
    return json.dumps(content)


def test_a_table_of_format_1_is_read_in_the_order_of_its_axes() -> None:
    assert ProfileTable.from_json(by_position([1, 2, 1, 2])) == table()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        by_position([1, 2, 1, 1, 2]),
        table().to_json().replace("train_last", "nap"),
        table().to_json().replace("dp2.tp2", "zp2"),
    ],
)
def test_text_that_is_not_a_table_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"this is not a profile of .*; remove it"):
        ProfileTable.from_json(text)


def test_a_table_of_an_unknown_format_is_refused_with_its_number() -> None:
    with pytest.raises(PlanError, match=r"^a profile of format 99 cannot be read, only up to 2; remove it$"):
        ProfileTable.from_json('{"format": 99}')


def test_a_decreasing_curve_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("(20, 1.0) follows (10, 2.0)")):
        Curve(((10, 2.0), (20, 1.0)))


def test_beyond_the_measured_range_throughput_is_constant() -> None:
    assert [table().slowdown_of(busy) for busy in (1, 3, 4, 8)] == [1.0, 1.5, 2.0, 4.0]
    assert [table().slowdown_of(busy, tp=2) for busy in (2, 3, 4)] == [1.0, 2.0, 3.0]
    assert table().slowdown_of(4, tp=4) == 2.0, "groups that were not measured are crowded as single ranks are"
    assert ProfileTable(machine={}).slowdown_of(4) == 1.0
