"""Is the budget the best one, and are costs learnt fast enough? Brute force and known curves are the judges."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.draft_planner import AcceptanceRates, plan_budget
from lightning_realloc.generation.step_costs import StepCosts

CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda size: np.full(np.shape(size), 1.0),
    "linear": lambda size: 0.1 + 0.05 * size,
    "steps": lambda size: 1.0 + np.ceil(np.asarray(size) / 8),
    "knee": lambda size: np.maximum(1.0, np.asarray(size) / 12),
}
survivals_of = st.lists(
    st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda chances: list(itertools.accumulate(chances, min))),
    min_size=1, max_size=4,
)  # fmt: skip


def best_by_brute_force(
    survivals: list[list[float]], seconds_of: Callable[[np.ndarray], np.ndarray], weights: list[float]
) -> float:
    """Return the most expected tokens per second over all lengths of all drafts, beyond nothing."""
    best = 0.0
    for lengths in itertools.product(*(range(len(own) + 1) for own in survivals)):
        if any(lengths):
            gain = sum(w * (1 + sum(own[:n])) for own, n, w in zip(survivals, lengths, weights, strict=True))
            best = max(best, gain / float(seconds_of(np.array(len(survivals) + sum(lengths)))))
    return best


@given(survivals=survivals_of, curve=st.sampled_from(sorted(CURVES)), seed=st.integers(0, 9))
def test_the_budget_is_the_best_of_all(survivals: list[list[float]], curve: str, seed: int) -> None:
    seconds_of, rng = CURVES[curve], random.Random(seed)
    weights = [1.0] * len(survivals) if seed % 2 else [rng.uniform(0.2, 2) for _ in survivals]
    step_s = seconds_of(np.arange(len(survivals), len(survivals) + sum(map(len, survivals)) + 1)).tolist()
    budget = plan_budget(survivals, step_s, weights=weights, margin=0.0)
    best = best_by_brute_force(survivals, seconds_of, weights)
    plain = sum(weights) / step_s[0]
    assert budget.tokens_per_s == pytest.approx(max(best, plain))
    assert all(length <= len(own) for length, own in zip(budget.lengths, survivals, strict=True))
    gain = sum(w * (1 + sum(own[:n])) for own, n, w in zip(survivals, budget.lengths, weights, strict=True))
    size = len(survivals) + sum(budget.lengths)
    assert gain / float(seconds_of(np.array(size))) == pytest.approx(budget.tokens_per_s)


def test_nothing_is_verified_where_every_token_costs_what_it_may_bring() -> None:
    # A second per token: a drafted one brings at most its chance of 0.4 tokens for a second.
    budget = plan_budget([[0.4, 0.16], [0.4]], [2.0, 3.0, 4.0, 5.0])
    assert budget.lengths == (0, 0)
    assert budget.tokens_per_s == 1.0


def test_everything_is_verified_where_tokens_cost_nothing() -> None:
    # (1 + .5 + .25) + (1 + .9) tokens in one second.
    budget = plan_budget([[0.5, 0.25], [0.9]], [1.0] * 4)
    assert budget.lengths == (2, 1)
    assert budget.tokens_per_s == pytest.approx(3.65)


def test_a_gain_within_the_margin_is_not_taken() -> None:
    # Two rows: 2.1 tokens in 1.04 s are 2.019 a second, 1 % more than 2.
    assert plan_budget([[0.1], []], [1.0, 1.04], margin=0.0).lengths == (1, 0)
    assert plan_budget([[0.1], []], [1.0, 1.04], margin=0.03).lengths == (0, 0)


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
            costs.observe(size, factor * float(CURVES[curve](np.array(size))) * noise)
        errors = [float(costs.seconds(size)) / (factor * float(CURVES[curve](np.array(size)))) - 1 for size in sizes]
        assert np.abs(errors).mean() < 0.15


def test_step_costs_never_fall_with_size_and_stay_flat_beyond_what_was_tried() -> None:
    costs = StepCosts()
    for size, seconds in ((1, 1.0), (8, 0.7), (16, 2.0), (4, 3.0)):
        costs.observe(size, seconds)
    curve = costs.seconds(np.arange(1, 64))
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == curve[20]


def test_costs_between_two_sizes_lie_between_theirs() -> None:
    costs = StepCosts()
    costs.observe(4, 1.0)
    costs.observe(12, 3.0)
    assert float(costs.seconds(8)) == pytest.approx(2.0)


def test_rates_of_a_kind_go_from_what_all_kinds_do_to_what_it_does() -> None:
    rates = AcceptanceRates()
    assert rates("new") == 0.5
    for _ in range(200):
        rates.learn(["good", "bad"], 1)
    assert rates("good") > 0.95
    assert rates("bad") < 0.05
    assert 0.4 < rates("new") < 0.6


def test_tokens_behind_the_first_fallen_say_nothing() -> None:
    rates = AcceptanceRates()
    rates.learn(["a", "b", "c"], 0)
    assert rates("a") < rates("b") == rates("c")
