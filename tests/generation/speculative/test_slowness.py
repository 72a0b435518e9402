"""Do kinds of steps tell of each other as far as they change together? A Kalman filter on matrices is the judge."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.speculative.slowness import APART, TOGETHER, Slowness

NOISE = 0.0025


def see(slowness: Slowness, kind: int, seconds: float) -> None:
    """Take a step of this kind, which takes a second on a machine as fast as at first."""
    slowness.pass_step()
    slowness.learn(kind, math.log(seconds / slowness.factors[kind]), slowness.variance(kind) + NOISE)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1.0, 1.0)), max_size=40))
def test_it_is_the_kalman_filter_of_kinds_that_drift_together_and_apart(steps: list[tuple[int, float]]) -> None:
    slowness, state, covariance = Slowness(3), np.zeros(3), np.zeros((3, 3))
    for kind, logarithm in steps:
        see(slowness, kind, math.exp(logarithm))
        covariance = covariance + TOGETHER * np.ones((3, 3)) + APART * np.eye(3)
        gain = covariance[:, kind] / (covariance[kind, kind] + NOISE)
        state = state + gain * (logarithm - state[kind])
        covariance = (np.eye(3) - np.outer(gain, np.eye(3)[kind])) @ covariance
        assert np.log(slowness.factors) == pytest.approx(state, abs=1e-9)
        assert [slowness.variance(kind) for kind in range(3)] == pytest.approx(np.diag(covariance), rel=1e-6)
        assert (np.diag(covariance) > 0.0).all()


def test_one_kind_tells_most_of_how_much_slower_another_got() -> None:
    slowness = Slowness(2)
    for _ in range(100):
        see(slowness, 1, 2.0)
    assert slowness.factors[1] == pytest.approx(2.0, rel=0.01)
    assert 1.8 < slowness.factors[0] < 2.0


def test_a_kind_that_was_not_seen_for_long_is_told_right_by_a_few_steps_and_the_other_stays_as_it_is() -> None:
    rng, slowness = random.Random(0), Slowness(2)
    for kind, times in ((0, 200), (1, 400)):
        for _ in range(times):
            see(slowness, kind, rng.lognormvariate(0.0, 0.02))
    other = slowness.factors[1]
    for _ in range(6):  # a pause
        see(slowness, 0, 0.9)
    assert slowness.factors[0] == pytest.approx(0.9, rel=0.025)
    assert slowness.factors[1] == pytest.approx(other, rel=0.05)


def test_nothing_changes_on_a_machine_that_does_not() -> None:
    slowness = Slowness(2, together=0.0)
    for _ in range(50):
        see(slowness, 1, 1.0)
    assert slowness.factors == [1.0, 1.0]
