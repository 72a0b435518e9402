"""The trace has every recorded piece, and the prediction from the same moment on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_realloc.recording.trace import write_trace
from tests.recording.records import PREDICTION, started, write_session


def test_recorded_and_predicted_slices_share_a_clock(tmp_path: Path) -> None:
    write_session(tmp_path, started(), [PREDICTION])
    write_trace(tmp_path, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    measured = [event for event in slices if names[event["pid"]] == "measured"]
    predicted = [event for event in slices if names[event["pid"]] == "predicted"]
    assert len(measured) == 2 * 3 * 5
    assert sum(event["dur"] for event in measured if event["tid"] == 0) == pytest.approx(3e6)
    # The prediction was made after step 2: it lies next to step 3, whose first move begins at 2.1 s.
    assert {(one["name"], one["tid"], one["ts"], one["dur"]) for one in predicted} == {
        ("-> actor.generate", 0, 2.1e6, 1e5),
        ("-> actor.generate", 1, 2.1e6, 1e5),
        ("actor.train", 1, 2.3e6, 6e5),
    }
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert len([one for one in counters if "GiB" in one]) == 6
    waiting = [event for event in events if event["name"] == "samples of rank 1 that wait"]
    assert [(event["ts"], event["args"]["samples"]) for event in waiting[:3]] == [
        (2.5e5, 2.0),
        (3.5e5, 1.0),
        (4e5, 0.0),
    ]
