"""Folders of runs for tests of reports, without training."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_realloc.recording.evaluations import SCORES_FILE, EvaluationRecord
from lightning_realloc.recording.events import PlanInstalled, RunEnded
from lightning_realloc.recording.rank_recorder import METRICS_FILE, JsonLines
from lightning_realloc.report.runs.charts import Json
from lightning_realloc.report.runs.page import page_data
from lightning_realloc.report.runs.run_folder import RunFolder, read_run_folder
from lightning_realloc.report.runs.series import Series
from lightning_realloc.scores.question_scores import QuestionScores, Response
from tests.recording.records import PREDICTION, started, write_session

PLAN = {"calls": {"actor.generate": "dp2@0-1", "actor.train": {"layout": "fsdp2@0-1", "micro_batch": 4}}}
HOSTILE = "<script>document.title='run'</script></script><!-- <img src=x onerror=alert(1)>"


def write_run(folder: Path, *, steps: int = 8, error: str | None = None) -> Path:
    """Write a run with a record, a configuration and samples, and return its folder."""
    record = folder / "log" / "version_0" / "record"
    events = [PlanInstalled(step=0, plan=PLAN), PREDICTION, RunEnded(unix_s=1009.0, step=steps, error=error)]
    write_session(record, started(), events, steps=steps)
    write_table(record.parent / "metrics.csv", [{"step": step, "reward": 0.1} for step in range(steps)])
    samples = [
        {"step": step, "prompt": f"question {step}", "response": f"answer {step}", "reward": step / 10}
        for step in range(steps)
    ]
    write_table(record.parent / "rollouts.csv", samples)
    return folder


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def talk(step: int, *, failure: str | None = None) -> dict[str, Any]:
    """Return a conversation of an iteration as `RolloutTable` writes it: a call of a tool, and an answer."""
    function = {"name": "add", "arguments": {"a": 1, "b": "zwei ü"}}
    calling = {
        "role": "assistant",
        "content": "",
        "reasoning_content": " I add. ",
        "tool_calls": [{"function": function}],
    }
    answer, last = {"role": "tool", "name": "add", "content": "3"}, {"role": "assistant", "content": "It is 3."}
    return {
        "step": step, "reward": 1.5, "score": None, "finish_reason": "stop",
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}, {"type": "image"}]}],
        "messages": [calling, answer, last],
        "seconds": [0.5, 0.25], "rewards": [0.5, None], "metrics": {}, "failure": failure,
    }  # fmt: skip


def write_talks(folder: Path, talks: Sequence[Mapping[str, Any]]) -> None:
    """Write conversations of a run that `write_run` has written."""
    lines = JsonLines(folder / "log" / "version_0" / "rollouts.jsonl")
    for one in talks:
        lines.write(one)
    lines.close()


def log_metrics(folder: Path, values: Mapping[str, Sequence[float]]) -> None:
    """Append metrics of the iterations from 1 on to a record that `write_run` has written."""
    lines = JsonLines(folder / "log" / "version_0" / "record" / METRICS_FILE)
    for at in range(len(next(iter(values.values())))):
        row = {name: float(column[at]) for name, column in values.items()}
        lines.write({"step": at + 1, "unix_s": 1000.5 + at, "metrics": row})
    lines.close()


def log_scores(folder: Path, name: str, chances: Mapping[str, float], *, seed: int, n: int = 4, step: int = 8) -> None:
    """Append an evaluation to a record that `write_run` has written: n responses to each question, which are right with
    its chance."""
    generator = np.random.default_rng(seed)
    asked = {
        question: [Response(right, right) for right in (generator.random(n) < chance).tolist()]
        for question, chance in chances.items()
    }
    scores = QuestionScores.from_responses(asked, (n,), reads_answers=True)
    lines = JsonLines(folder / "log" / "version_0" / "record" / SCORES_FILE)
    lines.write(EvaluationRecord(name=name, step=step, unix_s=1008.5, scores=scores).to_json())
    lines.close()


def run_with(**metrics: Sequence[float]) -> RunFolder:
    """Return a run with these metrics, and no record; ``__`` in a name stands for a slash."""
    series = {}
    for key, values in metrics.items():
        name = key.replace("__", "/")
        series[name] = Series(name, np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64))
    return RunFolder(name="run", log_folder=Path("run"), record=None, metrics=series)


def content_of(folder: Path) -> Json:
    """Return the content of the report of a folder."""
    return page_data(read_run_folder(folder))


def section_of(data: Json, key: str) -> Json:
    """Return a section by its id."""
    return next(one for one in data["sections"] if one["id"] == key)


def table_of(data: Json, section: str, key: str) -> Json:
    """Return a table by its id."""
    return next(one for one in section_of(data, section)["tables"] if one["id"] == key)
