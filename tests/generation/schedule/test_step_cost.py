"""Seconds of a step by its size, against known curves."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_realloc.generation.schedule.step_cost import StepCosts

CURVES: dict[str, Callable[[float], float]] = {
    "flat": lambda size: 1.0,
    "linear": lambda size: 0.1 + 0.05 * size,
    "knee": lambda size: max(1.0, size / 12),
}


@pytest.mark.parametrize("curve", sorted(CURVES))
def test_step_costs_are_within_15_percent_after_50_noisy_steps_and_again_after_the_machine_slows_down(
    curve: str,
) -> None:
    rng, costs = random.Random(0), StepCosts()
    sizes = [1, 2, 4, 7, 12, 20, 33, 60]
    for factor in (1.0, 2.0, 0.5):
        for _ in range(50):
            size = rng.choice(sizes)
            noise = rng.lognormvariate(0, 0.1) * (4.0 if rng.random() < 0.02 else 1.0)
            costs.observe(size, factor * CURVES[curve](size) * noise)
        errors = [costs.seconds(size) / (factor * CURVES[curve](size)) - 1 for size in sizes]
        assert np.abs(errors).mean() < 0.15


def test_step_costs_never_fall_with_size_and_stay_flat_beyond_measured_sizes() -> None:
    costs = StepCosts()
    for size, seconds in ((1, 1.0), (8, 0.7), (16, 2.0), (4, 3.0)):
        costs.observe(size, seconds)
    curve = np.array([costs.seconds(size) for size in range(1, 64)])
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == curve[20]


def test_costs_between_two_sizes_lie_between_theirs() -> None:
    costs = StepCosts()
    assert not costs.known and costs.seconds(8) == 1.0
    costs.observe(4, 1.0)
    costs.observe(12, 3.0)
    assert costs.known
    assert costs.seconds(8) == pytest.approx(2.0)
    assert costs.knots() == [(4.0, 1.0), (12.0, 3.0)]


def test_a_clock_that_stands_still_or_goes_back_costs_next_to_nothing() -> None:
    costs = StepCosts()
    for seconds in (0.0, -1.0, 0.0, 0.0):
        costs.observe(4, seconds)
    assert 0.0 < costs.seconds(4) < 1e-6
