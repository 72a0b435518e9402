"""How good is a completion? Functions in this process, in others and behind a server; verifiers; shaping.

The names below are imported from their modules on first use: a worker that judges code or numbers needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_realloc.rewards.code_tests import CodeTests as CodeTests
    from lightning_realloc.rewards.failures import Failed as Failed
    from lightning_realloc.rewards.functions import RewardFunction as RewardFunction
    from lightning_realloc.rewards.functions import RewardFunctions as RewardFunctions
    from lightning_realloc.rewards.functions import Rewards as Rewards
    from lightning_realloc.rewards.pooled import PooledReward as PooledReward
    from lightning_realloc.rewards.remote import RemoteReward as RemoteReward
    from lightning_realloc.rewards.retries import Retries as Retries
    from lightning_realloc.rewards.shaping import OverlongPenalty as OverlongPenalty
    from lightning_realloc.rewards.shaping import Shaped as Shaped
    from lightning_realloc.rewards.verifiers import Format as Format
    from lightning_realloc.rewards.verifiers import Length as Length
    from lightning_realloc.rewards.verifiers import NumericAnswer as NumericAnswer
    from lightning_realloc.rewards.verifiers import Regex as Regex
    from lightning_realloc.rewards.verifiers import exact_match as exact_match

# Public name -> the module of this package it lives in; the imports above say the same to type checkers.
_HOMES = {
    "CodeTests": "code_tests",
    "Failed": "failures",
    "RewardFunction": "functions",
    "RewardFunctions": "functions",
    "Rewards": "functions",
    "PooledReward": "pooled",
    "RemoteReward": "remote",
    "Retries": "retries",
    "OverlongPenalty": "shaping",
    "Shaped": "shaping",
    "Format": "verifiers",
    "Length": "verifiers",
    "NumericAnswer": "verifiers",
    "Regex": "verifiers",
    "exact_match": "verifiers",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
