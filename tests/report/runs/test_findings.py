from __future__ import annotations

import numpy as np
import pytest

from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.sections.findings import find_unusual
from lightning_realloc.report.runs.sections.learning import learning_section
from tests.report.runs.folders import run_with

RNG = np.random.default_rng(1)
NOISE = RNG.normal(0, 0.05, 200)
RISING = np.linspace(0.1, 0.6, 200) + NOISE


def _names(run: RunFolder) -> set[str]:
    return {one["id"] for one in find_unusual(run)}


def test_a_healthy_run_has_no_warning() -> None:
    run = run_with(
        reward=RISING,
        actor__kl=np.linspace(0, 0.03, 200),
        actor__entropy=np.linspace(1.2, 0.5, 200),
        actor__grad_norm=1 + NOISE,
        actor__skipped_steps=[1.0, 1.0] + [0.0] * 198,  # a loss scale that settles
        response_length=np.linspace(100, 300, 200),  # longer, but the reward rises
        frac_reward_zero_std=np.full(200, 0.3),
        **{"stopped/length": np.full(200, 0.05)},
    )

    assert _names(run) == set()
    assert "Nothing unusual" in learning_section(run)["sentences"][0]


@pytest.mark.parametrize("seed", range(20))
def test_short_noisy_runs_have_no_warning(seed: int) -> None:
    rng = np.random.default_rng(seed)
    run = run_with(
        reward=rng.normal(0.3, 0.3, 25),
        actor__kl=np.abs(rng.normal(0.1, 0.2, 25)),
        response_length=rng.uniform(10, 500, 25),
        **{"stopped/length": rng.uniform(0, 1, 25)},
        frac_reward_zero_std=rng.uniform(0, 1, 25),
    )

    assert _names(run) == set()


def test_a_rising_reward_is_flat_or_falling_in_hardly_any_of_many_noisy_runs() -> None:
    rng = np.random.default_rng(0)
    runs = [run_with(reward=np.linspace(0.2, 0.3, 150) + rng.normal(0, 0.05, 150)) for _ in range(100)]

    assert sum(bool(_names(run)) for run in runs) <= 2


@pytest.mark.parametrize(
    ("expected", "metrics"),
    [
        ("reward-flat", {"reward": 0.2 + NOISE}),
        ("reward-flat", {"reward": [0.0] * 200}),
        ("reward-falls", {"reward": RISING[::-1]}),
        ("entropy-collapse", {"actor__entropy": np.linspace(1.0, 0.01, 200)}),
        ("kl-runaway", {"actor__kl": np.exp(np.linspace(-7, 1, 200))}),
        ("kl-runaway", {"kl_k3": 100 * np.exp(np.linspace(-7, 1, 200)), "response_length": [100.0] * 200}),
        ("skipped-steps", {"actor__skipped_steps": [0.0, 1.0] * 100}),
        ("equal-groups", {"frac_reward_zero_std": np.linspace(0.2, 0.95, 200)}),
        ("truncated", {"stopped/length": [0.5] * 200}),
        ("length-explosion", {"reward": 0.2 + NOISE, "response_length": np.linspace(100, 900, 200)}),
        ("length-collapse", {"reward": 0.2 + NOISE, "response_length": np.linspace(100, 3, 200)}),
        ("kl-far", {"actor__kl": [2.0] * 200}),
        ("not-finite", {"actor__loss": [0.1] * 100 + [float("nan")] * 100}),
        ("failed-rewards", {"reward_failures__judge": [0.2] * 200}),
    ],
)
def test_every_warning_applies_to_a_run_that_deserves_it(expected: str, metrics: dict[str, list[float]]) -> None:
    found = {one["id"]: one for one in find_unusual(run_with(**metrics))}

    assert expected in found
    assert found[expected]["advice"]


def test_a_short_run_is_not_called_healthy_and_large_shares_count_early() -> None:
    short = {"reward": [0.1] * 6, "actor__loss": [0.1] * 6}
    (unknown,) = learning_section(run_with(**short))["sentences"]
    assert unknown == "Too short to judge: most warnings need 30 iterations, and this run has 6 iterations."

    shares = {"stopped/length": [0.62, 0.7, 0.65, 0.62, 0.66, 0.7], "frac_reward_zero_std": [1.0] * 6}
    truncated = run_with(**short, **shares)
    found = {one["id"]: one["text"] for one in find_unusual(truncated)}
    assert set(found) == {"truncated", "equal-groups"}
    assert found["truncated"].startswith("62 % of the responses (or more) in each of 6 iterations reach max_new_tokens")
    assert _names(run_with(**short, **{"stopped/length": [0.7, 0.7, 0.7, 0.2, 0.7, 0.7]})) == set()
    assert _names(run_with(**{"stopped/length": [0.7, 0.7]})) == set()


def test_shorter_responses_of_a_learning_actor_get_no_warning() -> None:
    assert _names(run_with(reward=RISING, response_length=np.linspace(100, 3, 200))) == set()


def test_a_score_counts_for_more_than_a_reward_whose_penalty_shrinks() -> None:
    assert "reward-flat" in _names(run_with(reward=RISING, score=0.2 + NOISE))


def test_a_warning_gives_its_numbers() -> None:
    (found,) = find_unusual(run_with(frac_reward_zero_std=[0.875] * 50))

    assert "87.5 %" in found["text"]


def test_a_flat_reward_of_solved_prompts_gets_the_warning_about_groups_alone() -> None:
    run = run_with(reward=0.95 + NOISE / 10, frac_reward_zero_std=[0.9] * 200)

    assert _names(run) == {"equal-groups"}
