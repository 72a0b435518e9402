"""Fitted constants and targets of the comparison with ReaL's figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.real_figures import COLUMNS, find_plan, fit, main, predict


def test_two_constants_fit_the_column_to_its_measurements() -> None:
    efficiency = fit()
    assert 0.05e-3 < efficiency.collective_launch_s < 1e-3  # some launches, and eight hosts that wait for each other
    assert 0.4 < efficiency.matmul_share < 0.95
    for cell in COLUMNS[0].cells:
        assert predict(COLUMNS[0], cell.response_tokens, efficiency) == pytest.approx(cell.baseline, rel=0.05)


@pytest.mark.exhaustive
def test_every_other_cell_is_a_prediction_with_a_target(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "out.json"), "--strict", "--evaluations", "0"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    uses = Counter((row["plan"], row["use"]) for row in report["rows"])
    assert uses["baseline", "fitted"] == 3
    assert (uses["baseline", ""], uses["searched", ""]) == (9, 12)
    assert uses["baseline", "held out"] == uses["searched", "held out"] == 9
    assert all(target["met"] for target in report["targets"])


def test_a_column_names_the_model_that_differs() -> None:
    models = {column.name: (column.model("actor"), column.model("critic")) for column in COLUMNS}
    assert models["actor 70B"] == ("Llama-2-70b-hf", "Llama-2-7b-hf")
    assert models["critic 34B"] == ("Llama-2-7b-hf", "CodeLlama-34b-hf")


@pytest.mark.exhaustive
def test_the_found_plan_is_faster_than_the_documented_pattern_at_the_same_prices() -> None:
    efficiency = fit()
    found = find_plan(COLUMNS[0], 128, efficiency, 500)
    assert found.seconds < predict(COLUMNS[0], 128, efficiency, "searched")
    assert all(plan.gradient_checkpointing for name, plan in found.plan.calls if name.endswith("train"))
