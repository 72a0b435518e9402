"""Reward shaping: overlong penalty, scaling and clipping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER, Failed, OnFailure, Outcome
from lightning_realloc.rewards.invoke import validated
from lightning_realloc.rewards.named import reward_function
from lightning_realloc.rewards.signatures import (
    RewardFunction,
    accepted,
    function_name,
    is_async,
    mentioned,
    required_columns,
)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to ``max_length - buffer`` tokens, then linearly down to -1 at ``max_length``, and -1 beyond.

    Source: Yu et al. (DAPO), arXiv:2503.14476, eq. 13.
    """
    over = length - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if length > max_length else -over / buffer


def scaled_and_clipped(value: float, *, scale: float, low: float | None, high: float | None) -> float:
    """Return ``clamp(value * scale, low, high)``; None means no bound."""
    scaled = value * scale
    scaled = scaled if low is None else max(scaled, low)
    return scaled if high is None else min(scaled, high)


class OverlongPenalty:
    """Penalty of up to 1 for completions close to the maximum length; combine it with other rewards.

    Args:
        max_length: Tokens at which the full penalty applies: ``sampling.max_new_tokens``.
        buffer: Tokens before ``max_length`` over which the penalty grows.

    Example:
        >>> OverlongPenalty(max_length=100, buffer=20)(completion_ids=[[0] * 70, [0] * 90])
        [0.0, -0.5]
    """

    def __init__(self, max_length: int, buffer: int) -> None:
        for name, value in (("max_length", max_length), ("buffer", buffer)):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise RewardError(f"{name}={value!r} must be a whole number of tokens, such as 256")
        if not 0 < buffer <= max_length:
            raise RewardError(f"buffer={buffer} must lie in 1..max_length={max_length}")
        self.max_length = max_length
        self.buffer = buffer

    def check_length(self, max_new_tokens: int) -> None:
        """Raise RewardError if no response of ``max_new_tokens`` tokens gets a penalty."""
        free = self.max_length - self.buffer
        if max_new_tokens <= free:
            raise RewardError(
                f"OverlongPenalty(max_length={self.max_length}, buffer={self.buffer}) begins above {free} tokens, and "
                f"max_new_tokens={max_new_tokens} is no more; set max_length={max_new_tokens} and a smaller buffer"
            )

    def __call__(self, /, completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        """Return the penalties of B completions, from -1 to 0."""
        return [overlong_penalty(len(ids), max_length=self.max_length, buffer=self.buffer) for ids in completion_ids]


class Shaped:
    """Scale and clip the rewards of another function.

    Failures, and None for completions to which the function does not apply, pass unchanged.

    Args:
        function: A reward function or its import path.
        scale: Factor of every reward.
        low: Minimum reward after scaling; None for no minimum.
        high: Maximum reward after scaling; None for no maximum.

    Example:
        >>> from lightning_realloc.rewards import exact_match
        >>> Shaped(exact_match, scale=2.0, high=1.5)(prompts=["2 + 2 ="], completions=["4"], answer=["4"])
        [1.5]
    """

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        scale: float = 1.0,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        if not math.isfinite(scale) or scale == 0:
            raise RewardError(f"scale={scale} must be finite and not 0, which leaves no reward; leave the function out")
        if low is not None and high is not None and not low <= high:
            raise RewardError(f"low={low} and high={high} leave no reward; set low <= high")
        self.function = reward_function(function)
        self.__name__ = function_name(self.function)
        self.on_failure: OnFailure = getattr(self.function, "on_failure", "fail")
        self.give_up_after: int = getattr(self.function, "give_up_after", GIVE_UP_AFTER)
        self.is_async = is_async(self.function)
        self.scale = scale
        self.low = low
        self.high = high

    def required_columns(self) -> set[str]:
        """Return the columns that the function requires."""
        return required_columns(self.function)

    def mentioned(self, texts: Collection[str]) -> list[str]:
        """Return those of ``texts`` that the function looks for."""
        return mentioned(self.function, texts)

    def start(self) -> None:
        """Start the function, if it has ``start``."""
        if hasattr(self.function, "start"):
            self.function.start()

    def close(self) -> None:
        """Close the function, if it has ``close``."""
        if hasattr(self.function, "close"):
            self.function.close()

    def __call__(self, /, **given: Any) -> Any:
        """Return the shaped results, or a coroutine of them."""
        returned = self.function(**accepted(self.function, given))
        return self._shape_later(returned, given) if inspect.isawaitable(returned) else self._shape(returned, given)

    async def _shape_later(self, returned: Any, given: Mapping[str, Any]) -> list[Outcome]:
        return self._shape(await returned, given)

    def _shape(self, returned: Any, given: Mapping[str, Any]) -> list[Outcome]:
        return [
            outcome
            if outcome is None or isinstance(outcome, Failed)
            else scaled_and_clipped(outcome, scale=self.scale, low=self.low, high=self.high)
            for outcome in validated(self.__name__, returned, given)  # checked first: clipping would hide infinity
        ]
