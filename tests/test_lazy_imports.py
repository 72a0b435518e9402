"""Parts of the package that nothing imports or reads before they are needed, found in one fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from lightning_realloc.cli import ReallocCLI
from lightning_realloc.commands.short_run import COMMANDS
from lightning_realloc.entry import OTHER_COMMANDS, SUMMARIES, help_text

SCRIPT = """
import json, sys
found = {}

sys.argv = ["lightning-realloc", "--help"]
from lightning_realloc import entry
found["exit code of help"] = entry.run_command_line()
sys.argv = ["lightning-realloc", "--version"]
entry.run_command_line()
found["help and version"] = sorted({"torch", "lightning", "transformers", "jsonargparse"} & set(sys.modules))

def loaded(part):
    return [name for name in sys.modules if part in name]

import lightning as L
from lightning_realloc import DPO, GRPO, SamplingParams, setting_hints
from tests.models import byte_tokenizer, tiny_model
from tests.strategies.runs import Batches, low_tokens
sampling = SamplingParams(n=2, max_new_tokens=4)
module = GRPO(tiny_model("llama"), low_tokens, kl_coef=0.0, tokenizer=byte_tokenizer(), sampling=sampling)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(accelerator="cpu", devices=1, strategy="realloc", max_steps=1, **quiet).fit(module, Batches(1))
found["fit"] = sorted(name for name in sys.modules if name.startswith("lightning_realloc."))

tables = setting_hints._read_tables.cache_info
DPO("x", beta=0.3)
found["hints"] = tables().currsize
try:
    SamplingParams(max_tokens=2)
except ValueError:
    found["hints after an unknown setting"] = tables().currsize

import lightning_realloc.cli
found["command line"] = loaded("lightning_realloc.report")

import lightning_realloc.rewards.ray_reward
found["ray"] = "ray" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Mapping[str, Any]:
    """What the script had loaded after each step."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *_, version, found = done.stdout.splitlines()
    return json.loads(found) | {"version": version}  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", [
    "report", "recording", "cli", "strategies.ray", "strategies.checkpoints.remote",
    "environments.adapters", "environments.python_tool", "rewards.sandbox", "rewards.workers",
    "generation.speculative", "generation.rebalance", "generation.vllm",
])  # fmt: skip
def test_a_small_fit_imports_no_part_that_a_setting_asks_for(found: Mapping[str, Any], part: str) -> None:
    assert "lightning_realloc.generation.engine" in found["fit"]
    assert [name for name in found["fit"] if f"{name}.".startswith(f"lightning_realloc.{part}.")] == []


def test_hints_are_loaded_only_after_an_unknown_setting(found: Mapping[str, Any]) -> None:
    assert found["hints"] == 0
    assert found["hints after an unknown setting"] == 1


def test_the_command_line_imports_no_report_before_a_command_asks_for_one(found: Mapping[str, Any]) -> None:
    assert found["command line"] == []


def test_nothing_imports_ray_before_it_is_asked_for(found: Mapping[str, Any]) -> None:
    assert found["ray"] is False


def test_help_and_version_import_no_torch_and_name_every_command(found: Mapping[str, Any]) -> None:
    assert found["exit code of help"] == 0 and found["help and version"] == []
    assert found["version"].startswith("lightning-realloc ")


def test_reports_import_no_torch_and_end_a_mistake_with_one_line(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.argv = ['lightning-realloc', 'report', {str(tmp_path)!r}]\n"
        "from lightning_realloc.entry import run_command_line\n"
        "import lightning_realloc.commands.dashboard_command\n"
        "print(run_command_line(), sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 []\n" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_help_names_every_command() -> None:
    named = [name for commands in SUMMARIES.values() for name in commands]
    assert sorted(named) == sorted([*COMMANDS, *OTHER_COMMANDS, *ReallocCLI.subcommands()])
    assert all(f"  {name} " in help_text() for name in named)
    assert all(len(line) <= 100 for line in help_text().splitlines())


def test_the_functions_of_other_commands_exist() -> None:
    for path in OTHER_COMMANDS.values():
        assert callable(resolve_name(f"lightning_realloc.{path}"))
