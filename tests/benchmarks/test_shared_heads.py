"""Targets of the benchmark of sharded logits, and a tiny run of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import BenchmarkReport
from benchmarks.shared_heads import CALLS, TINY, Turn, fill, run_calls
from tests.workers import WorkerPool

TURN = Turn(peak_bytes=100, seconds=(1.0, 2.0, 3.0), logprobs=(-1.0, -2.0))
JOINED = Turn(peak_bytes=400, seconds=(2.0, 2.0, 9.0), logprobs=(-1.0, -2.0))


def test_ratios_are_joined_logits_over_shares_turn_by_turn() -> None:
    turns = {(call, arm): turn for call in CALLS for arm, turn in (("shares", TURN), ("joined", JOINED))}
    turns["train", "joined"] = replace(JOINED, peak_bytes=160, logprobs=(-1.0, -2.5))
    report = BenchmarkReport("shared_heads")
    fill(report, turns)
    # Ratios of turns: 2, 1 and 3.
    assert [(row["bytes_ratio"], row["seconds_ratio"]) for row in report.rows] == [(4.0, 2.0), (1.6, 2.0)]
    missed = [target.name for target in report.targets if not target.met]
    assert missed == ["train: bytes, joined over shares", "train: log-probabilities apart"]


def test_a_tiny_run_keeps_half_of_the_logits_on_each_rank(workers: WorkerPool) -> None:
    turns = workers.run(run_calls, TINY, world_size=2, deadline_s=60.0)[0]
    logits_bytes = TINY.num_sequences * TINY.response_length * TINY.vocabulary * 4
    for call in CALLS:
        shares, joined = turns[call, "shares"], turns[call, "joined"]
        assert logits_bytes / 2 <= shares.peak_bytes <= joined.peak_bytes - logits_bytes / 2
        assert shares.logprobs == pytest.approx(joined.logprobs, abs=1e-5)
        assert len(shares.seconds) == TINY.repeats
