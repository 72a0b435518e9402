"""Equal tokens in all arms of the benchmark of waiting, and its row and targets."""

from __future__ import annotations

from benchmarks.harness import BenchmarkReport
from benchmarks.waiting import ARMS, Workload, draw_episodes, run


def test_all_arms_generate_the_same_tokens_and_have_a_row() -> None:
    report = BenchmarkReport("waiting")
    run(Workload(samples=4, slots=1, step_s=0.0, tokens=(2, 6), waits=(0.0, 0.01), turns=1), report)
    assert [row["arm"] for row in report.rows] == list(ARMS)
    assert report.rows[0]["ratio"] == 1.0 and all(0 < row["busy"] <= 1 for row in report.rows)
    assert report.targets[-1].name == "responses with other tokens" and report.targets[-1].met


def test_the_same_seed_draws_the_same_episodes() -> None:
    assert draw_episodes(Workload()) == draw_episodes(Workload()) != draw_episodes(Workload(seed=2))
    assert all(len(episode.turns) == len(episode.waits) + 1 for episode in draw_episodes(Workload()))
