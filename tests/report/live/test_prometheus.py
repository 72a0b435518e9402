"""Prometheus's own parser reads the figures of a run's latest iteration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_realloc.recording.reader import read_run
from lightning_realloc.report.live.prometheus import exposition
from tests.recording.records import started, write_session


def test_the_latest_iteration_is_exposed_with_labels(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    write_session(tmp_path, started(), steps=4)
    text = exposition({'a "run"': read_run(tmp_path)}).decode()
    samples = [one for family in parser.text_string_to_metric_families(text) for one in family.samples]
    found = {
        (one.name.removeprefix("lightning_realloc_"), *(one.labels[key] for key in sorted({*one.labels} - {"run"}))): (
            one.value
        )
        for one in samples
    }
    assert found["step",] == 4
    assert found["updated_seconds",] == 1004.0
    assert found["metric", "reward"] == 0.4
    assert found["idle_share", "1"] == pytest.approx(0.1)
    assert found["seconds", "call", "actor.train", "0"] == pytest.approx(0.4)
    assert found["seconds", "move", "-> actor.generate", "1"] == pytest.approx(0.1)
    assert found["peak_bytes", "actor.train", "0"] == 400
    assert 'run="a \\"run\\""' in text


def test_the_dashboard_for_grafana_asks_for_figures_that_exist(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    write_session(tmp_path, started())
    exposed = exposition({"run": read_run(tmp_path)}).decode()
    panels = json.loads((Path(__file__).parents[3] / "examples" / "grafana.json").read_text())["panels"]
    asked = {name for panel in panels for name in re.findall(r"lightning_realloc_\w+", panel["targets"][0]["expr"])}
    assert asked == set(re.findall(r"# TYPE (\w+) gauge", exposed)) - {"lightning_realloc_step"}
