"""Rewards of turns, credited to the turns' last tokens."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from lightning_realloc.algorithms.losses.advantages import turn_advantages
from lightning_realloc.algorithms.losses.controllers import RunningMoments
from lightning_realloc.algorithms.rollout.token_advantages import GAE, placed_rewards, token_returns
from lightning_realloc.batch.samples import Ragged, Samples


def conversations() -> Samples:
    """Return a response with turns of two tokens and one, an answer of two between them, and one that was cut off."""
    mask = Ragged.from_list([torch.tensor([1, 1, 0, 0, 1]).bool(), torch.tensor([1, 1]).bool()])
    logprobs = Ragged.from_list([[-1.0, -2.0, 0.0, 0.0, -3.0], [-1.0, -1.0]], dtype=torch.float32)
    return Samples(
        torch.tensor([4, 7]),
        {
            "response_ids": Ragged.from_list([[1, 2, 3, 4, 5], [6, 7]]),
            "behaviour_logprobs": logprobs,
            "model_mask": mask,
            "record/turn_rewards": Ragged.from_list([[0.5, -1.0], []], dtype=torch.float32),
            "values": Ragged.from_list([[0.0] * 5, [0.0] * 2], dtype=torch.float32),
            "scores": torch.tensor([1.5, 2.0]),
        },
    )


def test_a_turns_reward_is_at_its_last_token_and_the_rest_at_the_end() -> None:
    samples = conversations()
    penalties = Ragged(torch.tensor([0.1, 0.0, 0.0, 0.0, 0.0]), torch.tensor([3, 2]))
    rewards = placed_rewards(samples, samples.tensor("scores"), penalties)
    # 1.5 = 0.5 (first turn) - 1.0 (second turn) + 2.0 of functions, at the end
    assert rewards.values.tolist() == pytest.approx([-0.1, 0.5, 1.0, 0.0, 2.0])


def test_returns_and_advantages_discount_from_the_turn_that_earned_a_reward() -> None:
    samples = conversations()
    returns, _ = token_returns(samples, samples.tensor("scores"), discount=0.5, penalty=None)
    # backwards: 1; 0.5 + 0.5 * 1 = 1; 0.5 * 1 = 0.5
    assert returns.values.tolist() == pytest.approx([0.5, 1.0, 1.0, 1.0, 2.0])
    gae = GAE(discount=0.5, gae_lambda=1.0, normalize_advantages=False, reward_scale=2.0)
    columns = gae.estimate(samples, moments=RunningMoments(), has_reference=False, penalty=None)
    advantages = columns["advantages"]
    assert isinstance(advantages, Ragged)
    assert advantages.values.tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0, 2.0, 2.0, 4.0])
    sums = columns["rewards"]
    assert isinstance(sums, torch.Tensor) and math.isclose(float(sums.sum()), 2 * 3.5)


def test_advantages_of_turns_are_those_of_a_naive_loop() -> None:
    # Two groups; turns of the model are runs of 1. The rest of a response's reward is its last turn's.
    masks = [[1, 1, 0, 1], [1], [1, 0, 0, 1, 0, 1], [1, 1], [], [1, 0, 1]]
    own = [[0.5], [], [1.0, -1.0, 0.5], [2.0], [], [0.25, 0.25]]
    totals, groups = [1.5, 0.0, 1.0, 2.0, 3.0, math.nan], [3, 3, 3, 8, 8, 8]
    samples = Samples(
        torch.arange(6),
        {
            "prompt_id": torch.tensor(groups),
            "rewards": torch.tensor(totals),
            "response_ids": Ragged.from_list([[0] * len(mask) for mask in masks]),
            "model_mask": Ragged.from_list([torch.tensor(mask).bool() for mask in masks]),
            "record/turn_rewards": Ragged.from_list(own, dtype=torch.float32),
        },
    )
    by_turn = [[0.5, 1.0], [0.0], [1.0, -1.0, 1.0], [2.0], [], [math.nan, math.nan]]
    found = turn_advantages(samples)
    for row, mask in enumerate(masks):
        pool = [x for turns, group in zip(by_turn, groups, strict=True) if group == groups[row] for x in turns]
        pool = [x for x in pool if not math.isnan(x)]
        scale = 1e-4 + (statistics.stdev(pool) if len(pool) > 1 else 0.0)
        standard = [(x - statistics.mean(pool)) / scale for x in by_turn[row]]
        turn, expected, before = -1, [], 0
        for chosen in mask:
            turn += chosen and not before
            expected.append(sum(standard[turn:]) if chosen else 0.0)
            before = chosen
        assert found.to_lists()[row] == pytest.approx(expected, abs=1e-5, nan_ok=True)
