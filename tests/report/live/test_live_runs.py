"""A dashboard's data follow the files of its runs, and the command serves them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_realloc.commands.dashboard_command import run_dashboard
from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.rank_recorder import METRICS_FILE
from lightning_realloc.report.live.live_runs import FollowedRun, LiveReport
from tests.recording.records import started, write_session
from tests.report.live.dashboards import dashboard, get


def test_data_are_made_again_when_files_change(tmp_path: Path) -> None:
    write_session(tmp_path / "record", started())
    run = FollowedRun(tmp_path)
    report = LiveReport([run], "/data.json")
    first = report.data()
    assert report.data() is not first and report.data() == first
    with (tmp_path / "record" / METRICS_FILE).open("a") as file:
        file.write(json.dumps({"step": 4, "unix_s": 1004.0, "metrics": {"reward": 0.9}}) + "\n")
    second = report.data()
    assert second.tag != first.tag and second.content != first.content
    assert b'data-follow="/data.json"' in report.page().content
    assert run.read()[1].record is not None


def test_the_command_serves_runs_together_alone_and_for_prometheus(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_session(tmp_path / name / "record", started())
    with dashboard(str(tmp_path / "a"), str(tmp_path / "b"), "--prometheus", "--token=a-secret-1") as (port, text):
        assert text.endswith("/?token=a-secret-1   Ctrl-C ends it\n")
        assert get(port, "/")[0] == 401
        status, page = get(port, "/?token=a-secret-1")
        assert status == 200 and "Comparison" in page
        status, alone = get(port, "/runs/1/data.json?token=a-secret-1")
        assert status == 200 and json.loads(alone)["title"].endswith("b")
        assert "Comparison" not in alone
        assert 'lightning_realloc_metric{name="reward"' in get(port, "/metrics?token=a-secret-1")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing is no folder"),
        (["{run}", "--token=short"], "--token must be at least 8 letters"),
        (["{run}", "--port=70000"], "--port=70000 must lie between 0 and 65535"),
        (["{run}", "--host=0.0.0.0"], "--host=0.0.0.0 can be reached from other machines"),
    ],
)
def test_mistakes_are_answered_before_anything_is_served(tmp_path: Path, arguments: list[str], message: str) -> None:
    write_session(tmp_path / "record", started())
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_dashboard([one.replace("{run}", str(tmp_path)) for one in arguments], print)
