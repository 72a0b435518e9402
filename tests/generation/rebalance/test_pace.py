"""Prediction of short calls, and measured seconds of steps."""

from __future__ import annotations

import pytest

from lightning_realloc.generation.rebalance.pace import MAX_SILENT_CALLS, PaceEstimator, ShortCallPredictor, StepTimes


def runs_of_silence(calls: ShortCallPredictor, kind: str, *, num_calls: int, is_short: bool = True) -> list[int]:
    """Return the number of calls predicted to be short before each observed one."""
    runs, silent = [], 0
    for _ in range(num_calls):
        if calls.predict(kind):
            silent += 1
        else:
            runs.append(silent)
            silent = 0
            calls.observe(kind, was_short=is_short)
    return runs


def test_each_short_call_doubles_the_calls_predicted_to_be_short() -> None:
    assert runs_of_silence(ShortCallPredictor(), "a", num_calls=39) == [
        0,
        1,
        2,
        4,
        8,
        MAX_SILENT_CALLS,
        MAX_SILENT_CALLS,
    ]


def test_a_long_call_resets_the_prediction() -> None:
    calls = ShortCallPredictor()
    runs_of_silence(calls, "a", num_calls=11)  # observed: the first, third, sixth and eleventh
    assert runs_of_silence(calls, "a", num_calls=9, is_short=False) == [8]
    assert runs_of_silence(calls, "a", num_calls=3, is_short=False) == [0, 0, 0]
    assert runs_of_silence(calls, "a", num_calls=6) == [0, 1, 2]


def test_every_kind_of_call_is_predicted_separately() -> None:
    calls = ShortCallPredictor()
    runs_of_silence(calls, "a", num_calls=11)
    assert not calls.predict("b")
    assert calls.predict("a")


def test_step_seconds_follow_a_machine_that_changes_its_speed() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 0.01)
    for _ in range(40):
        times.observe(4, 0.012)
    assert times.knots() == [(4.0, pytest.approx(0.012, rel=0.01))]


def test_one_slow_step_hardly_changes_the_seconds_of_a_step() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 0.01)
    times.observe(4, 1.0)
    assert times.knots()[0][1] <= 0.0105 + 1e-9  # counts as 1.5 times the mean, a tenth of it
    times.observe(2, 1.0)  # the first step of its size
    assert times.knots()[0] == (2.0, pytest.approx(2 * times.knots()[1][1]))


def test_the_first_step_of_a_size_is_replaced_by_a_faster_second_one() -> None:
    times = StepTimes()
    times.observe(4, 1.0)
    times.observe(4, 0.01)
    assert times.knots() == [(4.0, pytest.approx(0.01))]


def test_every_size_has_its_own_seconds_and_the_curve_never_falls() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 0.01), (2, 0.009), (8, 0.02)):
        times.observe(rows, seconds)
    assert times.knots() == [(1.0, 0.01), (2.0, 0.009), (8.0, 0.02)]
    assert [times.seconds(rows) for rows in (1, 2, 8)] == [0.01, 0.01, 0.02]


def test_prefills_are_timed_separately_from_decoding_in_the_same_step() -> None:
    pace = PaceEstimator()
    for _ in range(200):
        pace.record_step(rows=4, read=0, generated=4, seconds=0.01)
        pace.record_step(rows=4, read=100, generated=4, seconds=0.06)
    assert pace.prefill_tokens_per_s == pytest.approx(2000, rel=0.01)
    report = pace.report(None)
    assert report.step_s == pytest.approx(0.035)
    assert report.tokens_per_row_step == pytest.approx(1.0)
    assert pace.report(None).step_s == 0.0  # no steps since the last report
    assert pace.report(lambda numbers: [2 * number for number in numbers]).knots[0][1] == pytest.approx(0.02)
