from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_realloc.recording.iteration_record import FORMAT
from lightning_realloc.report.runs.page import page_data, render_page, script_text
from lightning_realloc.report.runs.run_folder import MAX_CELL_CHARACTERS, MAX_ROLLOUT_CHARACTERS, read_run_folder
from lightning_realloc.report.runs.text import markdown_report
from tests.recording.records import started, write_session
from tests.report.runs.folders import (
    HOSTILE,
    content_of,
    log_metrics,
    log_scores,
    run_with,
    section_of,
    table_of,
    write_run,
    write_table,
)


class _Elements(HTMLParser):
    """Counts elements, and collects the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def _log(folder: Path) -> Path:
    return folder / "log" / "version_0"


def test_scripts_in_prompts_and_names_stay_texts(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = write_run(tmp_path)
    log_metrics(folder, {f"{HOSTILE}/loss": [0.5, 0.25]})
    write_table(_log(folder) / "rollouts.csv", [{HOSTILE: HOSTILE, "reward": 1}])
    data = content_of(folder)

    page = _Elements(render_page(data))

    assert page.tags.count("script") == 7  # data, plotly, charts, tables, conversations, page, live
    assert "img" not in page.tags
    assert json.loads(page.scripts[0]) == data
    assert table_of(data, "rollouts", "rollouts")["rows"][0] == ["1", HOSTILE]
    assert "<" not in markdown_report(data)


def test_scores_of_other_types_leave_a_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = write_run(tmp_path)
    log_scores(folder, HOSTILE, {HOSTILE: 1.0}, seed=0)
    path = _log(folder) / "record" / "scores.jsonl"
    (line,) = path.read_text().splitlines()
    content = json.loads(line)
    others = [
        {"responses": [10**400]}, {"responses": "4"}, {"questions": 3}, {"ks": [10**400]}, {"majority": []},
        {"name": ["val"], "ks": ["x"]}, {"unix_s": None}, {"right": [float("nan")]}, {"step": float("inf")},
    ]  # fmt: skip
    path.write_text("\n".join([line, *(json.dumps(content | other) for other in others), ""]))

    data = page_data(read_run_folder(folder), [read_run_folder(folder)])

    assert any("scores.jsonl has" in problem for problem in data["problems"])
    assert table_of(data, "learning", "scores")["rows"][0][0] == f"{HOSTILE}/accuracy"
    assert table_of(data, "comparison", "compared-scores")["rows"][0][5] == "cannot be distinguished"
    assert _Elements(render_page(data)).tags.count("script") == 7 and "<" not in markdown_report(data)


def test_placeholders_of_the_template_in_a_run_are_texts() -> None:
    pytest.importorskip("plotly")
    data = page_data(run_with(reward=[1.0, 2.0])) | {"title": "{{plotly}}"}

    assert json.loads(_Elements(render_page(data)).scripts[0])["title"] == "{{plotly}}"


def test_half_of_a_surrogate_pair_can_be_written() -> None:
    assert script_text({"text": "\ud83d </script>"}).encode() == b'{"text":"? \\u003c/script>"}'


def test_control_characters_of_a_terminal_do_not_reach_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_table(_log(folder) / "rollouts.csv", [{"prompt": "\x1b]0;title\x07 a|b", "reward": 1}])

    text = markdown_report(content_of(folder))

    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert "a\\|b" in text


def test_a_huge_cell_is_cut_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_table(
        _log(folder) / "rollouts.csv", [{"prompt": "x" * 10_000_000, "reward": 1}, {"prompt": "y", "reward": 2}]
    )

    data = content_of(folder)

    (_, short), (_, long) = table_of(data, "rollouts", "rollouts")["rows"]
    assert short == "y"
    assert long == f"{'x' * MAX_CELL_CHARACTERS}… (10,000,000 characters)"
    assert data["problems"] == []


def test_many_long_samples_keep_to_the_limit_and_the_oldest_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    rows = [{"step": step, "prompt": "x" * 1990, "response": "y" * 1990} for step in range(2500)]
    write_table(_log(folder) / "rollouts.csv", rows)

    table = table_of(content_of(folder), "rollouts", "rollouts")

    assert len(str(table)) < 1.1 * MAX_ROLLOUT_CHARACTERS
    assert table["rows"][0][0] == "2499"
    assert f"{2500 - len(table['rows']):,} older samples are left out" in table["note"]


def test_broken_lines_and_missing_files_are_problems_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    record = _log(folder) / "record"
    with (record / "rank_0.jsonl").open("ab") as file:
        file.write(b'{"step": 9\n\x00\xff\x93 garbage\n{"step": 9, "start": 8.0')  # the last line is being written
    (record / "rank_1.jsonl").unlink()
    (_log(folder) / "config.yaml").write_text("{[")
    with (_log(folder) / "rollouts.csv").open("ab") as file:
        file.write(b"9,half")

    data = content_of(folder)

    problems = " ".join(data["problems"])
    for name in ("rank_0.jsonl has 2 broken lines", "rank_1.jsonl cannot be read", "config.yaml", "rollouts.csv has 1"):
        assert name in problems
    assert section_of(data, "time")["charts"]


@pytest.mark.parametrize(
    "line",
    [
        '{"step":9,"start":8,"end":9,"seconds":{"call":{"actor.train":"a lot"}}}',
        '{"step":9,"start":8,"end":9,"seconds":{"call":{"actor.train":null}}}',
        '{"step":9,"start":8,"end":9,"seconds":{"call":{"x":1}},"pieces":[["x","call",{},1]]}',
        '{"step":9,"start":8,"end":9,"seconds":{"call":{"x":1}},"moves":{"x":["a",1,1]}}',
        '{"step":9,"start":8,"end":9,"seconds":{"call":{"x":1}},"peak_bytes":{"x":[]}}',
        '{"step":9,"start":NaN,"end":Infinity,"seconds":{"call":{"x":1e999}}}',
        '{"step":1e999,"start":8,"end":9,"seconds":{}}',
        "[" * 100_000,
    ],
)
def test_values_of_other_types_leave_a_report(tmp_path: Path, line: str) -> None:
    folder = write_run(tmp_path)
    with (_log(folder) / "record" / "rank_0.jsonl").open("a") as file:
        file.write(line + "\n")

    data = content_of(folder)

    assert section_of(data, "learning")["tables"]
    json.dumps(data, allow_nan=False)
    if "Infinity" not in line:
        assert "rank_0.jsonl has 1 broken line" in " ".join(data["problems"])
        assert section_of(data, "time")["charts"]


@pytest.mark.parametrize("plan", ['"a text"', "7", '{"calls": [1, 2]}', '{"calls": {"actor.train": [1]}}', "null"])
def test_a_plan_of_another_form_leaves_a_report(tmp_path: Path, plan: str) -> None:
    folder = write_run(tmp_path)
    with (_log(folder) / "record" / "events.jsonl").open("a") as file:
        file.write(f'{{"event": "plan", "step": 8, "plan": {plan}}}\n')

    assert section_of(content_of(folder), "time")["charts"]


def test_a_record_of_a_newer_version_is_a_problem_and_metrics_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_session(_log(folder) / "record", started(unix_s=2000.0, version=FORMAT + 1))

    data = content_of(folder)

    assert f"version {FORMAT + 1}" in data["problems"][0]
    assert section_of(data, "learning")["tables"]
    assert "Timeline" in section_of(data, "time")["missing"]


def test_aliases_of_a_configuration_do_not_multiply(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    (_log(folder) / "config.yaml").write_text(f"a0: &a0 [x]\n{levels}")

    assert "aliases" in " ".join(read_run_folder(folder).problems)


def test_a_session_whose_plan_was_not_read_keeps_its_times(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    events = _log(folder) / "record" / "events.jsonl"
    events.write_text("".join(line for line in events.open() if '"event":"plan"' not in line))

    data = content_of(folder)

    assert data["problems"] == []
    assert section_of(data, "time")["charts"]
    assert section_of(data, "plans")["missing"]
