"""The example with ready-made rewards, for two iterations on two ranks."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest

from tests.examples.test_ppo import ROOT, write_demo_files
from tests.workers import WorkerPool

CONFIG = ROOT / "examples/verifiers.yaml"


def fit_from_yaml(folder: str) -> None:
    """Run the command from the file's first lines, for two iterations of two prompts."""
    from lightning_realloc import cli

    os.chdir(folder)
    few = ["--data.batch_size", "2", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    sys.argv = ["lightning-realloc", "fit", "--config", str(CONFIG), *few]
    cli.run(sys.argv[1:])


@pytest.mark.exhaustive
def test_every_reward_is_logged_and_they_add_up(workers: WorkerPool, tmp_path: Path) -> None:
    write_demo_files(tmp_path)
    workers.run(fit_from_yaml, str(tmp_path), world_size=2, init_process_group=False, deadline_s=120.0)
    (file,) = (tmp_path / "runs/verifiers/logs").rglob("metrics.csv")
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["reward"]]
    assert len(rows) == 2
    for row in rows:
        parts = [float(row[f"reward/{name}"]) for name in ("exact_match", "Regex", "OverlongPenalty")]
        assert float(row["reward"]) == pytest.approx(parts[0] + 0.1 * parts[1] + 0.5 * parts[2], abs=1e-5)
        assert parts[2] < 0  # random weights generate up to the length limit
    assert (tmp_path / "runs/verifiers/trained/config.json").exists()
