"""The PPO examples in Python and in YAML, for two iterations on the four ranks of their plans."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from examples import sorting
from tests.workers import WorkerPool

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/05_ppo_four_models.py"
CONFIG = ROOT / "examples/ppo.yaml"


def run_script() -> tuple[int, dict[str, str], dict[str, float]]:
    """Run two iterations; return the step count, the plan of the run, and the metrics logged last."""
    example = importlib.import_module("examples.05_ppo_four_models")
    trainer = example.main(num_iterations=2)
    plan = trainer.strategy.plan.to_mapping()["calls"]
    assert plan == example.PLAN["calls"]
    return trainer.global_step, plan, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.exhaustive
def test_the_script_runs_its_plan_on_four_ranks(workers: WorkerPool) -> None:
    everyone = workers.run(run_script, init_process_group=False, deadline_s=120.0)
    steps, plans, logged = zip(*everyone, strict=True)
    assert set(steps) == {2}
    assert set(plans[0]) == {f"{role}.infer" for role in ("critic", "reference", "reward")} | {
        "actor.generate", "actor.train", "critic.train"
    }  # fmt: skip
    names = {"score", "kl_k3", "explained_variance", "actor/loss", "critic/loss", "idle_share"}
    names |= {f"seconds/{call}" for call in plans[0]}
    assert names <= set(logged[0])
    assert all(metrics["critic/loss"] == logged[0]["critic/loss"] for metrics in logged)
    assert logged[0]["kl_k3"] > 0  # the actor has changed


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 80


def write_demo_files(folder: Path) -> None:
    """Write the files that the configuration reads, with random weights in place of the warmed-up ones."""
    demo = folder / "runs/demo"
    demo.mkdir(parents=True)
    for name, words in (("train", ("hbqe", "zyx", "cab", "wave")), ("held_out", ("dog",))):
        sorting.write_jsonl(demo / f"{name}.jsonl", [sorting.problem(word) for word in words])
    torch.manual_seed(0)
    LlamaForCausalLM(sorting.tiny_llama()).save_pretrained(demo / "warm")
    sorting.byte_tokenizer().save_pretrained(demo / "warm")


def fit_from_yaml(folder: str) -> None:
    """Run the command from the file's first lines, for two iterations of two prompts."""
    from lightning_realloc import cli

    os.chdir(folder)
    few = ["--data.batch_size", "2", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    sys.argv = ["lightning-realloc", "fit", "--config", str(CONFIG), *few]
    cli.run(sys.argv[1:])


@pytest.mark.exhaustive
def test_the_configuration_trains_logs_and_writes_the_actor(workers: WorkerPool, tmp_path: Path) -> None:
    write_demo_files(tmp_path)
    workers.run(fit_from_yaml, str(tmp_path), init_process_group=False, deadline_s=120.0)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/ppo/trained")
    assert trained.num_parameters() > 100_000
    (metrics,) = (tmp_path / "runs/ppo/logs").rglob("metrics.csv")
    header = metrics.read_text().splitlines()[0].split(",")
    assert {"score", "kl_k1", "kl_coef", "critic/loss", "val/score"} <= set(header)
