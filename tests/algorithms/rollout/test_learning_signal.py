"""Metrics of the learning signal by hand, and one warning after iterations without any."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import pytest
import torch

from lightning_realloc.algorithms.rollout.learning_signal import (
    FLAT_ITERATIONS_BEFORE_WARNING,
    SignalWatch,
    signal_summary,
)
from lightning_realloc.batch.samples import Samples
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

NAN = math.nan


def test_the_spread_of_rewards_is_that_of_all_and_of_each_group() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 2.0, NAN, 3.0]), torch.tensor([4, 4, 5, 5, 6, 6])
    found = signal_summary(rewards, groups, name="reward")
    # Without NaN 1, 1, 0, 2, 3: the mean is 1.4, and the squares 0.16, 0.16, 1.96, 0.36 and 2.56 sum to 5.2.
    assert float(found["reward_std"]) == pytest.approx(math.sqrt(5.2 / 4))
    assert float(found["frac_reward_zero_std"]) == pytest.approx(2 / 3)  # the first group, and that of a single reward
    for others in (torch.arange(6), None):
        assert signal_summary(rewards, others, name="score").keys() == {"score_std"}
    assert float(signal_summary(torch.tensor([NAN, 1.0]), groups[:2], name="reward")["reward_std"]) == 0.0


def record(watch: SignalWatch, signals: Sequence[bool]) -> list[str]:
    """Return the warnings of iterations with and without a signal."""
    samples = Samples(torch.arange(4), {"finish_reason": torch.tensor([0, 0, 0, 1])})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for has_signal in signals:
            watch.record(samples, torch.full((4,), 0.5), has_signal=has_signal)
    return [str(one.message) for one in caught]


def test_a_run_warns_once_of_iterations_in_a_row_without_a_signal() -> None:
    flat = [False] * FLAT_ITERATIONS_BEFORE_WARNING
    assert record(SignalWatch(), [*flat[1:], True, *flat[1:]]) == []
    watch = SignalWatch()
    (text,) = record(watch, [True, *flat])
    assert f"rewards gave no signal in the last {FLAT_ITERATIONS_BEFORE_WARNING} iterations" in text
    assert "the mean is 0.5" in text and "25% reached max_new_tokens" in text
    assert record(watch, [True, *flat, *flat]) == []


def same_for_all(completions: Sequence[str], **columns: object) -> list[float]:
    """Return one reward for all."""
    return [1.0] * len(completions)


def train_on_one_reward() -> tuple[list[str], list[dict[str, float]]]:
    """Return the warnings and metrics of GRPO on a constant reward."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = runs.train(runs.grpo(reward=same_for_all), "heuristic", 1, Batches(6, size=2))
    return [str(one.message) for one in caught if "gave no signal" in str(one.message)], outcome.logged


def test_equal_rewards_are_measured_and_warned_of(workers: WorkerPool) -> None:
    ((found, logged),) = workers.run(train_on_one_reward, world_size=1, init_process_group=False)
    assert len(found) == 1
    for metrics in logged:
        assert (metrics["reward_std"], metrics["frac_reward_zero_std"]) == (0.0, 1.0)
        assert metrics["response_length/min"] <= metrics["response_length"] <= metrics["response_length/max"]
        assert metrics["stopped/length"] == pytest.approx(1.0 - metrics["stopped/model"])
        # The vocabulary has 128 tokens, and a model with random weights knows little of the next one.
        assert 0.5 * math.log(128) < metrics["actor/entropy"] < 1.5 * math.log(128)
