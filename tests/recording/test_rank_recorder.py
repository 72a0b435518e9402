"""Lines of a rank's file: what an iteration includes, and what it leaves out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_realloc.recording.iteration_record import WeightMove
from lightning_realloc.recording.rank_recorder import RankRecorder
from lightning_realloc.runtime.messages.flight_record import FlightRecord


def test_a_validation_is_in_no_iteration(tmp_path: Path) -> None:
    record = FlightRecord()
    recorder = RankRecorder(tmp_path / "rank_0.jsonl", record, zero=time.monotonic())
    first = recorder.end_iteration(1, is_detailed=True)
    with record.during("checkpoint", kind="save"):
        time.sleep(0.01)
    recorder.begin_validation()
    with record.during("actor.generate", kind="call"):
        time.sleep(0.2)
    recorder.record_move("actor.generate", WeightMove(0.1, 20, 10))
    recorder.record_peak("actor.generate", 1 << 30)
    validation_s = recorder.end_validation()
    with record.during("actor.train", kind="call"):
        time.sleep(0.02)
    recorder.record_peak("actor.train", 100)
    second = recorder.end_iteration(2, is_detailed=True)

    assert validation_s >= 0.2
    assert second.start == pytest.approx(first.end + validation_s, abs=1e-6)
    assert set(second.seconds["call"]) == {"actor.train"} and set(second.seconds["save"]) == {"checkpoint"}
    assert "move" not in second.seconds and second.moves == {} and second.peak_bytes == {"actor.train": 100}
    assert second.pieces is not None
    assert [piece.kind for piece in second.pieces if piece.kind != "host"] == ["save", "call"]
    assert sum(piece.seconds for piece in second.pieces) == pytest.approx(second.end - second.start, abs=1e-6)
