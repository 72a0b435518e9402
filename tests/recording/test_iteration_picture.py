"""The picture of a recorded iteration: every piece has its bar."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_realloc.recording.iteration_picture import detailed_steps, iteration_lanes
from lightning_realloc.recording.reader import read_run
from lightning_realloc.tuning.timeline.picture import Bar, Lane, call_colors, draw
from tests.recording.records import started, write_session

SVG = "{http://www.w3.org/2000/svg}"


def test_lanes_show_an_iteration_from_its_first_call_on(tmp_path: Path) -> None:
    write_session(tmp_path, started())
    session = read_run(tmp_path).last
    assert detailed_steps(session) == [1, 2, 3]
    lanes = iteration_lanes(session, 3)
    assert [lane.name for lane in lanes] == ["rank 0", "rank 1"]
    assert [bar.kind for bar in lanes[1].bars] == ["wait", "move", "call", "call"]
    assert lanes[1].bars[2] == Bar("actor.generate", "call", pytest.approx(0.2), pytest.approx(0.5))


def test_only_iterations_with_pieces_on_all_ranks_can_be_shown(tmp_path: Path) -> None:
    write_session(tmp_path, started())
    session = read_run(tmp_path).last
    (tmp_path / "rank_1.jsonl").unlink()
    without = replace(session, ranks={0: session.ranks[0], 1: session.ranks[1][:1]})
    assert detailed_steps(without) == [1]
    assert detailed_steps(replace(session, ranks={})) == []


def test_the_drawing_is_well_formed_and_has_every_bar() -> None:
    lanes = [
        Lane("rank 0", (Bar('<call> & "x"', "call", 0.0, 2.0), Bar("waiting", "wait", 2.0, 3.0))),
        Lane("rank 1", (Bar("-> a", "move", 0.0, 0.5),)),
    ]
    root = ET.fromstring(draw(lanes, title="<one> iteration"))
    tips = [rect.find(f"{SVG}title").text for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert tips == ['<call> & "x": 2.000 s', "waiting: 1.000 s", "-> a: 0.500 s"]
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"<one> iteration", "rank 0", "moving weights", "waiting", "0.0 s", "3.0 s"} <= texts
    assert ET.fromstring(draw([])).tag == f"{SVG}svg"


def test_a_call_keeps_its_color_when_others_follow() -> None:
    bars = [Bar(f"call {number}", "call", 0.0, 1.0) for number in range(10)]
    few, many = call_colors(bars[:3]), call_colors(bars)
    assert few.items() <= many.items()
    assert len(set(few.values())) == 3
