"""Loads made from reports, and the time of the next round."""

from __future__ import annotations

import json

import pytest

from lightning_realloc.generation.rebalance.load import (
    LiveSample,
    LoadReport,
    PaceReport,
    RankLoad,
    StepCurve,
    loads_from_reports,
)
from lightning_realloc.generation.rebalance.protocol import next_round_s


def loads(*remaining_tokens: float) -> list[RankLoad]:
    """Return ranks with one sample each and steps of one second."""
    curve = StepCurve(((1.0, 1.0),))
    samples = [LiveSample(rank, 1, tokens) for rank, tokens in enumerate(remaining_tokens)]
    return [RankLoad(sample.sample_id, (sample,), (), curve, 0) for sample in samples]


@pytest.mark.parametrize(("num_quiet", "seconds"), [(0, 16.0), (1, 32.0), (2, 64.0), (3, 64.0), (50, 64.0)])
def test_rounds_become_less_frequent_while_nothing_moves(num_quiet: int, seconds: float) -> None:
    assert next_round_s(loads(400.0, 900.0), 16.0, num_quiet) == seconds


def test_the_next_round_comes_before_a_rank_is_idle() -> None:
    assert next_round_s(loads(160.0, 900.0), 16.0, num_quiet=5) == 64.0  # two fifths of the remaining time
    assert next_round_s(loads(20.0, 900.0), 16.0, num_quiet=5) == 16.0
    assert next_round_s(loads(0.0, 900.0), 16.0, num_quiet=5) == 16.0


def report(
    rank: int, *, running: tuple[int, ...] = (), incoming: tuple[int, ...] = (), free_slots: int = 1
) -> LoadReport:
    """Return the report of a rank with these samples running there and on their way to it."""
    here, coming = (tuple(LiveSample(sample_id, 5, 7.0) for sample_id in ids) for ids in (running, incoming))
    pace = PaceReport(((1.0, 1.0),), 1.0, 1e9, 1e4, 1e-3)
    return LoadReport(rank, here, (), coming, free_slots, bytes_per_token=8, pace=pace)


def test_a_sample_that_several_ranks_report_is_planned_once() -> None:
    reports = [
        report(0, incoming=(1, 2), free_slots=2),  # 1 could not leave
        report(1, running=(1,), incoming=(3,), free_slots=0),
        report(2, incoming=(2,)),  # could not leave for rank 0, and leaves for this one
    ]
    received = [LoadReport.from_json(json.loads(json.dumps(each))) for each in reports]
    assert received == reports
    known = loads_from_reports(received)
    assert known is not None
    assert [[sample.sample_id for sample in load.live] for load in known[0]] == [[2], [1, 3], []]
    assert [load.free_slots for load in known[0]] == [1, 0, 1]


def test_queued_samples_get_the_slots_of_samples_about_to_leave() -> None:
    waiting = (LiveSample(1, 5, 7.0, has_begun=False),)
    known = loads_from_reports([report(0, free_slots=0)._replace(waiting=waiting)])
    assert known is not None
    assert known[0][0].free_slots == 1
