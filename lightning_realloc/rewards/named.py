"""Short names of verifiers, which stand for them wherever a reward function is given. It needs no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from lightning_realloc.errors import ConfigError
from lightning_realloc.rewards.signatures import resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A verifier with a short name."""

    path: str
    """Import path of the function, or of a class."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    summary: str
    """Rule for the reward, for ``--help``."""

    def make(self) -> Callable[..., Any]:
        """Return the function."""
        found: Any = resolve_name(self.path)
        function: Callable[..., Any] = found(**self.settings) if isinstance(found, type) else found
        return function


_VERIFIERS = "lightning_realloc.rewards.verifiers"
NAMED_REWARDS: Mapping[str, NamedReward] = {
    "exact": NamedReward(path=f"{_VERIFIERS}:exact_match", summary="the text equals the column answer"),
    "math": NamedReward(path=f"{_VERIFIERS}:NumericAnswer", summary="the final expression equals the column answer"),
    "number": NamedReward(
        path=f"{_VERIFIERS}:NumericAnswer",
        settings={"reader": "plain"},
        summary="the last number equals the column answer",
    ),
    "code": NamedReward(
        path="lightning_realloc.rewards.code_tests:CodeTests", summary="the Python code passes the column tests"
    ),
    "format": NamedReward(path=f"{_VERIFIERS}:Format", summary="the text is <think>...</think> <answer>...</answer>"),
}
"""Verifiers by short name."""


def reward_function(given: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a reward function, which may be given by a short name or an import path.

    Raises:
        RewardError: if it cannot be imported, is not a callable, or is a class.
    """
    return NAMED_REWARDS[given].make() if isinstance(given, str) and given in NAMED_REWARDS else resolved(given)


def refuse_misspelt(given: object, setting: str) -> None:
    """Raise ConfigError for text that is nearly a short name, and neither a path nor anything else that exists.

    Such text would be the name of a reward model, and be looked up on the hub.
    """
    if not isinstance(given, str) or given in NAMED_REWARDS or any(mark in given for mark in ":./"):
        return
    near = difflib.get_close_matches(given.lower(), NAMED_REWARDS, n=1)
    if near and not os.path.exists(given):
        raise ConfigError(
            f"{setting}={given!r} is no short name of a reward; did you mean {near[0]!r}? A reward model needs a slash "
            f"in its name, or an existing folder"
        )
