"""Losses against hand-worked numbers and naive loops."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.algorithms.losses.functional import (
    KLEstimator,
    clipped_value_loss,
    cross_entropy,
    explained_variance,
    generalized_advantages,
    kl_estimate,
    masked_sum,
    sequence_mean_sum,
    sequence_sums,
    shaped_scores,
    token_rewards,
    turn_ends,
    whiten,
)
from lightning_realloc.batch.ragged import Ragged

REWARDS = st.floats(-5, 5, width=32)


def test_cross_entropy_is_minus_the_logprob_of_kept_tokens() -> None:
    # -log(1/2) = ln 2, -log(1/4) = 2 ln 2; the first token is not kept
    values = cross_entropy(torch.tensor([0.5, 0.5, 0.25]).log(), torch.tensor([False, True, True]))
    assert values.tolist() == pytest.approx([0.0, math.log(2), 2 * math.log(2)])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # policy 1/2, reference 1/4: d = ln 2 = 0.693147
        ("k1", 0.693147),
        ("k2", 0.240227),  # 0.693147^2 / 2
        ("k3", 0.193147),  # exp(-d) - 1 + d = 1/2 - 1 + 0.693147
    ],
)
def test_kl_estimates_of_one_token(estimator: KLEstimator, expected: float) -> None:
    estimate = kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), estimator=estimator)
    assert estimate.item() == pytest.approx(expected, abs=1e-6)


def test_k1_and_k3_average_to_the_kl_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy.log() - reference.log())).sum().item()
    for estimator in ("k1", "k3"):
        # the mean over tokens drawn from the policy is the sum weighted by its probabilities
        mean = (policy * kl_estimate(policy.log(), reference.log(), estimator=estimator)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-6)


def test_sums_ignore_masked_values() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, 5.0, math.inf])
    mask = torch.tensor([True, False, True, True, False])
    assert masked_sum(values, mask).item() == 9.0
    # sequence 0 keeps 1 and 3: mean 2; sequence 1 keeps 5: mean 5; sequence 2 keeps nothing
    assert sequence_mean_sum(values, mask, torch.tensor([0, 0, 0, 1, 2]), 3).item() == 7.0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(REWARDS, st.booleans(), st.integers(0, 4)), min_size=1, max_size=20), st.integers(0, 20))
def test_losses_of_two_parts_add_up_to_the_whole(tokens: list[tuple[float, bool, int]], cut: int) -> None:
    tokens = sorted(tokens, key=lambda token: token[2])
    # parts split between sequences, as micro-batches do
    while 0 < cut < len(tokens) and tokens[cut - 1][2] == tokens[cut][2]:
        cut += 1
    kept = defaultdict(list)
    for value, keep, sequence in tokens:
        if keep:
            kept[sequence].append(value)
    total_mean = sum(statistics.fmean(values) for values in kept.values())
    total = sum(value for value, keep, _ in tokens if keep)
    sums = means = 0.0
    for part in (tokens[:cut], tokens[cut:]):
        values = torch.tensor([value for value, _, _ in part], dtype=torch.float64)
        mask = torch.tensor([keep for _, keep, _ in part], dtype=torch.bool)
        index = torch.tensor([sequence for _, _, sequence in part], dtype=torch.int64)
        sums += masked_sum(values, mask).item()
        means += sequence_mean_sum(values, mask, index, 5).item()
    assert sums == pytest.approx(total, abs=1e-6)
    assert means == pytest.approx(total_mean, abs=1e-6)


def floats(*rows: list[float]) -> Ragged:
    """Return sequences of numbers."""
    return Ragged.from_list([torch.tensor(row, dtype=torch.float64) for row in rows])


def test_generalized_advantages_by_hand() -> None:
    # discount 0.9, lambda 0.5, so 0.45 between tokens. First sequence, rewards 0, 0, 1, values 0.5, 0.4, 0.8:
    #   delta_2 = 1 - 0.8 = 0.2;  delta_1 = 0.9 * 0.8 - 0.4 = 0.32;  delta_0 = 0.9 * 0.4 - 0.5 = -0.14
    #   A_2 = 0.2;  A_1 = 0.32 + 0.45 * 0.2 = 0.41;  A_0 = -0.14 + 0.45 * 0.41 = 0.0445
    # An empty one has none; of one token, reward -1 and value 0.25: -1.25, for any sequences next to it.
    rewards, values = floats([0, 0, 1], [], [-1], [2, 0]), floats([0.5, 0.4, 0.8], [], [0.25], [1, 1])
    advantages = generalized_advantages(rewards, values, discount=0.9, gae_lambda=0.5)
    # Last: delta_1 = -1;  delta_0 = 2 + 0.9 - 1 = 1.9;  A_0 = 1.9 - 0.45 = 1.45
    assert advantages.values.tolist() == pytest.approx([0.0445, 0.41, 0.2, -1.25, 1.45, -1.0])
    assert advantages.lengths.tolist() == [3, 0, 1, 2]
    # lambda 1: discounted rewards less the value: 0.81 * 1 - 0.5 = 0.31
    whole = generalized_advantages(rewards, values, discount=0.9, gae_lambda=1.0)
    assert whole.values[0].item() == pytest.approx(0.31)
    # lambda 0: one token only
    assert generalized_advantages(rewards, values, discount=0.9, gae_lambda=0.0).values[:3].tolist() == pytest.approx(
        [-0.14, 0.32, 0.2]
    )


TOKENS = st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(TOKENS, max_size=20), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_generalized_advantages_agree_with_a_loop_over_tokens(
    sequences: list[list[tuple[float, float]]], discount: float, gae_lambda: float
) -> None:
    expected = []
    for sequence in sequences:
        ahead, value_after, backwards = 0.0, 0.0, []
        for reward, value in reversed(sequence):
            ahead = reward + discount * value_after - value + discount * gae_lambda * ahead
            value_after = value
            backwards.append(ahead)
        expected += backwards[::-1]
    rewards, values = (floats(*([token[part] for token in sequence] for sequence in sequences)) for part in (0, 1))
    actual = generalized_advantages(rewards, values, discount=discount, gae_lambda=gae_lambda)
    assert actual.values.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_value_loss_is_clipped_where_a_value_has_moved_too_far() -> None:
    # old 1, return 2, clip 0.2. v 1.1: (1.1 - 2)^2 / 2 = 0.405, inside.  v 1.5: bounded to 1.2: 0.32 > 0.125, clipped.
    # v 0.5: bounded to 0.8, 0.72, but unclipped it is (0.5 - 2)^2 / 2 = 1.125, so the gradient stays.
    values = torch.tensor([1.1, 1.5, 0.5], requires_grad=True)
    old, returns = torch.ones(3), torch.full((3,), 2.0)
    loss = clipped_value_loss(values, old, returns, clip=0.2)
    assert loss.values.tolist() == pytest.approx([0.405, 0.32, 1.125])
    assert loss.clipped.tolist() == [False, True, False]
    loss.values.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])
    free = clipped_value_loss(values.detach(), old, returns, clip=None)
    assert free.values.tolist() == pytest.approx([0.405, 0.125, 1.125])
    assert not free.clipped.any()


def test_no_value_that_moved_by_less_than_the_bound_counts_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 10_000, generator=generator)
    moves = (torch.rand(10_000, generator=generator) - 0.5) * 0.39  # at most 0.195; old + (v - old) often rounds v
    loss = clipped_value_loss(old + moves, old, returns, clip=0.2)
    assert not loss.clipped.any()
    assert torch.equal(loss.values, (old + moves - returns).square() / 2)


def test_scores_are_scaled_then_clipped() -> None:
    scores = torch.tensor([-3.0, 0.5, 4.0])
    assert shaped_scores(scores).tolist() == [-3.0, 0.5, 4.0]
    assert shaped_scores(scores, scale=0.5, clip=1.0).tolist() == [-1.0, 0.25, 1.0]


def test_a_score_is_added_to_the_last_token_and_penalties_to_every_one() -> None:
    rewards = token_rewards(torch.tensor([1.0, 5.0, 2.0]), floats([0.1, -0.2], [], [0.5]))
    assert rewards.values.tolist() == pytest.approx([-0.1, 1.2, 1.5])
    assert sequence_sums(rewards).tolist() == pytest.approx([1.1, 0.0, 1.5])


@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=5))
def test_turns_end_at_the_last_token_of_each_run(masks: list[list[bool]]) -> None:
    mask = Ragged.from_list([torch.tensor(row, dtype=torch.bool) for row in masks])
    expected, place = [], -1
    for row in masks:
        own = []
        for index, chosen in enumerate(row):
            place += chosen
            if chosen and not (index + 1 < len(row) and row[index + 1]):
                own.append(place)
        expected.append(own)
    assert turn_ends(mask).to_lists() == expected


def test_whitened_values_have_mean_0_and_deviation_1_where_they_are_kept() -> None:
    # kept 1, 3, 5: mean 3, population variance 8/3, deviation 1.63299
    values = torch.tensor([1.0, 100.0, 3.0, 5.0])
    white = whiten(values, torch.tensor([True, False, True, True]))
    assert white.tolist() == pytest.approx([-2 / 1.63299, 0.0, 0.0, 2 / 1.63299], abs=1e-5)
    assert whiten(torch.full((3,), 7.0)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.tensor([2.0])).tolist() == [0.0]


def test_explained_variance_by_hand() -> None:
    # returns 1, 3: variance 1; errors 0.5, -0.5: variance 0.25
    returns = torch.tensor([1.0, 3.0])
    assert explained_variance(torch.tensor([0.5, 3.5]), returns).item() == pytest.approx(0.75)
    assert explained_variance(returns, returns).item() == 1.0
    assert explained_variance(torch.zeros(2), returns).item() == 0.0
    assert explained_variance(torch.zeros(2), torch.ones(2)).item() == 0.0
    assert explained_variance(torch.tensor([0.5, torch.nan]), returns).isnan()
    assert explained_variance(returns, torch.tensor([0.5, torch.nan])).isnan()


def test_without_scores_the_variance_is_nan_and_no_warning_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained_variance(torch.empty(0), torch.empty(0)).isnan().item()
