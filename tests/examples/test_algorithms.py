"""Every configuration of a policy algorithm in examples, for one or two steps on one rank or on two."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import lightning_realloc
from examples import sorting
from tests.examples.test_ppo import ROOT, write_demo_files
from tests.matrices import matrix, selected
from tests.workers import WorkerPool

NAMES = (
    "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "remax", "best_of_n", "online_dpo", "distillation",
    "pipeline", "context_parallel",
)  # fmt: skip
CONFIGS = [ROOT / f"examples/{name}.yaml" for name in NAMES]
REWARD = "tests.strategies.runs:low_tokens"
"""A reward that random weights earn; otherwise dynamic sampling and best-of-n would never fill a batch."""


def fit(folder: str, configs: Sequence[str]) -> None:
    """Run the command from the first lines of each file, for two batches of two prompts."""
    from lightning_realloc import cli

    environment = dict(os.environ)
    os.chdir(folder)
    for config in configs:
        os.environ.update(environment)  # Lightning clears it after a run
        few = ["--data.batch_size", "2", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
        few += ["--trainer.devices", os.environ["WORLD_SIZE"]]
        text = Path(config).read_text()
        few += ["--model.reward", REWARD] if "reward:" in text else []
        few += ["--model.min_reward", "null"] if "min_reward:" in text else []
        sys.argv = ["lightning-realloc", "fit", "--config", config, *few]
        cli.run(sys.argv[1:])


@pytest.fixture(scope="module")
def trained(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return the folder in which the selected configurations were run."""
    folder = tmp_path_factory.mktemp("examples")
    write_demo_files(folder)
    torch.manual_seed(1)
    LlamaForCausalLM(sorting.tiny_llama()).save_pretrained(folder / "runs/demo/random")
    sorting.byte_tokenizer().save_pretrained(folder / "runs/demo/random")
    configs = [str(config) for config in selected(request, "config")]
    workers.run(fit, str(folder), configs, world_size=2, init_process_group=False, deadline_s=170.0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("config", matrix(CONFIGS), ids=lambda config: config.stem)
def test_a_configuration_trains_and_writes_the_actor(trained: Path, config: Path) -> None:
    actor = "random" if config.stem == "distillation" else "warm"
    before, after = (
        AutoModelForCausalLM.from_pretrained(trained / folder).state_dict()
        for folder in (f"runs/demo/{actor}", f"runs/{config.stem}/trained")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    (metrics,) = (trained / f"runs/{config.stem}/logs").rglob("metrics.csv")
    assert {"actor/loss", "response_length"} <= set(metrics.read_text().splitlines()[0].split(","))


def test_there_is_a_configuration_for_every_policy_algorithm() -> None:
    configured: set[Any] = {yaml.safe_load(config.read_text())["model"]["class_path"] for config in CONFIGS}
    names = {"GRPO", "RLOO", "ReinforcePlusPlus", "ReMax", "BestOfN", "OnlineDPO", "OnPolicyDistillation"}
    assert configured == {f"lightning_realloc.{name}" for name in names}
    assert names <= set(lightning_realloc.__all__)
