"""Accuracy and pass@k, compared with counts by hand."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Any

import pytest
import torch

from lightning_realloc.algorithms.distillation import OnPolicyDistillation
from lightning_realloc.algorithms.rollout.accuracy import Accuracy, pass_at_k
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from tests.models import tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool


@pytest.mark.parametrize(("n", "num_right"), [(1, 0), (1, 1), (4, 0), (5, 2), (6, 1), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(n: int, num_right: int) -> None:
    responses = [index < num_right for index in range(n)]
    for k in range(1, n + 1):
        draws = [any(draw) for draw in combinations(responses, k)]
        assert pass_at_k(n, num_right, k) == pytest.approx(sum(draws) / len(draws))


def judged(rewards: list[float], **columns: torch.Tensor) -> Samples:
    """Return four responses to each of two prompts."""
    prompts = torch.tensor([0, 1]).repeat_interleave(4)
    return Samples(torch.arange(8), {"prompt_id": prompts, "rewards": torch.tensor(rewards), **columns})


def test_prompts_count_alike_and_responses_without_a_reward_do_not_count() -> None:
    nan = math.nan
    samples = judged([1.0, 0.4, 0.0, 0.0, 1.0, 1.0, nan, 0.9])
    summary = {name: float(value) for name, value in Accuracy().summary(samples, "rewards").items()}
    # One of 4 and two of 3: 3 of 7. Two of 4 miss the right one in 3 of 6 draws; two of 3 never miss both.
    # The second prompt has no four responses.
    assert summary == pytest.approx({"accuracy": 3 / 7, "pass@2": (0.5 + 1.0) / 2, "pass@4": 1.0})
    lenient = Accuracy(threshold=0.4, ks=(1,)).summary(samples, "rewards")
    assert {name: float(value) for name, value in lenient.items()} == pytest.approx({"accuracy": 5 / 7, "pass@1": 0.75})
    assert Accuracy().summary(judged([nan] * 8), "rewards") == {}


def test_a_named_reward_function_decides_which_responses_are_right() -> None:
    columns = {"reward/right": torch.ones(8), "reward/short": torch.zeros(8)}
    found = Accuracy(function="right").summary(judged([0.5] * 8, **columns), "rewards")
    assert float(found["accuracy"]) == 1.0
    with pytest.raises(ConfigError, match=r"function='rihgt' must be one of the reward functions \(right, short\)"):
        Accuracy(function="rihgt").summary(judged([0.5] * 8, **columns), "rewards")


def test_invalid_settings_are_refused() -> None:
    wrong: Any
    for wrong in (math.nan, "high", None, True):
        with pytest.raises(ConfigError, match=f"threshold={wrong!r} must be a finite number"):
            Accuracy(threshold=wrong)
    for wrong in ((0,), (), (1.5,), 4, ("1",)):
        with pytest.raises(ConfigError, match=rf"ks={re.escape(repr(wrong))} must hold numbers of responses"):
            Accuracy(ks=wrong)
    assert Accuracy(threshold=1, ks=[1, 4]).ks == [1, 4]  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ConfigError, match=r"pass@4 needs as many responses per prompt, and evaluation_sampling.n=1"):
        runs.grpo(accuracy=Accuracy(ks=(4,)))
    with pytest.raises(ConfigError, match="OnPolicyDistillation has no rewards"):
        OnPolicyDistillation(tiny_model("llama"), tiny_model("llama"), accuracy=Accuracy())


def evaluate(algorithm: str) -> list[dict[str, float]]:
    """Return the validation metrics on held-out prompts, four responses each, and the names that training logs."""
    world_size = runs.world_size()
    sampling = SamplingParams(n=4, max_new_tokens=6, stop_token_ids=runs.SAMPLING.stop_token_ids)
    module = getattr(runs, algorithm)(evaluation_sampling=sampling, accuracy=Accuracy(threshold=0.5))
    trainer = runs.trainer("realloc", world_size)
    (validated,) = trainer.validate(module, runs.Batches(1, size=3), verbose=False)
    trainer.fit(module, runs.Batches(1))
    rewards = torch.tensor(module.rewards[0]).view(3, 4)
    right = (rewards >= 0.5).sum(1).tolist()
    expected = {
        "val/accuracy": sum(right) / 12,
        "val/pass@2": sum(pass_at_k(4, count, 2) for count in right) / 3,
        "val/pass@4": sum(count > 0 for count in right) / 3,
    }
    return [
        {name: validated[name] for name in expected},
        expected,
        {n: 0.0 for n in trainer.logged_metrics if "@" in n},
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_validation_logs_accuracy_and_pass_at_k_on_every_rank(workers: WorkerPool, algorithm: str) -> None:
    for found, expected, trained in workers.run(evaluate, algorithm, world_size=2, init_process_group=False):
        assert found == pytest.approx(expected)
        assert 0.0 < expected["val/accuracy"] < 1.0
        assert trained == {}
