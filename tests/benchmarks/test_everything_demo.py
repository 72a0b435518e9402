"""Tiny run of the demo with drafting and sample rebalancing, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.everything import OFF, ON, Run, compare
from benchmarks.everything_demo import run_arm
from examples.demo import Settings
from tests.examples.test_ppo import write_demo_files
from tests.workers import WorkerPool


def run_both(folder: str) -> tuple[Run, Run]:
    """Run both arms on this rank."""
    settings = Settings(
        folder=Path(folder) / "runs/demo", num_prompts=4, epochs=2, prompts_per_iteration=2, responses_per_prompt=2,
        num_ranks=2, generate_layout="tp2", infer_layout="dp2", train_layout="fsdp2",
    )  # fmt: skip
    return run_arm(OFF, settings), run_arm(ON, settings)


@pytest.mark.exhaustive
def test_a_tiny_run_is_the_same_in_both_arms(workers: WorkerPool, tmp_path: Path) -> None:
    write_demo_files(tmp_path)
    (off, on), _ = workers.run(run_both, str(tmp_path), world_size=2, deadline_s=120.0)
    assert compare(on, off) is None
    assert [len(tokens) for tokens in off.tokens] == [4] * 4  # each sample once, from both ranks together
