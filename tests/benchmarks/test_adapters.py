"""Targets of the adapter benchmark, and tiny runs of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.adapters import ARMS, PRECISIONS, TINY, Turn, fill, losses_apart, run_arm
from benchmarks.harness import BenchmarkReport
from tests.workers import WorkerPool

TURN = Turn(trained_bytes=100, moved=(1100, 100, 101), held=(500, 500), home=(200, 200))


def test_bytes_beyond_the_adapters_and_a_second_base_miss_targets() -> None:
    turns = {(name, precision): TURN for name in ARMS for precision in PRECISIONS}
    turns["lora", "bf16-mixed"] = replace(TURN, held=(501, 500), home=(100, 100))
    turns["dora", "32-true"] = replace(TURN, moved=(1100, 100, 103))
    report = BenchmarkReport("adapters")
    fill(report, turns)
    missed = [target.name for target in report.targets if not target.met]
    assert missed == [
        "dora, 32-true: bytes of an iteration after the first over the adapters'",
        "bf16-mixed: weights with a reference over those without",
    ]


def run_tiny() -> tuple[Turn, Turn]:
    """Run the arms that have targets."""
    return run_arm("lora", "32-true", TINY), run_arm("lora, no reference", "bf16-mixed", TINY)


@pytest.mark.exhaustive
def test_a_tiny_run_reallocates_adapters_alone(workers: WorkerPool) -> None:
    shared, half = workers.run(run_tiny, world_size=2, deadline_s=90.0)[0]
    assert shared.moved[1:] == (shared.trained_bytes, shared.trained_bytes) < shared.moved[:2]
    assert sum(half.home) < 0.6 * sum(shared.home)
    assert half.trained_bytes * 2 == shared.trained_bytes


def test_losses_equal_those_of_merged_weights(workers: WorkerPool) -> None:
    (losses,) = workers.run(losses_apart, TINY, world_size=1, init_process_group=False, deadline_s=60.0)
    for loss, merged, base in losses:
        assert merged == pytest.approx(loss, abs=1e-5)
        assert abs(base - loss) > 1e-3
    assert losses[0] != losses[-1]
