"""Rows of the benchmark of compiled blocks, and a tiny run of it."""

from __future__ import annotations

import pytest

from benchmarks.compiled import TINY, Fit, fill, fit
from benchmarks.harness import BenchmarkReport
from tests.workers import WorkerPool


def test_the_first_iteration_has_its_own_columns_and_losses_are_compared() -> None:
    plain = [Fit((2.0, 1.0, 1.0), (3.0, 2.0, 1.0))] * 2
    compiled = [Fit((30.0, 0.5, 0.5), (3.0, 2.0, 1.0)), Fit((5.0, 0.5, 1.0), (3.0, 2.0, 1.5))]
    report = BenchmarkReport("compiled")
    fill(report, "32-true", plain, compiled)
    (row,) = report.rows
    assert (row["first_s"], row["first_compiled_s"], row["first_from_cache_s"]) == (2.0, 30.0, 5.0)
    # Ratios 2, 2, 2 and 1.
    assert (row["later_s"], row["later_compiled_s"], row["plain_over_compiled"]) == (1.0, 0.5, 2.0)
    assert row["losses_apart"] == 0.5 and not report.targets[0].met


def run_tiny() -> tuple[Fit, Fit]:
    """Run both arms."""
    return fit(None, "32-true", TINY), fit("aot_eager", "32-true", TINY)


@pytest.mark.exhaustive
def test_a_tiny_run_has_the_same_losses_in_both_arms(workers: WorkerPool) -> None:
    plain, compiled = workers.run(run_tiny, world_size=1, init_process_group=False, deadline_s=90.0)[0]
    assert len(plain.losses) == len(compiled.seconds) == TINY.iterations
    assert compiled.losses == pytest.approx(plain.losses, abs=1e-5)
    assert len(set(plain.losses)) == TINY.iterations
