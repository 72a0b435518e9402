"""Lines of a rank's file: what an iteration includes, and what it leaves out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lightning_realloc.recording.iteration_record import IterationRecord, WeightMove
from lightning_realloc.recording.pieces import ENVIRONMENTS
from lightning_realloc.recording.rank_recorder import RankRecorder
from lightning_realloc.runtime.messages.environment_waits import EnvironmentWaits, WaitingOverTime
from lightning_realloc.runtime.messages.flight_record import FlightRecord


def test_samples_that_wait_for_environments_are_recorded_with_pieces_alone(tmp_path: Path) -> None:
    record, zero = FlightRecord(), time.monotonic()
    recorder = RankRecorder(tmp_path / "rank_0.jsonl", record, zero)
    for step, is_detailed in ((1, True), (2, False)):
        with record.during("actor.generate", kind="call"):
            begin = time.monotonic()
            samples = WaitingOverTime(begin=begin, bin_s=0.01, means=(2.0, 0.5))
            time.sleep(0.002)
            record.add_environment_waits(EnvironmentWaits(((begin, 0.001),), samples))
        made = recorder.end_iteration(step, is_detailed=is_detailed)
        assert made.seconds["environment"] == {ENVIRONMENTS: pytest.approx(0.001)}
        if is_detailed:
            ((call, shown),) = made.waiting
            assert (call, shown.means) == ("actor.generate", (2.0, 0.5))
            assert shown.begin == pytest.approx(begin - zero)
    recorder.close()
    first, second = map(json.loads, (tmp_path / "rank_0.jsonl").read_text().splitlines())
    assert first["waiting"] == [["actor.generate", pytest.approx(begin - zero, abs=1.0), 0.01, [2.0, 0.5]]]
    assert IterationRecord.from_json(first).waiting[0].samples.means == (2.0, 0.5)
    assert "waiting" not in second and IterationRecord.from_json(second).waiting == ()


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
