from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_realloc.commands.report_command import run_report
from lightning_realloc.errors import ConfigError
from tests.report.runs.folders import write_run, write_table


def _run(*arguments: object) -> str:
    written: list[str] = []
    assert run_report([str(one) for one in arguments], written.append) == 0
    return "".join(written)


def test_the_page_is_written_to_the_runs_folder_and_its_path_printed(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_run(tmp_path)

    assert _run(tmp_path) == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_ending_of_the_output_chooses_the_format(tmp_path: Path) -> None:
    write_run(tmp_path)

    _run(tmp_path, "--output", tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text())["sections"]
    assert _run(tmp_path, "--output", "-", "--format", "md").startswith("# Report of ")


def test_the_newest_record_below_the_folder_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=3)
    newer = write_run(tmp_path / "b", steps=5)

    assert f"log: {newer}" in _run(tmp_path, "--format", "md", "--output", "-").replace("\\", "")


def test_metrics_without_a_record_are_reported_with_the_way_to_record(tmp_path: Path) -> None:
    write_table(tmp_path / "metrics.csv", [{"step": step, "epoch": 0, "reward": step / 10} for step in range(5)])

    text = _run(tmp_path, "--format", "md", "--output", "-")

    assert "reward goes from 0 to 0.4" in text
    assert "Timeline()" in text


def test_runs_are_compared(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")

    assert "## Comparison" in _run(first, "--compare", second, "--format", "md", "--output", "-")


@pytest.mark.parametrize(
    ("first", "second"), [("a", "a"), ("a", "a/log/version_0"), (".", "a"), ("a", "link"), ("a/../b", "b")]
)
def test_a_run_is_not_compared_with_itself(tmp_path: Path, first: str, second: str) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "a")  # the newest
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"are the same run, .*; give --compare another one"):
        _run(tmp_path / first, "--compare", tmp_path / second, "--format", "md", "--output", "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "is no folder"),
        (["."], "neither a record nor metrics.csv"),
        ([".", "--form", "md"], "there is no flag --form"),
        ([".", "--format", "pdf"], "pdf"),
        ([".", "--price-per-gpu-hour", "-1"], "--price-per-gpu-hour=-1.0 must be a number of at least 0"),
        ([".", "--output", "s3://bucket/report.html"], "--output: 's3://bucket/report.html' is an address"),
        ([], "required"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as failed:
        _run(*arguments)
    assert "\n" not in str(failed.value)


def test_a_price_adds_money_to_the_cost(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert "| price |" in _run(folder, "--price-per-gpu-hour", "2.5", "--format", "md", "--output", "-")


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="name another file"):
        _run(tmp_path, "--format", "md", "--output", tmp_path / "file" / "report.md")
