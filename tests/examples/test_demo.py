"""The demo end to end, with a few steps on two ranks, and the same run in Python and in YAML."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from examples.demo import Settings
from tests.scripts import Script
from tests.workers import rank_environments

ROOT = Path(__file__).parents[2]
SMALL_RUN = """
from pathlib import Path
from examples.demo import Settings, run

if __name__ == "__main__":
    run(Settings(
        folder=Path("demo"), num_ranks=2, num_demonstrations=32, demonstrations_per_step=16, warm_up_epochs=1,
        warm_up_layout="dp2", num_prompts=8, epochs=1, prompts_per_iteration=4, responses_per_prompt=2, num_held_out=6,
        generate_layout="tp2", infer_layout="dp2", train_layout="fsdp2",
    ))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_small_run_writes_metrics_checkpoint_and_model(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL_RUN)
    # Both ranks are forked, as torchrun would start them: one that the script starts would import everything again.
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    ranks = [
        Script([str(tmp_path / "small.py")], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)} | environment, log)
        for log, environment in zip(logs, rank_environments(2), strict=True)
    ]
    codes = [rank.wait(timeout=170) for rank in ranks]
    printed, of_second = (log.read_text() for log in logs)
    assert codes == [0, 0], printed + of_second
    assert not of_second
    assert "Held-out prompts answered right" in printed
    # Apart from results only lines of iterations: no bar in a file, no warning with Lightning's prefix or Python's.
    assert "step 2/2  reward " in printed and "it/s" not in printed
    assert "lightning-realloc report demo\n" in printed and "lightning-realloc chat demo/trained\n" in printed
    assert str(Path("demo/logs/grpo/metrics.csv")) in printed
    assert not [line for line in printed.splitlines() if ".py:" in line or "Warning" in line]

    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert summary["world_size"] == 2
    assert len(summary["reward_by_iteration"]) == 2
    assert 0.0 <= summary["reward_before"] <= 1.0
    assert 0.0 <= summary["reward_after"] <= 1.0
    assert all(summary["seconds_per_call"][kind] > 0 for kind in ("generate", "infer", "train"))
    moved = summary["reallocation"]
    # before the first evaluation, and after training before the second rollout and the last evaluation
    assert [switch["call"] for switch in moved["switches"]] == ["actor.generate"] * 3
    assert moved["bytes_moved"] == moved["bytes_minimum"] > 0
    assert Path(summary["checkpoint"]).is_dir()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "demo/trained")
    assert trained.num_parameters() > 100_000


def test_the_configuration_file_matches_the_demo() -> None:
    settings = Settings()
    config = yaml.safe_load((ROOT / "examples/grpo.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    assert config["trainer"]["strategy"]["init_args"]["plan"] == settings.plan
    assert config["trainer"]["devices"] == settings.num_ranks
    assert config["trainer"]["max_epochs"] == settings.epochs
    assert model["actor"] == settings.path("warm")
    assert model["sampling"] == {"n": settings.responses_per_prompt, "max_new_tokens": settings.max_new_tokens}
    assert model["learning_rate"] == settings.learning_rate
    assert model["lr_scheduler"]["init_args"]["total_iters"] == settings.num_iterations
    assert model["kl_coef"] == settings.kl_coef
    assert model["train_options"] == {"num_minibatches": settings.steps_per_iteration}
    assert data["data"] == settings.path("train.jsonl")
    assert data["batch_size"] == settings.prompts_per_iteration


def test_the_example_in_python_stays_under_thirty_lines() -> None:
    text = (ROOT / "examples/grpo.py").read_text()
    ast.parse(text)
    assert len(text.splitlines()) < 30
