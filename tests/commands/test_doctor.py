"""Checks of ``lightning-realloc doctor``."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lightning_realloc.commands.doctor import (
    CheckResult,
    check_cores,
    check_extras,
    check_host_memory,
    check_python,
    check_shared_memory,
    check_versions,
    judge_trial,
    run_doctor,
)
from lightning_realloc.strategies.measure import self_test
from lightning_realloc.strategies.measure.self_test import TrialResult, run_trials_here
from tests.matrices import matrix
from tests.workers import WorkerPool

REQUIREMENTS = [
    Requirement(text)
    for text in (
        "torch>=2.11",
        "numpy>=1.26",
        "peft>=0.18; extra == 'peft'",
        "vllm>=0.11; platform_system == 'Nowhere' and extra == 'vllm'",
        'pytest>=8; extra == "test"',
    )
]


def test_versions_are_compared_with_the_metadata() -> None:
    fine = list(check_versions(REQUIREMENTS, {"torch": "2.13.0+cpu", "numpy": "2.0"}.get))
    assert fine == [CheckResult("versions", "ok", "torch 2.13.0+cpu, numpy 2.0")]
    old = list(check_versions(REQUIREMENTS, {"torch": "2.5.0"}.get))
    assert [result.verdict for result in old] == ["failed", "failed"]
    assert old[0].detail == "is 2.5.0, and >=2.11 is needed; pip install 'torch>=2.11'"
    assert old[1].detail == "is not installed; pip install 'numpy>=1.26'"
    assert [result.verdict for result in check_versions([], {}.get)] == ["missing"]


def test_extras_of_users_are_listed_with_the_command_that_installs_them() -> None:
    there = [str(result) for result in check_extras(REQUIREMENTS, {"peft": "0.19.0"}.get)]
    assert there == ["extra peft        ok: peft 0.19.0"]  # vllm is for another system, test for developers
    missing = [str(result) for result in check_extras(REQUIREMENTS, {}.get)]
    assert missing == ["extra peft        missing: pip install 'lightning-realloc[peft]' (peft is not installed)"]


def test_shared_memory_says_how_to_enlarge_it(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "nowhere").verdict == "ok"
    found = check_shared_memory(tmp_path)
    assert found.verdict in ("ok", "low") and f"free in {tmp_path}" in found.detail
    assert ("--shm-size" in found.detail) == (found.verdict == "low")


def test_the_machine_is_described() -> None:
    assert check_python().verdict == "ok"
    assert "threads of torch" in check_cores().detail
    assert check_host_memory().verdict in ("ok", "low")


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (TrialResult("link", "0.01 GB/s", bytes_per_s=1e7), "slow"),
        (TrialResult("link", "2 GB/s", bytes_per_s=2e9), "ok"),
        (TrialResult("generation", "90 tokens/s"), "ok"),
        (TrialResult("link", "RuntimeError: broken", is_ok=False), "failed"),
    ],
)
def test_a_trial_gets_a_verdict(trial: TrialResult, verdict: str) -> None:
    assert judge_trial(trial).verdict == verdict


def _trials_with_a_failure() -> list[TrialResult]:
    def fail(device: torch.device) -> TrialResult:
        raise RuntimeError("the cable is cut\nmore")

    before = dict(self_test._TRIALS)
    try:
        self_test._TRIALS["link"] = fail
        return run_trials_here(torch.device("cpu"))
    finally:
        self_test._TRIALS.update(before)


def test_trials_end_with_the_first_failure(workers: WorkerPool) -> None:
    for results in workers.run(_trials_with_a_failure, world_size=2):
        assert [result.is_ok for result in results] == [True, False]
        assert results[-1] == TrialResult("link", "RuntimeError: the cable is cut", is_ok=False)


@pytest.mark.parametrize("start_method", matrix(["spawn", "forkserver"], "forkserver"))
def test_the_doctor_finds_this_machine_healthy(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:
    # The ranks of the trials are forked from the template of ``workers``: else each imports torch and Lightning.
    context = multiprocessing.get_context(start_method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    lines: list[str] = []
    code = run_doctor([], lines.append)
    assert code == 0, "".join(lines)
    assert lines[-1] == "Everything needed works.\n"
    # Trials of two ranks, which end at the first failure.
    assert [line.split()[0] for line in lines[-5:-1]] == ["all-reduce", "link", "reallocation", "generation"]
