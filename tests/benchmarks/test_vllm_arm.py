"""Reasons why vLLM cannot run, and detection of different weights."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import generation
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.vllm_arm import VllmArm, VllmUnavailableError
from tests.models import tiny_model

_CHILD_OF_ONE_TOKEN = """#!{python}
import json, sys
print(json.dumps({{"version": "0"}}), flush=True)
for line in sys.stdin:
    if "prompts" in json.loads(line):
        print(json.dumps({{"cpu_s": 0.5, "tokens": 1, "token_ids": [7], "logprobs": [{logprob}]}}), flush=True)
"""


def stand_in(folder: Path, logprob: float) -> Path:
    """Return an executable that responds as vLLM's child does, with one token of the given log-probability."""
    path = folder / "python"
    path.write_text(_CHILD_OF_ONE_TOKEN.format(python=sys.executable, logprob=logprob))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


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
    reason = {"none": "--vllm-python", "absent": "does not start", "without vllm": "No module named 'vllm'"}[given]
    assert reason in row["skipped"] and report.targets == []


def test_seconds_are_those_measured_by_the_child(tmp_path: Path) -> None:
    model = tiny_model("llama")
    logprob = model(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)[7].item()
    with VllmArm(stand_in(tmp_path, logprob), model, max_sequences=4) as arm:
        assert arm.generate([[5, 6]], [1]) == 0.5
        with pytest.raises(RuntimeError, match="1 tokens, the workload wants 2"):
            arm.generate([[5, 6]], [2])


def test_a_child_with_different_weights_is_detected(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with (
        VllmArm(stand_in(tmp_path, -0.01), model, max_sequences=4) as arm,
        pytest.raises(RuntimeError, match="other weights"),
    ):
        arm.generate([[5, 6]], [1])


def test_a_child_that_exits_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    with pytest.raises(VllmUnavailableError, match="ended with 3"):
        VllmArm(path, tiny_model("llama"), max_sequences=4)
