"""Rewards and named sets on a command line: ``--reward``, ``--set`` of ``eval``, ``--eval-set`` of training."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_realloc.algorithms.evaluation.evaluation_set import LIBRARIES
from lightning_realloc.errors import ConfigError
from lightning_realloc.rewards.named import NAMED_REWARDS

STEPS_PER_EVALUATION = 50
"""Default of ``--eval-every``."""


def describe_names(*, models: bool = True) -> str:
    """Return all values that ``--reward`` accepts, as the end of a sentence; for evaluations, those without models."""
    names = ", ".join(f"{name} ({reward.summary})" for name, reward in NAMED_REWARDS.items())
    found = f"one of {names}; a function as module:function"
    return f"{found}; a reward model's name or folder" if models else found


def reward_setting(given: Sequence[str], *, flag: str = "--reward") -> str | list[str]:
    """Return an algorithm's ``reward`` for the values of a flag: one source, or a list of several.

    >>> reward_setting(["exact"]), reward_setting(["math", "mine:brevity"])
    ('exact', ['math', 'mine:brevity'])

    Raises:
        ConfigError: for a name that is neither a verifier's, nor a function's path, nor a model's.
    """
    for name in given:
        if name in NAMED_REWARDS or any(mark in name for mark in ":./") or Path(name).exists():
            continue
        near = difflib.get_close_matches(name, NAMED_REWARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(NAMED_REWARDS)}"
        raise ConfigError(
            f"{flag}={name} is unknown; {hint}; or give a function as module:function, or a reward model's name or "
            f"folder"
        )
    return given[0] if len(given) == 1 else list(given)


def named_sets(given: list[str], flag: str) -> dict[str, str]:
    """Return name -> data for values ``NAME=DATA``; without a name, that of the file or task.

    >>> named_sets(["gsm=data/test.jsonl", "data/gsm8k.jsonl.gz"], "--set")
    {'gsm': 'data/test.jsonl', 'gsm8k': 'data/gsm8k.jsonl.gz'}
    >>> named_sets(["lm-eval:gsm8k:flexible-extract"], "--set")
    {'gsm8k': 'lm-eval:gsm8k:flexible-extract'}

    Raises:
        ConfigError: for two sets with one name.
    """
    sets: dict[str, str] = {}
    for value in given:
        name, equals, data = value.partition("=")
        if not equals:
            task = value.split(":")[1] if value.startswith(LIBRARIES) else value
            name, data = Path(task).name.partition(".")[0], value
        if name in sets:
            raise ConfigError(f"two sets are named {name!r}; give one of them another name: {flag} NAME=DATA")
        sets[name] = data
    return sets


def has_own_rule(data: str) -> bool:
    """Return whether a set brings its own rule for right responses."""
    return data.startswith(LIBRARIES)


def add_evaluation_flags(add: Callable[..., object]) -> None:
    """Add the flags for evaluations during training."""
    sets = (
        "Set to evaluate during training: file, folder, name on the hub (its split test), reasoning-gym:NAME or "
        "lm-eval:TASK. May be repeated."
    )
    add("--eval-set", dest="eval_sets", action="append", default=[], metavar="[NAME=]DATA", help=sets)
    rules = describe_names(models=False)
    reward = f"Rule for right responses to them: {rules}. Default: that of --reward, if it is given once."
    add("--eval-reward", metavar="REWARD", help=reward)
    every = f"Iterations between evaluations. Default: {STEPS_PER_EVALUATION}."
    add("--eval-every", type=int, metavar="N", help=every)


def evaluation_settings(
    flags: argparse.Namespace, rows_of: Callable[[str], str | Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Return the callback that evaluates the sets of a command that trains; none without sets.

    Args:
        flags: Flags of `add_evaluation_flags`, and of the command.
        rows_of: Returns the rows for a file, folder or name on the hub.

    Raises:
        ConfigError: for sets without a rule, or with several, and for flags that do nothing without sets.
    """
    sets = named_sets(flags.eval_sets, "--eval-set")
    if not sets:
        for flag, value in (("--eval-reward", flags.eval_reward), ("--eval-every", flags.eval_every)):
            if value is not None:
                raise ConfigError(f"{flag}={value} is for sets, and there are none; add --eval-set DATA")
        return []
    rewards = [flags.eval_reward] if flags.eval_reward else getattr(flags, "reward", [])
    settings: dict[str, Any] = {}
    for name, data in sets.items():
        if has_own_rule(data):
            settings[name] = {"data": data}
            continue
        if len(rewards) != 1:
            found = f"the run has {len(rewards)} rewards" if rewards else "no reward is given"
            raise ConfigError(
                f"--eval-set={data} needs one rule for right responses, and {found}; add --eval-reward: "
                f"{describe_names(models=False)}"
            )
        settings[name] = {
            "data": rows_of(data),
            "prompt_column": getattr(flags, "prompt_column", "prompt"),
            "reward": reward_setting(rewards, flag="--eval-reward" if flags.eval_reward else "--reward"),
        }
    every = STEPS_PER_EVALUATION if flags.eval_every is None else flags.eval_every
    return [{"class_path": "Evaluation", "init_args": {"sets": settings, "every": every}}]
