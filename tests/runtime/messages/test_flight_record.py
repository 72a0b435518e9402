"""Activities of a rank: nesting, durations, failures, and the bound on what is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_realloc.runtime.messages import flight_record
from lightning_realloc.runtime.messages.flight_record import BEFORE, BETWEEN, CAPACITY, ActivityProgress, FlightRecord


def test_activities_are_recorded_within_each_other_until_they_end() -> None:
    record = FlightRecord()
    assert record.is_empty

    with record.during("actor.generate"), record.during("waiting for data of rank 1", waits_for=(1,)):
        outer, inner = record.current()

    assert (outer.name, outer.depth, outer.waits_for) == ("actor.generate", 0, None)
    assert (inner.depth, inner.waits_for) == (1, (1,))
    assert [activity.name for activity in record.current()] == [BETWEEN]
    assert outer.seconds is not None and inner.seconds is not None
    assert outer.seconds >= inner.seconds >= 0
    assert record.longest_s("actor.generate") == outer.seconds
    assert record.longest_s("actor.train") == 0


def test_the_start_of_a_run_sets_no_usual_duration_of_code_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(flight_record, "time", SimpleNamespace(monotonic=lambda: now))
    record = FlightRecord()

    for now in (60.0, 62.0):  # noqa: B007  the clock reads it
        with record.during("actor.generate"):
            pass
    now = 500.0
    record.start_run()  # the next run, after a pause
    now = 530.0
    with record.during("actor.generate"):
        pass

    assert (record.longest_s(BEFORE), record.longest_s(BETWEEN)) == (60, 2)


def test_a_failed_activity_is_marked_and_sets_no_usual_duration() -> None:
    record = FlightRecord()

    with pytest.raises(ValueError, match="broken"), record.during("actor.train"):
        raise ValueError("broken")

    assert record.longest_s("actor.train") == 0
    assert record.lines()[-1].endswith(" failed")


def test_only_the_latest_activities_are_kept() -> None:
    record = FlightRecord()

    for number in range(CAPACITY + 3):
        with record.during(f"call {number}"):
            pass

    lines = record.lines()
    assert len(lines) == CAPACITY
    assert "call 3 " in lines[0]
    assert f"call {CAPACITY + 2} " in lines[-1]


def test_parts_are_counted_for_the_innermost_activity_if_it_expects_them() -> None:
    record = FlightRecord()
    with record.during("actor.train"):
        (call,) = record.current()
        record.expect_parts(3, "micro-batches")
        assert call.read_progress is not None
        assert [call.read_progress() for _ in record.counted("ab")] == [
            ActivityProgress(0, 3, "micro-batches"),
            ActivityProgress(1, 3, "micro-batches"),
        ]
        with record.during("waiting", waits_for=()):
            record.advance()  # not a part of the wait
        assert call.read_progress() == ActivityProgress(2, 3, "micro-batches")
        for _ in record.counted(range(5)):  # a mini-batch that is repeated
            pass
        assert call.read_progress() == ActivityProgress(3, 3, "micro-batches")
        with record.during("actor.generate"):
            record.follow(lambda: ActivityProgress(1, 8, "samples", 9, 4))
            record.advance()
            assert call.read_progress() == ActivityProgress(3, 3, "micro-batches")
            inner = record.current()[-1]
    assert call.read_progress is None and inner.read_progress is None, "an ended activity keeps nothing alive"
    record.follow(lambda: None)  # without effect outside of activities
