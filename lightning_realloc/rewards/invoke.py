"""How is one reward function asked, and is what it returns a reward? Whoever is wrong is told with the batch."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import Failed, Outcome
from lightning_realloc.rewards.signatures import RewardFunction, accepted
from lightning_realloc.rewards.texts import describe_batch, describe_completion, shortened

MAX_REWARD = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32, which rewards are kept in; larger numbers would become infinite."""


def call_reward(name: str, function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome]:
    """Return what a function says about a batch.

    Args:
        name: Of the function, for errors.
        given: Argument name -> value, of which the function gets those that it takes.

    Raises:
        RewardError: naming the function and the batch, when it raises or returns anything but rewards.
    """
    try:
        returned = function(**accepted(function, given))
    except RewardError:
        raise  # it says what is wrong already
    except Exception as error:
        raise _raised(name, error, given) from error
    return validated(name, returned, given)


async def call_reward_async(name: str, function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome]:
    """Return what a coroutine function says about a batch; see :func:`call_reward`."""
    try:
        returned = await function(**accepted(function, given))
    except RewardError:
        raise
    except Exception as error:
        raise _raised(name, error, given) from error
    return validated(name, returned, given)


def validated(name: str, returned: object, given: Mapping[str, Any]) -> list[Outcome]:
    """Return what a function returned as outcomes, one per completion.

    Raises:
        RewardError: for another number of them, for what has no order of completions, and for what is no finite
            number, None or failure.
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
            f"reward function {name!r} must return finite numbers (of at most 3.4e38, in float32), or None where it "
            f"does not apply; it returned {shortened(value)} for {describe_completion(index, given)}"
        )
    return number


def finite_number(value: Any) -> float | None:
    """Return what a value is as a number; None for a text, and for what is not finite in float32."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):  # the last for integers of hundreds of digits
        return None
    return number if abs(number) <= MAX_REWARD else None


def _raised(name: str, error: Exception, given: Mapping[str, Any]) -> RewardError:
    return RewardError(
        f"reward function {name!r} raised {type(error).__name__}{_line(error)}: {error}; "
        f"it was given {describe_batch(given)}"
    )


def _line(error: Exception) -> str:
    """Say in which line of the function; nothing where calling it was what failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this module's call
    return f" in {Path(frames[0].filename).name}, line {frames[0].lineno}" if frames else ""
