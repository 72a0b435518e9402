"""Waiting for environments: exact sums, however many spans and bins are joined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.runtime.messages.environment_waits import FIRST_BIN_S, MAX_BINS, MAX_SPANS, WaitMeter


def test_means_and_spans_of_a_short_call() -> None:
    meter = WaitMeter()
    assert meter.waits() is None
    meter.count(7.0, 0)
    assert meter.waits() is None, "nothing has waited yet"
    # Two samples wait from 10.000 to 10.015, four from there to 10.020; nothing is generated in the last 5 ms.
    for moment, count in ((10.0, 2), (10.015, 4), (10.02, 0)):
        meter.count(moment, count)
    meter.begin_idle(10.015)
    meter.begin_idle(10.017)
    meter.end_idle(10.02)
    waits = meter.waits()
    assert waits is not None
    assert waits.samples.means[:2] == pytest.approx((2.0, 3.0)) and waits.samples.begin == 10.0
    assert waits.idle == ((10.015, pytest.approx(0.005)),)
    moved = waits.shifted(-10.0)
    assert moved.idle[0] == pytest.approx((0.015, 0.005)) and moved.samples.begin == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 0.4), st.integers(0, 9)), max_size=60))
def test_means_add_up_to_the_seconds_of_all_samples(steps: list[tuple[float, int]]) -> None:
    meter, now, number, expected = WaitMeter(), 5.0, 0, 0.0
    for seconds, count in steps:
        now += seconds
        expected += number * seconds
        number = count
        meter.count(now, count)
    waits = meter.waits()
    found = 0.0 if waits is None else sum(waits.samples.means) * waits.samples.bin_s
    assert found == pytest.approx(expected, abs=1e-6)
    assert waits is None or len(waits.samples.means) <= MAX_BINS


def test_a_long_call_keeps_few_spans_with_the_same_seconds() -> None:
    meter = WaitMeter()
    for turn in range(5000):
        meter.count(float(turn), 3)
        meter.begin_idle(float(turn))
        meter.end_idle(turn + (0.5 if turn % 50 else 0.75))
        meter.count(turn + 0.75, 0)
    waits = meter.waits()
    assert waits is not None and meter.idle_s == pytest.approx(5000 * 0.5 + 100 * 0.25)
    assert waits.idle_s == pytest.approx(meter.idle_s) and len(waits.idle) <= MAX_SPANS
    assert MAX_BINS // 2 <= len(waits.samples.means) <= MAX_BINS
    assert waits.samples.bin_s == FIRST_BIN_S * 2**11  # 256 bins of 20.48 s are longer than 5000 s, of 10.24 s shorter
    assert waits.samples.means[10] == pytest.approx(3 * 0.75, rel=0.02)
    ends = [begin + seconds for begin, seconds in waits.idle]
    assert all(end <= begin for end, (begin, _) in zip(ends, waits.idle[1:], strict=False))
