"""The preference examples in YAML, for two iterations on the two ranks of their plans."""

from __future__ import annotations

import csv
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from examples import preference_data, sorting
from lightning_realloc.algorithms.base.role import Role
from tests.matrices import matrix
from tests.workers import WorkerPool

ROOT = Path(__file__).parents[2]
LOGGED = {
    "dpo": ("LlamaForCausalLM", {"actor/loss", "actor/margin", "val/loss", "val/accuracy", "val/margin"}),
    "kto": ("LlamaForCausalLM", {"actor/loss", "actor/kl", "val/loss", "val/margin"}),
    "orpo": ("LlamaForCausalLM", {"actor/loss", "actor/odds_ratio_loss", "val/loss", "val/accuracy"}),
    "reward_model": (
        "LlamaForSequenceClassification",
        {"reward/loss", "reward/accuracy", "val/accuracy", "val/auroc", "val/calibration_error"},
    ),
    "process_reward": ("LlamaForTokenClassification", {"reward/loss", "reward/accuracy", "val/accuracy"}),
}


def write_files(folder: Path) -> None:
    """Write the files that the configurations read, with random weights in place of the warmed-up ones."""
    rng = random.Random(0)
    preference_data.write(folder / preference_data.FOLDER, sorting.random_words(20, rng), rng)
    torch.manual_seed(0)
    LlamaForCausalLM(sorting.tiny_llama()).save_pretrained(folder / "runs/demo/warm")
    sorting.byte_tokenizer().save_pretrained(folder / "runs/demo/warm")


def fit_from_yaml(folder: str, name: str) -> None:
    """Run the command from the file's first lines, for two iterations."""
    from lightning_realloc import cli

    os.chdir(folder)
    few = ["--data.batch_size", "8", "--data.val_fraction", "0.2", "--trainer.enable_progress_bar", "false"]
    sys.argv = ["lightning-realloc", "fit", "--config", str(ROOT / f"examples/{name}.yaml"), *few]
    cli.run(sys.argv[1:])


@pytest.mark.parametrize("name", matrix(LOGGED))
def test_the_configuration_trains_validates_and_writes_the_model(
    name: str, workers: WorkerPool, tmp_path: Path
) -> None:
    architecture, names = LOGGED[name]
    write_files(tmp_path)
    workers.run(fit_from_yaml, str(tmp_path), name, world_size=2, init_process_group=False, deadline_s=120.0)
    assert AutoConfig.from_pretrained(tmp_path / "runs" / name / "trained").architectures == [architecture]
    if name == "reward_model":  # PPO loads it like this, and refuses a head that was not trained
        folder = str(tmp_path / "runs" / name / "trained")
        Role(name="reward", source=folder, trained=False, task="sequence_classification").build(seed=0)
    (metrics,) = (tmp_path / "runs" / name / "logs").rglob("metrics.csv")
    with metrics.open() as lines:
        rows = list(csv.DictReader(lines))
    assert names <= set(rows[0])
    losses = [float(row[f"{'reward' if 'reward' in name else 'actor'}/loss"]) for row in rows if row["val/loss"] == ""]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


def test_the_data_hold_right_and_wrong_answers() -> None:
    rng = random.Random(1)
    words = sorting.random_words(50, rng)
    assert all(preference_data.wrong(word, rng) != "".join(sorted(word)) for word in words)
    judged = [preference_data.judged(word, rng) for word in words]
    assert all(
        (row["completion"] == "".join(sorted(word))) == row["label"] for word, row in zip(words, judged, strict=True)
    )
    # A swap puts exactly two letters in wrong places.
    assert all(preference_data.steps(word, rng)["labels"].count(False) == 2 for word in words)
