from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_realloc.recording.events import PlanInstalled
from lightning_realloc.report.runs.comparison import comparison_section, group_runs
from lightning_realloc.report.runs.page import page_data
from lightning_realloc.report.runs.run_folder import read_run_folder
from tests.recording.records import started, write_session
from tests.report.runs.folders import log_metrics, log_scores, section_of, table_of, write_run

STEPS = np.arange(20.0)


def _run(folder: Path, reward: float, *, seed: int, rate: float = 1e-6) -> Path:
    """Write a run with rewards that rise to a value, and its configuration."""
    write_run(folder)
    (folder / "log" / "version_0" / "record" / "metrics.jsonl").unlink()
    log_metrics(folder, {"reward": np.minimum(STEPS / 10, 1.0) * reward})
    config = {
        "seed_everything": seed,
        "trainer": {"default_root_dir": str(folder), "max_steps": 20},
        "model": {"class_path": "GRPO", "init_args": {"learning_rate": rate}},
    }
    (folder / "log" / "version_0" / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_runs_that_differ_in_their_seed_alone_are_a_group(tmp_path: Path) -> None:
    folders = [
        _run(tmp_path / "a", 1.0, seed=0),
        _run(tmp_path / "b", 2.0, seed=1),
        _run(tmp_path / "c", 4.0, seed=0, rate=1e-5),
    ]

    groups = group_runs([read_run_folder(folder) for folder in folders])

    assert [[Path(run.name).name for run in group.runs] for group in groups] == [["a", "b"], ["c"]]


def test_runs_without_a_configuration_are_never_a_group(tmp_path: Path) -> None:
    runs = [read_run_folder(write_run(tmp_path / name)) for name in "ab"]

    assert [len(group.runs) for group in group_runs(runs)] == [1, 1]


def test_a_group_has_mean_and_spread_and_other_runs_their_difference(tmp_path: Path) -> None:
    runs = [
        read_run_folder(_run(tmp_path / "a", 1.0, seed=0)),
        read_run_folder(_run(tmp_path / "b", 2.0, seed=1)),
        read_run_folder(_run(tmp_path / "c", 4.0, seed=0, rate=1e-5)),
    ]

    data = page_data(runs[0], runs[1:])

    ((name, first, other, difference),) = (
        row for row in table_of(data, "comparison", "compared")["rows"] if row[0] == "reward"
    )
    assert name == "reward"
    assert first["value"] == pytest.approx(1.5)  # mean of 1 and 2
    assert first["text"] == "1.5 ± 0.5"
    assert (other["value"], difference["value"]) == (pytest.approx(4.0), pytest.approx(2.5))
    chart = next(one for one in section_of(data, "comparison")["charts"] if one["title"] == "Reward (reward)")
    assert chart["series"][0]["low"][-1] == 1.0
    assert chart["series"][0]["high"][-1] == 2.0


def test_the_settings_that_differ_come_first(tmp_path: Path) -> None:
    runs = [
        read_run_folder(_run(tmp_path / "a", 1.0, seed=0)),
        read_run_folder(_run(tmp_path / "b", 2.0, seed=1)),
        read_run_folder(_run(tmp_path / "c", 4.0, seed=0, rate=1e-5)),
    ]

    data = page_data(runs[0], runs[1:])

    assert data["sections"][0]["id"] == "differences"
    assert table_of(data, "differences", "differences")["rows"] == [
        ["model.learning_rate", "1e-06", "1e-05"],
        ["seed_everything", "0, 1", "0"],
    ]
    assert "No setting" in section_of(page_data(runs[0], runs[:1]), "differences")["missing"]


def test_secrets_in_settings_are_not_shown(tmp_path: Path) -> None:
    runs = []
    for name, number in (("a", 1), ("b", 2)):
        folder = _run(tmp_path / name, 1.0, seed=0)
        secret = f"hunter{number}"
        reward = {
            "url": f"http://user:{secret}@judge{number}/score?api_key={secret}",
            "urls": [f"http://user:{secret}@judge{number}"],
            "headers": {"X-Key": secret},
            "api_key": secret,
            "bytes_per_token": number,
        }
        (folder / "log" / "version_0" / "config.yaml").write_text(yaml.safe_dump({"reward": reward}, sort_keys=False))
        runs.append(read_run_folder(folder))

    data = page_data(runs[0], runs[1:])

    assert table_of(data, "differences", "differences")["rows"] == [
        ["reward.url", "http://judge1/score?***", "http://judge2/score?***"],
        ["reward.urls", '["http://judge1"]', '["http://judge2"]'],
        ["reward.bytes_per_token", "1", "2"],
    ]
    assert "hunter" not in json.dumps(data)


def test_settings_of_runs_without_a_configuration_are_those_of_their_records(tmp_path: Path) -> None:
    first = read_run_folder(write_run(tmp_path / "a"))
    write_session(
        tmp_path / "b" / "record",
        replace(started(), precision="bf16-mixed"),
        [PlanInstalled(step=0, plan={"calls": {"actor.generate": "tp2@0-1", "actor.train": "fsdp2@0-1"}})],
    )

    data = page_data(first, [read_run_folder(tmp_path / "b")])

    assert table_of(data, "differences", "differences")["rows"] == [
        ["precision", "32-true", "bf16-mixed"],
        ["plan.actor.generate", "dp2@0-1", "tp2@0-1"],
        ["plan.actor.train.layout", "fsdp2@0-1", "–"],
        ["plan.actor.train.micro_batch", "4", "–"],
        ["plan.actor.train", "–", "fsdp2@0-1"],
    ]


def test_seconds_of_calls_stand_next_to_each_other(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a", 1.0, seed=0)
    shutil.copytree(folder, tmp_path / "b")

    section = comparison_section([read_run_folder(folder), read_run_folder(tmp_path / "b")])

    rows = {row[0]: row for row in section["tables"][1]["rows"]}
    assert rows["actor.train"][1]["text"] == "400 ms"


def _scored(folder: Path, *, seed: int, better: float = 0.0, names: str = "q", number: int = 80) -> Path:
    """Write a run that answers questions, more of them rightly by ``better``."""
    difficulties = np.random.default_rng(5).beta(0.6, 0.6, number)
    chances = {f"{names}{place}": min(1.0, chance + better) for place, chance in enumerate(difficulties)}
    log_scores(write_run(folder), "val", chances, seed=seed)
    return folder


def test_runs_of_one_setting_cannot_be_distinguished_and_a_better_one_can(tmp_path: Path) -> None:
    runs = [
        read_run_folder(_scored(tmp_path / name, **options))  # type: ignore[arg-type]
        for name, options in {
            "first": {"seed": 0},
            "same": {"seed": 1},
            "better": {"seed": 2, "better": 0.3},
            "others": {"seed": 3, "names": "other"},
            "more": {"seed": 4, "number": 100},
            "few": {"seed": 4, "number": 20},
        }.items()
    ]
    data = page_data(runs[0], runs[1:])
    _, *found = section_of(data, "comparison")["sentences"][1:]
    assert len(found) == 5
    same, better, others, more, few = found
    assert re.search(
        r"val/accuracy: \S+same \(0.\d+ \(0.\d+ to 0.\d+\)\) and \S+first \(.*\) cannot be distinguished; difference "
        r"[+-]0.\d+ \(-0.\d+ to \+0.\d+\), paired bootstrap over 80 questions, after 8 iterations.$", same,
    )  # fmt: skip
    assert re.search(r"better \(.*\) is better than \S+first .*; difference \+0.\d+ \(\+0.\d+ to \+0.\d+\)", better)
    assert "unpaired bootstrap, since the questions differ: 0 of 80 and 80 questions are the same" in others
    assert "over the common questions, since others differ: 80 of 100 and 80 questions are the same" in more
    assert few.endswith("With fewer than 50 questions, intervals are too narrow.")
    rows = table_of(data, "comparison", "compared-scores")["rows"]
    assert [row[0] for row in rows] == ["val/accuracy", "val/pass@4", "val/maj@4"] * 5
    assert [row[5] for row in rows[:6:3]] == ["cannot be distinguished", "better"]
    assert [row[6] for row in rows[::3]] == ["paired, 80 questions"] * 2 + ["unpaired"] + [
        "paired, 80 questions", "paired, 20 questions"
    ]  # fmt: skip
    reverse = section_of(page_data(runs[2], runs[:1]), "comparison")["sentences"]
    assert any("is worse than" in one for one in reverse)


def _evaluated(folder: Path, number: int, *, seed: int) -> Path:
    """Write the output of ``eval``: scores of questions, of which the first ones are easy, and nothing else."""
    write_run(folder)
    chances = {f"q{place}": float(place < 30) for place in range(number)}
    log_scores(folder, "eval/gsm", chances, seed=seed)
    log = folder / "log" / "version_0"
    for file in (*log.glob("*.csv"), *(one for one in (log / "record").iterdir() if one.name != "scores.jsonl")):
        file.unlink()
    return folder


def test_scores_and_difference_are_of_the_same_questions(tmp_path: Path) -> None:
    runs = [read_run_folder(_evaluated(tmp_path / str(number), number, seed=number)) for number in (30, 60)]
    data = page_data(runs[0], runs[1:])
    verdict = section_of(data, "comparison")["sentences"][-1]
    values = [float(one) for one in re.findall(r" \(([\d.]+) \(", verdict)]
    assert values == [1.0, 1.0] and "difference +0 " in verdict and "30 of 60 and 30 questions are the same" in verdict


def test_the_report_of_an_evaluation_has_no_sections_of_training(tmp_path: Path) -> None:
    data = page_data(read_run_folder(_evaluated(tmp_path, 60, seed=0)))
    assert [one["title"] for one in data["sections"]] == ["Learning"]
    assert "Timeline" not in json.dumps(data)


def test_settings_are_not_compared_with_a_run_that_left_none(tmp_path: Path) -> None:
    first, second = _run(tmp_path / "a", 1.0, seed=0), _run(tmp_path / "b", 1.0, seed=0, rate=1e-5)
    runs = [read_run_folder(one) for one in (first, second, _evaluated(tmp_path / "scores", 60, seed=0))]
    differences = section_of(page_data(runs[0], [runs[2]]), "differences")
    assert not differences["tables"] and differences["missing"].startswith("Without settings, ")
    rows = table_of(page_data(runs[0], runs[1:]), "differences", "differences")["rows"]
    assert [row[0] for row in rows] == ["model.learning_rate"]
