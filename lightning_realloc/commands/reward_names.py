"""Values of ``--reward``: short names of verifiers, and the other forms that the flag accepts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from lightning_realloc.errors import ConfigError
from lightning_realloc.rewards.named import NAMED_REWARDS


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
