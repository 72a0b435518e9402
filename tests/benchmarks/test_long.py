"""Targets of the benchmark of long rows, and a tiny run of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import BenchmarkReport
from benchmarks.long import DEGREES, MOST_BYTES, TINY, Pass, fill, run_passes
from tests.workers import WorkerPool


def test_bytes_are_compared_with_an_equal_share_of_those_of_one_rank() -> None:
    passes = {(8, False, cp): Pass(peak_bytes=size, loss=loss) for cp, size, loss in ((1, 80, 2.0), (2, 50, 2.1))}
    report = BenchmarkReport("long")
    fill(report, passes)
    assert [row["over_share"] for row in report.rows] == [1.0, 1.25]
    assert [target.name for target in report.targets if not target.met] == [
        "8 tokens, kept, cp2: bytes over an equal share",
        "8 tokens, kept, cp2: loss apart",
    ]


def test_ranks_that_divide_a_row_divide_its_activations(workers: WorkerPool) -> None:
    passes = workers.run(run_passes, replace(TINY, num_layers=1), world_size=4, deadline_s=60.0)[0]
    for recomputes in (False, True):
        alone, *divided = (passes[TINY.tokens[0], recomputes, cp] for cp in DEGREES)
        for cp, one in zip(DEGREES[1:], divided, strict=True):
            assert one.peak_bytes <= MOST_BYTES * alone.peak_bytes / cp
            assert one.loss == pytest.approx(alone.loss, rel=1e-5)
