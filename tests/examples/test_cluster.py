"""The files that start runs on clusters are well-formed, and give the command settings that it has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples/cluster"
ROOT = FOLDER.parents[1]
VARIABLES = {"NODES": "1", "DEVICES": "2", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}


def commands(path: Path) -> Iterator[list[str]]:
    """Yield every ``fit`` of a file, as a list of words."""
    if path.suffix == ".sh":
        text = re.sub(r"\\\n", " ", path.read_text())
        for line in text.splitlines():
            if not line.startswith("#") and "lightning-realloc fit" in line:
                words = shlex.split(os.path.expandvars(line).replace('"$@"', ""))
                yield words[words.index("lightning-realloc") :]
        return
    for item in _mappings(yaml.safe_load(path.read_text())):
        words = [*item.get("command", ()), *item.get("args", ())]
        if "lightning-realloc" in words:
            yield words[words.index("lightning-realloc") :]


def _mappings(value: object) -> Iterator[dict[str, list[str]]]:
    """Yield all mappings inside a value whose command is a list."""
    if isinstance(value, dict):
        if isinstance(value.get("command"), list):
            yield value
        for item in value.values():
            yield from _mappings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _mappings(item)


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh"])
def test_scripts_are_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh", "trainjob.yaml", "pytorchjob.yaml"])
def test_commands_have_settings_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_realloc.cli import main

    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    (command,) = commands(FOLDER / name)
    words = [word.replace("/workspace/gsm8k.yaml", str(ROOT / "examples/gsm8k.yaml")) for word in command[1:]]
    if not any(word.startswith("--config") for word in words):
        words += ["--config", str(ROOT / "examples/gsm8k.yaml")]
    monkeypatch.setattr(sys, "argv", ["lightning-realloc", *words, "--print_config"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["ckpt_path"] == "last"
    assert printed["trainer"]["strategy"] == "realloc"


def test_skypilot_runs_the_script_on_every_node() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    assert "examples/cluster/torchrun.sh" in task["run"]
