"""Predictions of published steps of mixtures of experts, within a band."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real_mixtures import RATIO_BAND, STEPS, main


def test_a_published_step_of_a_mixture_is_predicted_within_the_band() -> None:
    step = next(step for step in STEPS if step.model == "Qwen3-30B-A3B")
    calls = step.predicted()
    assert RATIO_BAND[0] < sum(calls.values()) / step.published < RATIO_BAND[1]
    # 2048 sequences of 3,298 tokens with 3.35e9 active parameters: 6 flops each in training, on 32 devices.
    least = 2048 * 3298 * 3.35e9 * 6 / (32 * 989e12)
    assert least < calls["actor.train"] < 10 * least


@pytest.mark.exhaustive
def test_every_published_step_is_predicted_within_the_band(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "out.json"), "--strict"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert len(report["rows"]) == len(STEPS)
    assert all(target["met"] for target in report["targets"])
