"""Turns of arms, missed targets and JSON of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio


def _report() -> BenchmarkReport:
    report = BenchmarkReport("demo", seeds=(3,))
    report.add_row(arm="ours", seconds=0.5, exact=True)
    report.add_row(arm="theirs", seconds=1.5)
    report.require_at_least("speed-up", 3.0, 2.0)
    report.require_at_most("extra bytes", 9, 8)
    return report


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--strict"], 1)])
def test_only_strict_runs_fail_when_a_target_is_missed(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report().finish(make_parser("demo").parse_args(arguments)) == code
    assert "1 of 2 targets missed: extra bytes" in capsys.readouterr().out


def test_the_json_holds_rows_targets_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.json"
    _report().finish(make_parser("demo").parse_args(["--json", str(path)]))
    written = json.loads(path.read_text())
    assert written["rows"][1] == {"arm": "theirs", "seconds": 1.5}
    assert written["targets"] == [
        {"name": "speed-up", "value": 3.0, "target": 2.0, "met": True},
        {"name": "extra bytes", "value": 9.0, "target": 8.0, "met": False},
    ]
    assert written["seeds"] == [3]
    assert {"machine", "versions", "load_average", "seconds", "settings"} <= written.keys()
    assert {"python", "torch", "transformers", "lightning"} <= written["versions"].keys()


def test_rows_can_be_printed_in_a_table_for_each_value_of_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    report = BenchmarkReport("demo", group_by="part")
    report.add_row(part="first", seconds=0.5)
    report.add_row(part="second", steps=7)
    report.add_row(part="first", seconds=1.5)
    report.finish(make_parser("demo").parse_args([]))
    first, second = capsys.readouterr().out.split("second ", maxsplit=1)
    assert ("0.5" in first, "1.5" in first, "steps" in first, "part" in first) == (True, True, False, False)
    assert ("7" in second, "seconds" in second) == (True, False)


def test_arms_take_turns() -> None:
    order: list[str] = []
    ticks = iter(range(100))
    arms = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = interleave(arms, repeats=3, clock=lambda: float(next(ticks)))
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_ratio_is_taken_within_each_turn() -> None:
    # Ratios by turn: 2, 4 and 3. A turn in which the machine slows both arms tenfold changes nothing.
    assert paired_ratio([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == 3.0
