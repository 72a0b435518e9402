"""Seconds to drain a rank's load, compared with hand-worked values and a loop over single steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, StepCurve, drain_seconds

PER_ROW = StepCurve(((1, 0.01), (4, 0.04)))
"""10 ms for each row of a step."""


def live(*remaining: float, first_id: int = 0) -> tuple[LiveSample, ...]:
    return tuple(LiveSample(first_id + index, 50, tokens) for index, tokens in enumerate(remaining))


def test_a_step_is_linear_between_knots_flat_below_and_extrapolated_above() -> None:
    curve = StepCurve(((4, 0.010), (8, 0.018)))
    # Slope 2 ms a row: 6 rows 10 + 2·2, 10 rows 18 + 2·2.
    assert [curve.seconds(rows) for rows in (0, 2, 4, 6, 8, 10)] == pytest.approx(
        [0, 0.010, 0.010, 0.014, 0.018, 0.022]
    )
    assert StepCurve(((4, 0.010),)).seconds(8) == pytest.approx(0.020)


@pytest.mark.parametrize("knots", [(), ((0, 0.1),), ((1, 0.0),), ((2, 0.1), (2, 0.2)), ((1, 0.2), (2, 0.1))])
def test_knots_that_are_no_curve_are_refused(knots: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(GenerationError, match="running maximum"):
        StepCurve(knots)


def test_a_rank_drains_faster_as_its_rows_end() -> None:
    # 10 steps of 3 rows, 10 of 2, 20 of 1: 0.3 + 0.2 + 0.2 s.
    assert drain_seconds(RankLoad(0, live(10, 40, 20), (), PER_ROW, 0)) == pytest.approx(0.7)
    assert drain_seconds(RankLoad(0, live(10, 40, 20), (), PER_ROW, 0, tokens_per_row_step=2.0)) == pytest.approx(0.35)
    assert drain_seconds(RankLoad(0, (), (), PER_ROW, 4)) == 0


def test_waiting_samples_take_the_slots_of_those_that_end() -> None:
    load = RankLoad(0, live(10), live(20, 5, first_id=1), PER_ROW, free_slots=1)
    # The first waiting one begins at once, the second at step 10: 15 steps of 2 rows, then 5 of 1.
    assert drain_seconds(load) == pytest.approx(15 * 0.02 + 5 * 0.01)


@given(
    running=st.lists(st.integers(0, 12), max_size=6),
    waiting=st.lists(st.integers(0, 12), max_size=6),
    free_slots=st.integers(1, 4),
)
def test_draining_agrees_with_counting_single_steps(running: list[int], waiting: list[int], free_slots: int) -> None:
    load = RankLoad(0, live(*running), live(*waiting, first_id=50), PER_ROW, free_slots)
    rows, queue, seconds = list(running), list(waiting), 0.0
    while rows or queue:
        rows = [left for left in rows if left]
        while queue and len(rows) < load.num_slots:
            if begun := queue.pop(0):
                rows.append(begun)
        seconds += PER_ROW.seconds(len(rows))
        rows = [left - 1 for left in rows]
    assert drain_seconds(load) == pytest.approx(seconds)


def test_a_move_recomputes_where_that_is_quicker_than_sending() -> None:
    sample = LiveSample(0, context_tokens=100, remaining_tokens=1)
    slow = MoveCost(1000, bytes_per_s=1e6, latency_s=0.01, prefill_tokens_per_s=2000, stall_s=0)
    fast = MoveCost(1000, bytes_per_s=1e7, latency_s=0.01, prefill_tokens_per_s=2000, stall_s=0)
    # 100 kB: 0.1 s at 1 MB/s, 0.01 s at 10 MB/s; 100 tokens at 2,000 a second: 0.05 s; and 0.01 s of latency each.
    assert slow.handover(sample) == ("recompute", pytest.approx(0.06))
    assert fast.handover(sample) == ("send", pytest.approx(0.02))


def test_a_rank_with_waiting_samples_and_no_slot_is_refused() -> None:
    with pytest.raises(GenerationError, match="at least one slot"):
        RankLoad(3, (), live(1), PER_ROW, free_slots=0)
