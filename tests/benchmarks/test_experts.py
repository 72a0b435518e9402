"""Targets of the benchmark of mixtures of experts, and a tiny run of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.experts import LAYOUTS, MOST_APART, TINY, Step, expected_bytes, fill, run_steps
from benchmarks.harness import BenchmarkReport
from tests.workers import WorkerPool


def test_an_even_router_sends_all_pairs_but_those_of_the_ranks_own_experts() -> None:
    work = replace(TINY, tokens=10, experts_per_token=2, hidden_size=3, num_layers=2)
    # 20 pairs of 3 floats, of which three quarters leave the rank, away and back in two passes through two layers.
    assert expected_bytes(work, ep=4, tp=1) == 20 * 3 * 4 * 3 / 4 * 2 * 2 * 2
    assert expected_bytes(work, ep=1, tp=1) == 0


def test_a_ring_sends_the_sums_of_four_tensors_a_layer_and_two_more() -> None:
    work = replace(TINY, tokens=10, hidden_size=3, num_layers=2)
    # Two ranks share 20 tokens of 3 floats; of each of 10 sums a rank sends half, and half of the total.
    assert expected_bytes(work, ep=1, tp=2) == 10 * (20 * 3 * 4)


def test_losses_bytes_and_peaks_are_compared() -> None:
    gathered = Step(seconds=1.0, sent_bytes=0, expected_bytes=0, gathered_bytes=9, peak_bytes=100, loss=2.0)
    divided = Step(seconds=1.0, sent_bytes=80, expected_bytes=100, gathered_bytes=0, peak_bytes=101, loss=2.1)
    report = BenchmarkReport("experts")
    fill(report, {"fsdp4": gathered, "fsdp4.ep4": divided})
    assert [target.name for target in report.targets if not target.met] == [
        "fsdp4.ep4: loss apart",
        "fsdp4.ep4: bytes sent, apart from the formula",
        "fsdp4.ep4: peak over gathered",
    ]


@pytest.mark.exhaustive
def test_ranks_send_the_bytes_of_the_formula(workers: WorkerPool) -> None:
    steps = workers.run(run_steps, TINY, world_size=4, deadline_s=60.0)[0]
    assert [step.loss for step in steps.values()] == pytest.approx([steps["fsdp4"].loss] * len(LAYOUTS), rel=1e-5)
    for layout in LAYOUTS[1:]:
        assert steps[layout].sent_bytes == pytest.approx(steps[layout].expected_bytes, rel=MOST_APART)
