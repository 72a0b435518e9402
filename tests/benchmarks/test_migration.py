"""Equal work for all arms of the migration benchmark, and its targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks import migration
from benchmarks.harness import BenchmarkReport
from benchmarks.migration import CASES, WAITING, Case, Settings, judge, measure_on_rank, summarise
from tests.workers import WorkerPool

TINY = Case("skewed", (60.0, 10.0), "geometric", at_least=0.01, samples=4, slots=2)


def _measure(settings: Settings) -> list[Any]:
    """Return the messages that this rank sends to the judging process."""
    connection = mock.Mock()
    measure_on_rank(dist.get_rank(), settings, [TINY], connection)
    return [call.args[0] for call in connection.send.call_args_list]


@pytest.mark.exhaustive
def test_all_arms_generate_the_same_tokens_and_each_moving_arm_has_a_row(workers: WorkerPool) -> None:
    report = BenchmarkReport("migration")
    settings = Settings(replace(WAITING, step_s=1e-4, token_s=1e-5), turns=1)
    first, second = workers.run(_measure, settings, world_size=2)
    assert not second
    judge(first, settings, [TINY], report)
    assert [row["moves"] for row in report.rows] == ["queued", "all"]
    for row in report.rows:
        assert row["device"] == "waiting" and row["lengths"] == "skewed" and row["ranks"] == 2 and row["turns"] == 1
        assert row["differing_fp64"] == 0
        assert row["staying_s"] > 0 and row["moving_s"] > 0
    assert [target.met for target in report.targets] == [True, True, True]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_lengths_have_the_mean_of_the_case_and_differ_from_turn_to_turn(case: Case) -> None:
    for rank in (0, 1):
        drawn = [case.lengths(rank, 400, seed) for seed in range(5)]
        assert drawn[0] != drawn[1]
        lengths = [length for turn in drawn for length in turn]
        assert 1 <= min(lengths) <= max(lengths) <= migration.LONGEST
        assert sum(lengths) / len(lengths) == pytest.approx(case.means[rank], rel=0.2)  # the longest are cut off


def test_the_bound_is_the_larger_of_shared_work_and_the_longest_sample() -> None:
    def rank(moving: float, staying: float, busy: float) -> dict[str, object]:
        moves = {"num_received": 2, "stall_s": 0.01, "bytes_sent": 4000}
        seconds = {"queued": moving, "all": moving, "none": staying}
        return {"seconds": seconds, "busy_s": busy, "moves": {"all": moves}, "differing": {"all": 1}}

    shared = (1.0, [rank(3.0, 4.0, 4.0), rank(3.0, 4.0, 0.0)])
    alone = (3.0, [rank(3.0, 4.0, 4.0), rank(3.0, 4.0, 0.0)])
    row = summarise(CASES[0], 2, "all", [], [shared])
    assert (row["ratio"], row["over_bound"], row["staying_over_bound"]) == pytest.approx((4 / 3, 1.5, 2.0))
    assert summarise(CASES[0], 2, "all", [], [alone])["over_bound"] == 1.0
    assert (row["moves_per_turn"], row["stall_ms_per_move"], row["kB_per_move"]) == pytest.approx((4, 5.0, 2.0))
    assert (row["differing"], row["differing_fp64"]) == (2, 0)
