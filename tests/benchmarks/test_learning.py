"""Curves and targets of the learning benchmark, and equal data for both arms."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from benchmarks import learning
from benchmarks.harness import BenchmarkReport
from benchmarks.learning_arms import Curve, run
from benchmarks.learning_task import QUICK, Task, draw_rows, held_out, held_out_accuracy, response, save_model
from benchmarks.workload import share_of_vowels
from tests.workers import WorkerPool

TASK = Task(reward_to_reach=0.5, window=2)


def curve(*scores: float, seconds: float = 1.0, final: float = 0.0) -> Curve:
    """Return a curve whose steps all take ``seconds``."""
    times = tuple(seconds * (number + 1) for number in range(len(scores)))
    return Curve(scores, times, times, final)


def test_the_score_is_reached_when_the_mean_of_a_window_reaches_it() -> None:
    # Means of two: 0.45, 0.4, 0.6.
    assert curve(0.2, 0.7, 0.1, 1.1, seconds=2.0).seconds_to(0.6, window=2) == 8.0
    assert curve(0.2, 0.7, 0.1, 1.1).seconds_to(0.6, window=1) == 2.0
    assert curve(0.2, 0.7, 0.1, 1.1).seconds_to(0.61, window=2) is None
    assert curve(0.9).seconds_to(0.5, window=2) is None


def test_a_run_below_the_score_misses_and_all_seconds_of_trl_count_without_it() -> None:
    fast, slow, never = curve(0.5, 0.5), curve(0.5, 0.5, seconds=4.0), curve(0.1, 0.1, 0.1)
    curves = {"trl": [slow, fast, never, never], "realloc": [fast, never, fast, never]}
    assert learning.paired_shares(curves, 0.5, window=2) == [0.25, learning.NEVER, pytest.approx(2 / 3), learning.NEVER]


def test_final_scores_may_differ_by_noise_only() -> None:
    def filled(*finals: float) -> BenchmarkReport:
        runs = {"trl": [0.7, 0.8, 0.9], "realloc": list(finals)}
        curves = {arm: [curve(0.5, 0.5, final=final) for final in found] for arm, found in runs.items()}
        report = BenchmarkReport("learning")
        learning.fill(report, TASK, "grpo", curves)
        return report

    # Spread 0.1 in both arms: 2 * sqrt(2 * 0.01 / 3) = 0.163.
    final, seconds, reached = filled(0.6, 0.7, 0.8).targets
    assert (final.value, final.target, final.met) == (pytest.approx(0.7), pytest.approx(0.8 - 0.1633, abs=1e-3), True)
    assert (seconds.value, seconds.met) == (1.0, False)
    assert (reached.value, reached.met) == (1.0, True)
    assert not filled(0.5, 0.6, 0.7).targets[0].met
    assert learning.noise({"trl": [curve(0.0)] * 3, "realloc": [curve(0.0)] * 3}) == learning.LEAST_NOISE


def test_one_seed_has_no_targets() -> None:
    report = BenchmarkReport("learning")
    learning.fill(report, TASK, "grpo", {"trl": [curve(0.1)], "realloc": [curve(0.1)]})
    assert len(report.rows) == 2 and not report.targets


def test_chosen_responses_have_more_vowels_and_held_out_prompts_are_not_trained_on() -> None:
    task, rng = Task(), random.Random(0)
    learnt, kept = draw_rows(task, "dpo", 0), held_out(task)
    assert len(learnt) == 30 * 24 and len(kept) == 256
    for row in learnt:
        more, less = share_of_vowels([row["chosen"], row["rejected"]])
        assert more - less >= 0.25
    assert not {row["prompt"] for row in learnt} & {row["prompt"] for row in kept}
    assert draw_rows(task, "dpo", 0) == learnt != draw_rows(task, "dpo", 1)
    lengths = [len(response(task, rng)) for _ in range(2000)]
    # Geometric with mean 16, cut off at 63: the mean is 16 * (1 - (15/16)^63) = 15.7.
    assert 14.5 < sum(lengths) / 2000 < 17 and (min(lengths), max(lengths)) == (1, 63)


def train_both(folder: str) -> tuple[Curve, Curve, float]:
    """Train both families for three steps; return the curves and the accuracy of unchanged weights."""
    save_model(QUICK, folder, seed=0)
    from transformers import AutoModelForCausalLM

    unchanged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    accuracy = held_out_accuracy(QUICK, folder, unchanged)
    return run("realloc", "grpo", QUICK, folder, 0), run("realloc", "dpo", QUICK, folder, 0), accuracy


@pytest.mark.exhaustive  # of a benchmark alone
def test_our_arm_trains_both_families(workers: WorkerPool, tmp_path: object) -> None:
    ((grpo, dpo, accuracy),) = workers.run(
        train_both, str(tmp_path), world_size=1, init_process_group=False, deadline_s=120.0
    )
    assert len(grpo.scores) == len(dpo.cpu_s) == 3
    assert 0 <= dpo.final <= 1 and accuracy == 0.0  # no response has a higher score
    assert list(grpo.cpu_s) == sorted(grpo.cpu_s) and grpo.wall_s[-1] > 0


def test_without_trl_the_benchmark_ends_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert learning.main([]) == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err
