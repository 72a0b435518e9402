"""The budget of one iteration's rollout."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Literal, get_args

from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.params import is_of_kind
from lightning_realloc.setting_hints import suggest_settings

LateResponses = Literal["finish", "drop"]
"""Handling of a response at its limit of iterations: generate the rest at any cost, or drop it."""


@suggest_settings({})
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBudget:
    """Bound on each rank's generation in one iteration; unfinished responses continue in the next one.

    A rank exceeds the bound until it has finished a sample for every mini-batch, or all that it has.
    """

    tokens: int | None = None
    """Most tokens that the model generates on each rank, not counting an environment's; None: no bound."""
    seconds: float | None = None
    """Most seconds; None: no bound."""
    max_staleness: int = 4
    """Most iterations that a response may continue: no token comes from an older policy."""
    late: LateResponses = "finish"
    """Handling of a response that would continue for longer: ``"finish"`` generates the rest at any cost, ``"drop"``
    drops it, or its group."""

    def __post_init__(self) -> None:
        if self.tokens is None and self.seconds is None:
            raise ConfigError("a RolloutBudget needs tokens= or seconds=; without a bound leave rollout_budget out")
        for name, kind, wanted in (
            ("tokens", (Integral, NoneType), "a whole number or None"),
            ("seconds", (Real, NoneType), "a number or None"),
            ("max_staleness", Integral, "a whole number"),
        ):
            if not is_of_kind(getattr(self, name), kind):
                raise ConfigError(f"RolloutBudget({name}={getattr(self, name)!r}) must be {wanted}")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"RolloutBudget(tokens={self.tokens}) must be at least 1")
        if self.seconds is not None and not self.seconds > 0:  # NaN too
            raise ConfigError(f"RolloutBudget(seconds={self.seconds}) must be positive")
        if self.max_staleness < 1:
            raise ConfigError(
                f"RolloutBudget(max_staleness={self.max_staleness}) carries nothing on; use at least 1, or leave "
                f"rollout_budget out"
            )
        if self.late not in get_args(LateResponses):
            raise ConfigError(f"RolloutBudget(late={self.late!r}) must be one of {', '.join(get_args(LateResponses))}")
