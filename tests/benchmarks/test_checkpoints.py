"""Shares computed from seconds of steps, and a tiny run of the benchmark of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import COPY, READ_STEPS, SAVE_STEPS, fill, measure
from benchmarks.harness import BenchmarkReport

STEPS = (*SAVE_STEPS, *READ_STEPS, COPY)


def test_the_share_of_checksums_is_one_of_processor_time() -> None:
    report = BenchmarkReport("checkpoints")
    fill(report, dict.fromkeys(STEPS, 1.0) | {"verify checksums": 1 / 24}, dict.fromkeys(STEPS, 9.0))
    assert [target.value for target in report.targets] == pytest.approx([1 / len(SAVE_STEPS), 1 / 25])
    assert [target.met for target in report.targets] == [False, True]


def test_a_tiny_checkpoint_is_saved_and_read_step_by_step(tmp_path: Path) -> None:
    clock = measure(1, 1, tmp_path)
    assert set(clock.processor_s) == set(clock.elapsed_s) == set(STEPS)
    assert list(tmp_path.iterdir()) == []
