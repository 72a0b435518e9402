"""Training with tools and environments from the command line, and from a configuration."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("trl", reason="chat templates of TRL: pip install 'lightning-realloc[parity]'")

from tests.command_lines import run_lines
from tests.commands.calling_model import calling_model
from tests.workers import WorkerPool

TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b
'''
GAME = """
from lightning_realloc import StepResult, ToolEnvironment

class Counting(ToolEnvironment):
    def __init__(self, worth: float = 1.0):
        super().__init__()
        self.worth = worth
        self.num_calls = 0

    async def step(self, message):
        self.num_calls += len(message.get("tool_calls", ()))
        return await super().step(message)

    def get_reward(self):
        return self.worth * self.num_calls
"""
SMALL = ("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_model_summary", "false")
GRPO = ("grpo", "--model", "model", "--data", "prompts.jsonl", "--n", "2", "--max-new-tokens", "200", "--batch-size",
        "2", "--steps", "1", "--max-turns", "3", *SMALL)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a model that calls a tool in every turn, prompts, tools and an environment."""
    path = tmp_path_factory.mktemp("agents")
    for part in calling_model("qwen3_instruct_2507"):
        part.save_pretrained(path / "model")
    rows = [{"prompt": f"2+{number}?", "answer": "5"} for number in range(2)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "own_tools.py").write_text(TOOLS)
    (path / "own_game.py").write_text(GAME)
    return path


def _logged(folder: Path) -> dict[str, str]:
    with (folder / "log" / "version_0" / "metrics.csv").open() as file:
        return {name: value for row in csv.DictReader(file) for name, value in row.items() if value}


def test_a_file_of_tools_is_called_in_training_from_one_line(workers: WorkerPool, folder: Path) -> None:
    (fitted,) = run_lines(
        workers, folder, [*GRPO, "--tools", "own_tools.py", "--reward", "exact", "--output", "with_tools"]
    )
    assert fitted.code == 0, fitted.errors
    logged = _logged(folder / "with_tools")
    # the answers of the third turn's calls would not be read
    assert float(logged["turns"]) == 3 and float(logged["tool_calls/add"]) == 2


def test_a_saved_configuration_takes_an_environment_with_arguments(workers: WorkerPool, folder: Path) -> None:
    flags = ("--environment", "own_game.py:Counting", "--tools", "own_tools.py", "--output", "game")
    (saved,) = run_lines(workers, folder, [*GRPO, *flags, "--save-config", "run.yaml"])
    assert saved.code == 0, saved.errors
    config: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    settings = config["model"]["init_args"]
    assert settings["environment"] == "own_game:Counting" and settings["tools"] == ["own_tools:add"]
    settings["environment"] = {"class_path": "own_game.Counting", "init_args": {"worth": 0.5}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    several = {"a": {"class_path": "own_game.Counting"}, "b": "own_game:Counting"}
    settings["environment"] = several
    settings["tools"] = [
        {"class_path": "lightning_realloc.environments.python_tool.python_tool", "init_args": {"timeout_s": 2.0}}
    ]
    (folder / "several.yaml").write_text(yaml.safe_dump(config))
    fitted, printed = run_lines(
        workers, folder, ["fit", "--config", "run.yaml"], ["fit", "--config", "several.yaml", "--print_config"]
    )
    assert fitted.code == 0, fitted.errors
    logged = _logged(folder / "game")
    assert float(logged["reward"]) == pytest.approx(0.5 * 3)  # three turns with a call each
    assert printed.code == 0, printed.errors
    parsed = yaml.safe_load(printed.output)["model"]["init_args"]["environment"]
    assert parsed["a"]["class_path"] == "own_game.Counting" and parsed["b"] == several["b"]
