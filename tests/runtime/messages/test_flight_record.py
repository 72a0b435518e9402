"""Activities of a rank: nesting, durations, failures, and the bound on what is kept."""

from __future__ import annotations

import pytest

from lightning_realloc.runtime.messages.flight_record import BETWEEN, CAPACITY, FlightRecord


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
