"""The list of runs: every run in a line, damaged ones too, and those that got worse or slower by name."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.commands.report_command import run_runs
from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.evaluations import SCORES_FILE, EvaluationRecord
from lightning_realloc.recording.rank_recorder import METRICS_FILE, JsonLines
from lightning_realloc.scores.question_scores import QuestionScores, Response
from tests.report.runs.folders import log_metrics, write_run, write_table


def listed(*arguments: object) -> str:
    """Return what the command writes."""
    written: list[str] = []
    assert run_runs([str(one) for one in arguments], written.append) == 0
    return "".join(written)


def write_scored_run(folder: Path, *, right: int, learning_rate: float = 0.1, began_s: float = 1000.0) -> None:
    """Write a run whose latest validation answered some of 200 questions, with settings."""
    write_run(folder)
    log = folder / "log" / "version_0"
    config = f"seed_everything: 1\nmodel: {{class_path: GRPO, init_args: {{learning_rate: {learning_rate}}}}}\n"
    (log / "config.yaml").write_text(config)
    answers = {f"question {n}": [Response(n < right, "1")] for n in range(200)}
    scores = QuestionScores.from_responses(answers, None, reads_answers=False)
    lines = JsonLines(log / "record" / SCORES_FILE)
    lines.write(EvaluationRecord(name="eval/gsm", step=8, unix_s=1008.0, scores=scores).to_json())
    lines.close()
    events = log / "record" / "events.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    rows[0]["unix_s"] = began_s
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_run_has_a_line_with_its_score_and_what_differs(tmp_path: Path) -> None:
    write_scored_run(tmp_path / "a", right=100)
    log_metrics(tmp_path / "a", {"eval/gsm/accuracy": [0.7, 0.5]})
    write_scored_run(tmp_path / "b" / "deep", right=120, learning_rate=0.2)
    write_run(tmp_path / "failed", error="out of memory")
    write_table(tmp_path / "table" / "metrics.csv", [{"step": 3, "reward": 0.5}])

    text = listed(tmp_path, "--sort", "score")
    head, *lines = text.splitlines()
    assert head.split()[:3] == ["run", "began", "algorithm"]
    assert [line.split()[0] for line in lines] == [
        "b/deep/log/version_0", "a/log/version_0", "failed/log/version_0", "table"
    ]  # fmt: skip
    assert "eval/gsm 0.5 (0.43 to 0.565), best 0.7 at 1" in lines[1] and "learning_rate=0.1" in lines[1]
    assert "learning_rate=0.2" in lines[0] and "failed: out of memory" in lines[2]
    content: dict[str, Any] = json.loads(listed(tmp_path, "--json", "--sort", "score"))
    first = content["runs"][0]
    assert first["score"]["value"] == 0.6 and first["settings"] == {"model.learning_rate": "0.2"}
    assert first["plan"] == "dp2@0-1 fsdp2@0-1" and first["end"] == "ended"


def test_worse_and_slower_runs_of_equal_settings_are_named(tmp_path: Path) -> None:
    for number, (right, slow) in enumerate([(120, 1.0), (122, 1.0), (80, 3.0)]):
        folder = tmp_path / f"run{number}"
        write_scored_run(folder, right=right, began_s=1000.0 - number / 100)
        log = JsonLines(folder / "log" / "version_0" / "record" / METRICS_FILE)
        for step in range(8):
            log.write({"step": 100 + step, "unix_s": 1100.0 + step * slow, "metrics": {"reward": 0.1}})
        log.close()
    first, middle, last = (f"run{number}/log/version_0" for number in range(3))

    assert f"{middle} is worse than {last}" not in listed(tmp_path)
    sentences = json.loads(listed(tmp_path, "--json", "--baseline", first))["regressions"]
    for folder in (tmp_path / "run0", "run0", tmp_path / "run0" / "log" / "version_0" / "record"):
        assert json.loads(listed(tmp_path, "--json", "--baseline", folder))["regressions"] == sentences
    assert len(sentences) == 2
    assert f"{last} (0.4 " in sentences[0] and f"is worse than {first}" in sentences[0]
    assert sentences[1].startswith(f"{last} takes 3 s an iteration, 3.00 times as long as {first}")


def test_damaged_runs_are_listed_as_such(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "cut")
    events = tmp_path / "cut" / "log" / "version_0" / "record" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:40])
    write_run(tmp_path / "strange")
    (tmp_path / "strange" / "log" / "version_0" / "record" / "metrics.jsonl").write_bytes(b"\x00\xff{]\n" * 5)
    write_scored_run(tmp_path / "half", right=100)
    scores = tmp_path / "half" / "log" / "version_0" / "record" / SCORES_FILE
    scores.write_bytes(scores.read_bytes() + scores.read_bytes()[:100])
    lines = json.loads(listed(tmp_path, "--json"))["runs"]
    problems = {line["name"].partition("/")[0]: line["problems"] for line in lines}
    assert problems["good"] == [] and "tells of no start of a run" in problems["cut"][0]
    assert problems["cut"][0].endswith("; events.jsonl was cut in the middle of a line, which is left out")
    assert "5 broken lines" in problems["strange"][0]
    assert problems["half"] == ["scores.jsonl was cut in the middle of a line, which is left out"]


def test_mistakes_are_named_with_the_way_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    for arguments, message in {
        (tmp_path / "none",): "is no folder; give one that holds",
        (tmp_path / "a" / "log" / "version_0" / "record" / "events.jsonl",): "is no folder",
        (tmp_path, "--baseline", "b"): r"--baseline=b is none of the runs; give one of a/log/version_0",
        (tmp_path, "--limit", "0"): "--limit=0 must be at least 1",
        (tmp_path, "--order", "date"): "there is no flag --order",
    }.items():
        with pytest.raises(ConfigError, match=message):
            listed(*arguments)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        listed(tmp_path / "empty")


@pytest.mark.exhaustive
def test_two_hundred_runs_take_seconds(tmp_path: Path) -> None:
    write_scored_run(tmp_path / "0", right=100)
    log_metrics(tmp_path / "0", {f"metric {n}": [0.5] * 200 for n in range(30)})
    for number in range(1, 200):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    begin = time.perf_counter()
    assert listed(tmp_path, "--limit", 200).count("\n") >= 200
    assert time.perf_counter() - begin < 20.0
