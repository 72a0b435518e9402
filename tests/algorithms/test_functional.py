"""Losses against hand-worked numbers and naive loops."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.algorithms.functional import (
    KLEstimator,
    clipped_policy_loss,
    cross_entropy,
    group_advantages,
    kl_estimate,
    masked_sum,
    sequence_mean_sum,
)

REWARDS = st.floats(-5, 5, width=32)


def test_cross_entropy_is_minus_the_logprob_of_kept_tokens() -> None:
    # -log(1/2) = ln 2, -log(1/4) = 2 ln 2; the first token is not kept
    values = cross_entropy(torch.tensor([0.5, 0.5, 0.25]).log(), torch.tensor([False, True, True]))
    assert values.tolist() == pytest.approx([0.0, math.log(2), 2 * math.log(2)])


def test_group_advantages_are_standard_scores_within_the_group() -> None:
    # group 7: rewards 1, 0, 1, 0: mean 1/2, squares 4 * 1/4 = 1, unbiased variance 1/3, std 0.57735;
    #          (1 - 1/2) / 0.57735 = 0.86603
    # group 2: rewards 3, 5: mean 4, squares 1 + 1 = 2, variance 2/1, std 1.41421; -1 / 1.41421 = -0.70711
    rewards = torch.tensor([1.0, 3.0, 0.0, 1.0, 5.0, 0.0])
    groups = torch.tensor([7, 2, 7, 7, 2, 7])
    advantages = group_advantages(rewards, groups, std_eps=0.0)
    assert advantages.tolist() == pytest.approx([0.86603, -0.70711, -0.86603, 0.86603, 0.70711, -0.86603], abs=1e-5)
    assert group_advantages(rewards, groups, std_eps=None).tolist() == [0.5, -1.0, -0.5, 0.5, 1.0, -0.5]
    # 0.5 / (0.57735 + 0.1) = 0.73817
    assert group_advantages(rewards, groups, std_eps=0.1)[0].item() == pytest.approx(0.73817, abs=1e-5)


def test_a_group_that_agrees_and_a_group_of_one_have_no_advantage() -> None:
    advantages = group_advantages(torch.tensor([2.0, 2.0, 9.0]), torch.tensor([0, 0, 1]))
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=12))
def test_group_advantages_agree_with_a_loop_over_groups(samples: list[tuple[float, int]]) -> None:
    members = defaultdict(list)
    for reward, group in samples:
        members[group].append(reward)
    expected = []
    for reward, group in samples:
        deviation = statistics.stdev(members[group]) if len(members[group]) > 1 else 0.0
        expected.append((reward - statistics.fmean(members[group])) / (deviation + 0.01))
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    actual = group_advantages(rewards, torch.tensor([group for _, group in samples]), std_eps=0.01)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_policy_loss_is_clipped_only_where_that_is_pessimistic() -> None:
    # ratio 1.5, A = +2: min(3.0, 1.2 * 2 = 2.4) = 2.4, clipped;  A = -2: min(-3.0, -2.4) = -3.0, not
    # ratio 0.5, A = +2: min(1.0, 0.8 * 2 = 1.6) = 1.0, not;      A = -2: min(-1.0, -1.6) = -1.6, clipped
    # ratio 1.1 lies inside either way: 1.1 * 2 = 2.2
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    behaviour = torch.full((5,), -1.0)
    logprobs = (behaviour + ratio.log()).requires_grad_()
    loss = clipped_policy_loss(logprobs, behaviour, torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0]))
    assert loss.values.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -2.2])
    assert loss.clipped.tolist() == [True, False, False, True, False]
    # the gradient of -ratio * A by log p is -ratio * A itself; none where clipped
    (gradient,) = torch.autograd.grad(loss.values.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.2])


def test_the_two_clip_bounds_are_set_apart() -> None:
    # ratio 1.5 with A = 1: clipped at 1.28; ratio 0.5 with A = -1: clipped at 0.9
    logprobs = torch.tensor([1.5, 0.5]).log()
    loss = clipped_policy_loss(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.1, clip_high=0.28)
    assert loss.values.tolist() == pytest.approx([-1.28, 0.9])


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


def test_sums_ignore_whatever_is_masked() -> None:
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
