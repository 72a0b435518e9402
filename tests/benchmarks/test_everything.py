"""Comparison of both arms in `benchmarks.everything`, and a tiny run of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.everything import OFF, ON, QUICK, Readings, Run, compare, fill, merge, run_arm
from benchmarks.harness import BenchmarkReport
from benchmarks.speculative_models import RECIPES, train
from tests.workers import WorkerPool

RUN = Run(
    rewards=(0.25, 0.5), tokens=({0: (5, 6), 1: (7,)}, {2: (5,), 3: ()}), seconds=4.0, generate_s=2.0, moved=0,
    accepted=0, tokens_per_step=1.0, weights="ab",
)  # fmt: skip
TINY = replace(QUICK, num_prompts=2, new_tokens=12)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    first = Readings([0.25, 0.5], [{0: (5, 6)}, {2: (5,)}], [1.0, 3.0], [0.5, 1.0], moved=0, generated=4, row_steps=4)
    second = Readings([0.25, 0.5], [{1: (7,)}, {3: ()}], [1.0, 2.0], [1.0, 1.0], moved=0, generated=0, weights="")
    first.weights = "ab"
    assert merge([first, second]) == RUN


def test_tokens_accepted_by_ranks_in_tensor_parallelism_count_once() -> None:
    ranks = [Readings([0.25], [{0: (5, 6), 1: (7,)}], [1.0], [0.5], accepted=2, weights="ab") for _ in range(2)]
    assert merge(ranks).accepted == 2
    ranks[1].tokens = [{2: (5, 6), 3: (7,)}]
    assert merge(ranks).accepted == 4


def test_the_first_difference_is_found_in_tokens_then_rewards_then_weights() -> None:
    assert compare(RUN, RUN) is None
    assert compare(replace(RUN, weights="cd"), RUN) == "weights alone, at the end"
    other = replace(RUN, rewards=(0.25, 0.5 + 2**-53), weights="cd")  # the next float
    assert compare(other, RUN) == "iteration 2, reward 0.5000000000000001 and 0.5"
    shorter = replace(other, tokens=({0: (5, 6), 1: (7,)}, {2: (), 3: ()}))
    assert compare(shorter, RUN) == "iteration 2, tokens of sample 2"


def test_a_run_with_other_results_misses_only_the_target_of_equality() -> None:
    report = BenchmarkReport("everything")
    fill(report, {OFF: [RUN, RUN], ON: [replace(RUN, seconds=2.0), replace(RUN, seconds=2.0, weights="cd")]}, ranks=2)
    assert [row["off_over"] for row in report.rows] == [1.0, 2.0]
    assert [row["difference"] for row in report.rows] == ["none", "weights alone, at the end"]
    assert [(target.value, target.met) for target in report.targets] == [(0.75, False), (2.0, True)]


def run_tiny() -> tuple[Run, Run]:
    """Run both arms on this rank."""
    model, _ = train(replace(RECIPES["draft"], steps=2))
    return run_arm(OFF, model, TINY), run_arm(ON, model, TINY)


@pytest.mark.exhaustive  # of a benchmark alone
def test_a_tiny_run_is_the_same_in_both_arms_and_changes_the_weights(workers: WorkerPool) -> None:
    (off, on), _ = workers.run(run_tiny, world_size=2, deadline_s=120.0)
    assert compare(on, off) is None
    assert len(off.rewards) == TINY.iterations == 2
    assert off.num_tokens == sum(map(len, off.tokens[0].values())) + sum(map(len, off.tokens[1].values()))
    assert set(off.tokens[0]) != set(off.tokens[1])  # samples of another epoch have other ids
