"""Merged measurements of the benchmark of fused inference, and a tiny run of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fusion import JUDGED, TINY, WHOLE, Readings, Turn, fill, loss_difference, merge, run_arm
from benchmarks.harness import BenchmarkReport
from tests.workers import WorkerPool

TURN = Turn(seconds=4.0, infer_s=2.0, hidden_s=0.0, idle_share=0.5, losses=(0.5, 100.0), tokens=((1, 2), (3,)))


def test_seconds_per_iteration_are_those_of_the_slowest_rank() -> None:
    first = Readings(seconds=8.0, idle_s=2.0, hidden_s=1.0, losses=[0.5, 2.0], tokens=[[1], [2, 3]])
    second = Readings(seconds=10.0, idle_s=5.0, hidden_s=1.0, infer_s=3.0, losses=[0.5, 2.0])
    expected = Turn(
        seconds=5.0, infer_s=1.5, hidden_s=0.5, idle_share=(0.25 + 0.5) / 2, losses=(0.5, 2.0), tokens=((1,), (2, 3))
    )
    assert merge([first, second], 2) == expected


def test_losses_are_compared_relatively_and_missed_targets_reported() -> None:
    near = replace(TURN, losses=(0.5 + 2**-20, 100.0 + 2**-17), seconds=5.0, hidden_s=1.0)
    assert loss_difference(near, TURN) == 2**-20  # relative to 0.5; relative to 100 it is 2**-17 / 100
    report = BenchmarkReport("fusion")
    fill(report, {WHOLE: [TURN], JUDGED: [near]})
    assert [row["over_whole"] for row in report.rows] == [1.0, 0.8]
    assert [target.met for target in report.targets] == [False, True, True]
    tipped = replace(near, tokens=((1, 2), (4,)), losses=(0.5, 1.0))
    report = BenchmarkReport("fusion")
    fill(report, {WHOLE: [TURN, TURN], JUDGED: [near, tipped]})
    assert report.rows[1]["same"] == 0.5
    assert [target.met for target in report.targets] == [False, True, False]  # only losses of equal tokens count


def run_tiny() -> tuple[Turn, Turn]:
    """Run the arms that have targets."""
    return run_arm(WHOLE, TINY), run_arm(JUDGED, TINY)


@pytest.mark.exhaustive
def test_a_tiny_run_hides_inference_and_trains_the_same(workers: WorkerPool) -> None:
    for _ in range(6):  # on shared cores, the second rank may start to read only after all samples are generated
        whole, parts = workers.run(run_tiny, world_size=2, deadline_s=60.0)[0]
        assert whole.tokens == parts.tokens
        assert loss_difference(parts, whole) <= 1e-5
        assert pytest.approx(0.5, abs=0.5) == parts.idle_share
        if parts.hidden_s:
            break
    assert whole.hidden_s == 0.0 < parts.hidden_s < parts.infer_s
