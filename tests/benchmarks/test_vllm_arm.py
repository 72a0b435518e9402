"""Reasons why vLLM cannot run, and detection of different weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import generation
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.vllm_arm import VllmArm, VllmUnavailableError
from tests.generation.vllm.stand_in import stand_in
from tests.models import tiny_model


@pytest.mark.parametrize("given", ["none", "absent", "without vllm"])
def test_skipped_rows_of_vllm_give_the_reason(given: str, tmp_path: Path) -> None:
    if given == "without vllm" and importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed beside this package")
    options = make_parser("").parse_args([])
    options.seed, options.only = 1, "tiny float32 B=32 N=128"
    options.vllm_python = {"none": None, "absent": tmp_path / "python", "without vllm": Path(sys.executable)}[given]
    report = BenchmarkReport("generation")
    generation.compare_with_vllm(options, report)
    (row,) = report.rows
    reason = {"none": "VLLM_PYTHON is not set", "absent": "does not start", "without vllm": "has no vLLM"}[given]
    assert reason in row["skipped"] and report.targets == []


def test_without_an_interpreter_the_benchmark_prints_why_the_rows_of_vllm_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert generation.main(["--vllm-alone", "--only", "tiny float32 B=32 N=8x4"]) == 0
    assert "VLLM_PYTHON is not set" in " ".join(capsys.readouterr().out.split())


def test_the_variable_names_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PYTHON", "/nowhere/python")
    generation.main(["--vllm-alone", "--only", "tiny float32 B=32 N=8x4"])
    assert "/nowhere/python does not start" in " ".join(capsys.readouterr().out.split())


def test_an_arm_with_the_models_log_probabilities_returns_cpu_seconds(tmp_path: Path) -> None:
    model = tiny_model("llama")
    logprob = model(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)[7].item()
    program = Path(stand_in(tmp_path))  # it continues 6 with 7
    program.write_text(program.read_text().replace("[-1.0]", f"[{logprob}]"))
    with VllmArm(program, model, max_sequences=4) as arm:
        assert 0 < arm.hand_over() < 60
        assert 0 < arm.generate([[5, 6]], [1]) < 60


def test_different_weights_are_detected(tmp_path: Path) -> None:
    with (
        VllmArm(Path(stand_in(tmp_path)), tiny_model("llama"), max_sequences=4) as arm,
        pytest.raises(RuntimeError, match="other weights"),
    ):
        arm.generate([[5, 6]], [1])


def test_a_child_that_exits_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    with pytest.raises(VllmUnavailableError, match="ended with exit code 3"):
        VllmArm(path, tiny_model("llama"), max_sequences=4)
