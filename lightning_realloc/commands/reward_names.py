"""Short names of the package's verifiers for ``--reward``, and the other forms that the flag accepts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_realloc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A verifier with a short name."""

    setting: str | Mapping[str, Any]
    """Value of an algorithm's ``reward`` in a configuration."""
    summary: str
    """Rule for the reward, for ``--help``."""


REWARD_NAMES: Mapping[str, NamedReward] = {
    "exact": NamedReward("lightning_realloc.rewards:exact_match", "the text equals the column answer"),
    "math": NamedReward(
        {"class_path": "lightning_realloc.rewards.NumericAnswer"}, "the final expression equals the column answer"
    ),
    "number": NamedReward(
        {"class_path": "lightning_realloc.rewards.NumericAnswer", "init_args": {"reader": "plain"}},
        "the last number equals the column answer",
    ),
    "code": NamedReward(
        {"class_path": "lightning_realloc.rewards.CodeTests"}, "the Python code passes the column tests"
    ),
    "format": NamedReward(
        {"class_path": "lightning_realloc.rewards.Format"}, "the text is <think>...</think> <answer>...</answer>"
    ),
}
"""Verifiers by short name."""


def describe_names() -> str:
    """Return all values that ``--reward`` accepts, as the end of a sentence."""
    names = ", ".join(f"{name} ({reward.summary})" for name, reward in REWARD_NAMES.items())
    return f"one of {names}; a function as module:function; a reward model's name or folder"


def reward_setting(given: Sequence[str]) -> Any:
    """Return an algorithm's ``reward`` for the values of ``--reward``: one source, or a list of several.

    >>> reward_setting(["exact"])
    'lightning_realloc.rewards:exact_match'

    Raises:
        ConfigError: for a name that is neither a verifier's, nor a function's path, nor a model's.
    """
    found = [_source(name) for name in given]
    return found[0] if len(found) == 1 else found


def _source(name: str) -> Any:
    if name in REWARD_NAMES:
        return deepcopy(REWARD_NAMES[name].setting)
    if any(mark in name for mark in ":./") or Path(name).exists():
        return name
    near = difflib.get_close_matches(name, REWARD_NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(REWARD_NAMES)}"
    raise ConfigError(
        f"--reward={name} is unknown; {hint}; or give a function as module:function, or a reward model's name or folder"
    )
