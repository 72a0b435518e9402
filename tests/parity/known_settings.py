"""Stored lists of the settings of TRL, OpenRLHF and verl, with the version that each was read from.

To store newer ones, then to write the documentation's tables::

    python -m tests.parity.known_settings trl
    python -m tests.parity.known_settings openrlhf 0.11.2 openrlhf/cli/train_ppo_ray.py
    python -m tests.parity.known_settings verl 0.9.1 verl/trainer/config/_generated_ppo_trainer.yaml
    python -m tests.parity.setting_tables
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
ALL = "all"
"""Trainers of a setting that every trainer of TRL has."""


@cache
def known() -> Mapping[str, Any]:
    """Return for each library its ``version`` and ``settings``; those of TRL by trainer, with ``arguments``."""
    stored: Mapping[str, Any] = yaml.safe_load(FILE.read_text())
    return stored


def trainers_of_trl() -> Mapping[str, str]:
    """Return every setting of TRL's configurations, with the trainers that have it."""
    return {name: trainers for trainers, names in known()["trl"]["settings"].items() for name in names}


def installed_trl() -> dict[str, Any]:
    """Return what TRL, as it is installed, would be stored as."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # else the second import warns
    import trl
    from trl.experimental.async_grpo import AsyncGRPOConfig

    trainers = {
        "GRPO": trl.GRPOConfig,
        "RLOO": trl.RLOOConfig,
        "async GRPO": AsyncGRPOConfig,
        "distillation": trl.DistillationConfig,
        "SFT": trl.SFTConfig,
        "reward": trl.RewardConfig,
        "DPO": trl.DPOConfig,
        "KTO": trl.KTOConfig,
    }
    found: dict[str, list[str]] = {}
    for trainer, config in trainers.items():
        for field in dataclasses.fields(config):
            found.setdefault(field.name, []).append(trainer)
    for script_config in (trl.ModelConfig, trl.DatasetMixtureConfig):
        for field in dataclasses.fields(script_config):
            found.setdefault(field.name, []).append(script_config.__name__)
    by_trainers: dict[str, list[str]] = {}
    for name, having in sorted(found.items()):
        by_trainers.setdefault(ALL if set(trainers) <= set(having) else ", ".join(having), []).append(name)
    classes = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer, trl.SFTTrainer, trl.RewardTrainer,
               trl.DPOTrainer, trl.KTOTrainer)  # fmt: skip
    arguments = {name for cls in classes for name in inspect.signature(cls).parameters}
    return {"version": trl.__version__, "arguments": sorted(arguments), "settings": by_trainers}


def flags_of_openrlhf(script: str) -> list[str]:
    """Return the flags that a script adds to its parser, without dashes; a loop over ``prefix`` is unrolled."""
    flags = []
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            name = ast.unparse(node.args[0]).removeprefix("f").strip("'\"").removeprefix("--")
            roles = ("actor", "critic") if "{prefix}" in name else ("",)
            flags += [name.replace("{prefix}", role) for role in roles]
    return sorted(flags)


def keys_of_verl(config: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of all values of a configuration, without the prefix ``actor_rollout_ref``."""
    if not isinstance(config, dict) or not config:
        yield path.removeprefix(".actor_rollout_ref").removeprefix(".")
        return
    for name, value in config.items():
        if name != "_target_":
            yield from keys_of_verl(value, f"{path}.{name}")


def main(library: str, version: str = "", path: str = "") -> None:
    """Store a library's settings."""
    entry: dict[str, Any] = {"version": version}
    if library == "trl":
        entry = installed_trl()
    elif library == "openrlhf":
        entry["settings"] = flags_of_openrlhf(Path(path).read_text())
    elif library == "verl":
        entry["settings"] = sorted(keys_of_verl(yaml.safe_load(Path(path).read_text())))
    stored = (dict(known()) if FILE.exists() else {}) | {library: entry}
    FILE.write_text(yaml.safe_dump(stored, width=120, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
