"""How does a reward become a better signal? Formulas, and the reward functions that apply them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import Failed, OnFailure, Outcome
from lightning_realloc.rewards.invoke import validated
from lightning_realloc.rewards.signatures import (
    RewardFunction,
    accepted,
    function_name,
    is_async,
    required_columns,
    resolved,
)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to ``max_length - buffer`` tokens, from there linearly down to -1 at ``max_length``, and -1 beyond.

    Source: Yu et al. (DAPO), arXiv:2503.14476, eq. 13.
    """
    over = length - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if length > max_length else -over / buffer


def scaled_and_clipped(value: float, *, scale: float, low: float | None, high: float | None) -> float:
    """Return ``clamp(value * scale, low, high)``; None does not bound."""
    scaled = value * scale
    scaled = scaled if low is None else max(scaled, low)
    return scaled if high is None else min(scaled, high)


class OverlongPenalty:
    """Takes up to 1 from completions that come close to the longest length; to be added to other rewards.

    Args:
        max_length: Tokens from which the penalty is whole: ``sampling.max_new_tokens``.
        buffer: Tokens before that over which it grows.
    """

    def __init__(self, max_length: int, buffer: int) -> None:
        if not 0 < buffer <= max_length:
            raise RewardError(f"buffer={buffer} must lie in 1..max_length={max_length}")
        self.max_length = max_length
        self.buffer = buffer

    def __call__(self, /, completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        """Return what B completions lose."""
        return [overlong_penalty(len(ids), max_length=self.max_length, buffer=self.buffer) for ids in completion_ids]


class Shaped:
    """Scales and bounds what another function returns.

    What that one fails on, or does not apply to, stays so.

    Args:
        function: A reward function or its import path.
        scale: Factor of every reward.
        low: Smallest reward after that; None: any.
        high: Largest; None: any.
    """

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        scale: float = 1.0,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        if not math.isfinite(scale):
            raise RewardError(f"scale={scale} must be finite")
        if low is not None and high is not None and not low <= high:
            raise RewardError(f"low={low} and high={high} leave no reward; set low <= high")
        self.function = resolved(function)
        self.__name__ = function_name(self.function)
        self.on_failure: OnFailure = getattr(self.function, "on_failure", "fail")
        self.is_async = is_async(self.function)
        self.scale = scale
        self.low = low
        self.high = high

    def required_columns(self) -> set[str]:
        """Return the columns that the function asks for."""
        return required_columns(self.function)

    def start(self) -> None:
        """Start the function, where it needs that."""
        if hasattr(self.function, "start"):
            self.function.start()

    def close(self) -> None:
        """Close the function, where it needs that."""
        if hasattr(self.function, "close"):
            self.function.close()

    def __call__(self, /, **given: Any) -> Any:
        """Return the shaped outcomes, or a coroutine of them."""
        returned = self.function(**accepted(self.function, given))
        return self._shape_later(returned, given) if inspect.isawaitable(returned) else self._shape(returned, given)

    async def _shape_later(self, returned: Any, given: Mapping[str, Any]) -> list[Outcome]:
        return self._shape(await returned, given)

    def _shape(self, returned: Any, given: Mapping[str, Any]) -> list[Outcome]:
        return [
            outcome
            if outcome is None or isinstance(outcome, Failed)
            else scaled_and_clipped(outcome, scale=self.scale, low=self.low, high=self.high)
            for outcome in validated(self.__name__, returned, given)  # before bounds make a number of infinity
        ]
