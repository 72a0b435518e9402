"""Cost of runs that go on, have ended, have no limit or tried a faster plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_realloc.recording.events import PlanInstalled
from lightning_realloc.recording.reader import read_run
from lightning_realloc.report.runs.page import page_data
from lightning_realloc.report.runs.run_folder import read_run_folder
from lightning_realloc.report.runs.sections.run_cost import duration, iteration_seconds
from tests.recording.records import started, write_session
from tests.report.runs.folders import PLAN, content_of, section_of, table_of, write_run


def test_a_run_that_goes_on_has_a_forecast_with_money(tmp_path: Path) -> None:
    write_session(tmp_path / "record", replace(started(), max_steps=3600), [PlanInstalled(step=0, plan=PLAN)], steps=8)
    data = page_data(read_run_folder(tmp_path), price=3.0)
    sentences = section_of(data, "cost")["sentences"]
    assert sentences[0] == "So far the run took 8 s: 0.00 device-hours."
    assert sentences[1].startswith("It ends in 1 h (1 h to 1 h in nine of ten cases), after 3,592 more iterations")
    rows = {row[0]: row[1:] for row in table_of(data, "cost", "cost")["rows"]}
    assert rows["device-hours"][1:] == ["2.00", "2.00", "2.00"]  # an iteration takes a second on two devices
    assert rows["price"] == ["0.01", "6.00", "6.00", "6.00"]


def test_a_run_that_has_ended_costs_what_it_took(tmp_path: Path) -> None:
    data = content_of(write_run(tmp_path))
    sentences, shown = section_of(data, "cost")["sentences"], table_of(data, "cost", "cost")
    assert sentences[0] == "The run took 8 s: 0.00 device-hours."
    assert not any("ends in" in sentence for sentence in sentences)
    assert [column["name"] for column in shown["columns"]] == ["quantity", "in all"]
    assert shown["rows"] == [["wall time", "8 s"], ["device-hours", "0.00"]]


def test_short_and_endless_runs_say_why_there_is_no_forecast(tmp_path: Path) -> None:
    write_session(tmp_path / "short" / "record", started(), steps=6)
    assert (
        section_of(content_of(tmp_path / "short"), "cost")["missing"] == "A forecast needs 7 iterations; there are 6."
    )
    write_session(tmp_path / "endless" / "record", replace(started(), max_steps=None), steps=8)
    assert "set max_steps" in section_of(content_of(tmp_path / "endless"), "cost")["sentences"][1]


def test_iterations_count_from_one_row_of_metrics_to_the_next_in_each_session(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=3)
    write_session(tmp_path, started(unix_s=5000.0, step=3), steps=2)
    assert iteration_seconds(read_run(tmp_path)) == [1.0] * 5  # the pause between both does not count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (59.0, "59 s"),
        (90.0, "1 min 30 s"),
        (599.9, "10 min"),
        (3592.0, "1 h"),
        (7800.0, "2 h 10 min"),
        (3600.0, "1 h"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
