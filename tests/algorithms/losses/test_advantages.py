"""Advantages of responses against hand-worked numbers and naive loops."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.algorithms.losses.advantages import (
    ADVANTAGES,
    each_reward_advantages,
    group_advantages,
    leave_one_out_advantages,
)
from lightning_realloc.algorithms.losses.functional import whiten
from lightning_realloc.batch.samples import Ragged, Samples

REWARDS = st.floats(-5, 5, width=32)


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


def test_advantages_of_huge_rewards_are_those_of_small_ones() -> None:
    # Their squares overflow float32, and a deviation of infinity would leave nothing to learn.
    groups, rewards = torch.tensor([0, 0, 0, 0]), torch.tensor([1.0, 2.0, 4.0, 5.0])
    small, huge = (group_advantages(rewards * scale, groups, std_eps=0.0) for scale in (1.0, 1e30))
    assert huge.tolist() == pytest.approx(small.tolist(), rel=1e-5)
    assert whiten(rewards * 1e30).tolist() == pytest.approx(whiten(rewards).tolist(), rel=1e-5)


def test_groups_of_equal_rewards_and_groups_of_one_have_no_advantage() -> None:
    advantages = group_advantages(torch.tensor([2.0, 2.0, 9.0]), torch.tensor([0, 0, 1]))
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_each_reward_is_standardized_by_itself(penalty: float) -> None:
    """A loop in the order of TRL's ``normalize_then_sum``; a penalty that is no function's is one more reward."""
    groups, weights = [4, 4, 4, 9, 9, 9], {"big": 1.0, "small": 0.5}
    each = {"big": [100.0, 0.0, 50.0, 30.0, 30.0, 90.0], "small": [0.0, 1.0, 0.5, math.nan, 0.25, 1.0]}
    penalties = [-penalty, 0.0, 0.0, -penalty, 0.0, 0.0]
    total = [
        sum(weights[name] * (0.0 if math.isnan(row[place]) else row[place]) for name, row in each.items()) + extra
        for place, extra in enumerate(penalties)
    ]

    def standardized(row: list[float], places: list[int]) -> dict[int, float]:
        known = [place for place in places if not math.isnan(row[place])]
        values = [row[place] for place in known]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        return {place: (row[place] - mean) / (deviation + 1e-4) for place in known}

    rows = [(each[name], weights[name]) for name in each] + ([(penalties, 1.0)] if penalty else [])
    sums = [0.0] * len(groups)
    for row, weight in rows:
        for group in set(groups):
            for place, value in standardized(row, [i for i, g in enumerate(groups) if g == group]).items():
                sums[place] += weight * value
    expected = standardized(sums, list(range(len(groups))))
    columns = {f"reward/{name}": torch.tensor(row) for name, row in each.items()}
    samples = Samples(torch.arange(6), {"rewards": torch.tensor(total), "prompt_id": torch.tensor(groups), **columns})
    found = each_reward_advantages(samples, weights=weights)
    assert found.tolist() == pytest.approx([expected[place] for place in range(len(groups))], abs=1e-4)
    without_one = samples.with_columns(rewards=torch.tensor([math.nan, *total[1:]]))
    missing = each_reward_advantages(without_one, weights=weights)
    assert missing.isnan().tolist() == [True, False, False, False, False, False]


def test_a_missing_reward_is_left_out_of_its_group() -> None:
    # group 0: rewards 1 and 3 are left: mean 2, unbiased variance 2, -1 / 1.41421; group 1: one is left: no advantage;
    # group 2: nothing is left
    rewards = torch.tensor([1.0, math.nan, 3.0, 5.0, math.nan, math.nan])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    advantages = group_advantages(rewards, groups, std_eps=0.0)
    assert advantages[[0, 2]].tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-5)
    assert group_advantages(rewards, groups)[3].item() == 0.0
    assert advantages.isnan().tolist() == [False, True, False, True, True, True]  # 0 / 0 where one is left, as before
    assert group_advantages(rewards, groups, std_eps=None).nan_to_num(nan=9.0).tolist() == [
        -1.0,
        9.0,
        1.0,
        0.0,
        9.0,
        9.0,
    ]


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


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, math.nan, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; one of a pair is missing; one alone
    found = leave_one_out_advantages(rewards, groups)
    assert found[[0, 1, 2, 3, 5]].tolist() == pytest.approx([-3.0, -1.5, 4.5, 0.0, 0.0])
    assert found[4].isnan()


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"group_each"}))  # which also compares over the batch
def test_every_rule_compares_within_groups_and_leaves_missing_rewards_out(name: str) -> None:
    def rule(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Return the advantages of responses of one turn, and one token."""
        tokens = Ragged.from_list([[0]] * len(rewards))
        columns = {"rewards": rewards, "prompt_id": groups, "response_ids": tokens}
        made = ADVANTAGES[name](Samples(torch.arange(len(rewards)), columns))
        values: torch.Tensor = made.values if isinstance(made, Ragged) else made
        return values

    rewards = torch.tensor([1.0, 4.0, 2.0, math.nan, 2.0, 2.0, 9.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    found = rule(rewards, groups)
    assert found.dtype == rewards.dtype and found.isnan().tolist() == [False] * 3 + [True] + [False] * 3
    assert found[1] > found[2] > found[0], "better responses have larger advantages"
    assert found[4:].tolist() == [0.0, 0.0, 0.0], "equal rewards, and a group of one"
    assert torch.equal(rule(rewards[[0, 1, 2]], groups[[0, 1, 2]]), found[[0, 1, 2]]), "as without the missing one"
    assert torch.allclose(rule(rewards + 3.0, groups), found, equal_nan=True), "rewards have no origin"
