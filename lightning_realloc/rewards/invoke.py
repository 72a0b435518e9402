"""Call one reward function and validate its return value; errors name function, prompt and completion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from lightning_realloc.errors import RewardError, error_line
from lightning_realloc.rewards.failure_rule import Failed, Outcome
from lightning_realloc.rewards.signatures import RewardFunction, accepted
from lightning_realloc.rewards.texts import describe_batch, describe_completion, shortened

MAX_REWARD = 1e18
"""Largest accepted reward. The sum of squares of some hundred larger ones would be infinite in float32, and with it the
standard deviation that divides advantages."""


def call_reward(name: str, function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome]:
    """Call a function with a batch and return its results.

    Args:
        name: Name of the function, for errors.
        given: Argument name -> value; the function receives those that its signature accepts.

    If the function's attribute ``on_failure`` is ``"mask"``, an exception is a `Failed` for every completion.

    Raises:
        RewardError: if the function raises or returns anything but rewards; the message names the function and the
            batch.
    """
    try:
        returned = function(**accepted(function, given))
    except RewardError:
        raise  # its message is complete, and it has applied ``on_failure`` itself
    except Exception as error:
        return _failed(name, function, error, given)
    return validated(name, returned, given)


async def call_reward_async(name: str, function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome]:
    """Call a coroutine function with a batch; see :func:`call_reward`."""
    try:
        returned = await function(**accepted(function, given))
    except RewardError:
        raise
    except Exception as error:
        return _failed(name, function, error, given)
    return validated(name, returned, given)


def masks_failures(function: RewardFunction) -> bool:
    """Return whether a function's failures leave samples out, by its attribute ``on_failure``."""
    return getattr(function, "on_failure", "fail") == "mask"


def validated(name: str, returned: object, given: Mapping[str, Any]) -> list[Outcome]:
    """Return a function's return value as results, one per completion.

    Raises:
        RewardError: for another number of values, an unordered type, and a value other than a finite number, None or
            `Failed`.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise RewardError(f"reward function {name!r} must return a list of numbers; it returned {shortened(values)}")
    outcomes = list(values)
    if len(outcomes) != len(given["completions"]):
        raise RewardError(
            f"reward function {name!r} must return one number per completion; it returned {len(outcomes)} for "
            f"{describe_batch(given)}"
        )
    return [_outcome(name, value, index, given) for index, value in enumerate(outcomes)]


def _outcome(name: str, value: Any, index: int, given: Mapping[str, Any]) -> Outcome:
    if value is None or isinstance(value, Failed):
        return value
    number = finite_number(value)
    if number is None:
        raise RewardError(
            f"reward function {name!r} must return finite numbers (of at most {MAX_REWARD:g}), or None where it "
            f"does not apply; it returned {shortened(value)} for {describe_completion(index, given)}"
        )
    return number


def finite_number(value: Any) -> float | None:
    """Return a value as a number; None for text, NaN and values above `MAX_REWARD`."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two for huge integers and for tensors
        return None
    return number if abs(number) <= MAX_REWARD else None


def _failed(name: str, function: RewardFunction, error: Exception, given: Mapping[str, Any]) -> list[Outcome]:
    """Return a failure for every completion, if the function masks them; raise RewardError otherwise."""
    problem = (
        f"reward function {name!r} raised {type(error).__name__}{error_line(error)}: {error}; "
        f"it was given {describe_batch(given)}"
    )
    if not masks_failures(function):
        raise RewardError(f"{problem}; with the attribute on_failure = 'mask' such samples are left out") from error
    return [Failed(problem)] * len(given["completions"])
