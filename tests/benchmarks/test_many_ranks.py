"""The benchmark of many processes adds up what ranks recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many_ranks import MEASURED, seconds_of
from tests.recording.records import started, write_session


def test_seconds_of_an_iteration_are_divided_into_calls_moves_waits_and_the_rest(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=MEASURED + 1)
    row = seconds_of(tmp_path)
    # An iteration of the record: 0.1 s of waiting, 0.1 s of a move, calls of 0.3 and 0.4 s, and 0.1 s in between.
    expected = {"actor.generate": 0.3, "reference.infer": 0.0, "actor.train": 0.4, "moves": 0.1, "waits": 0.1}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["rank 0 between calls"] == row["other ranks between calls"] == pytest.approx(0.1)
    assert row["iteration, s"] == pytest.approx(1.0)
