"""Scaled and bounded rewards, and the overlong penalty, by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import Failed, OverlongPenalty, RewardFunctions, Shaped
from lightning_realloc.rewards.failure_rule import Outcome
from lightning_realloc.rewards.shaping import overlong_penalty


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    # 20 tokens at most, the last 4 of them penalised: 0 up to 16, then (16 - length) / 4, -1 beyond 20
    lengths = [0, 16, 17, 18, 20, 21, 100]
    penalties = [overlong_penalty(length, max_length=20, buffer=4) for length in lengths]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    function = RewardFunctions(OverlongPenalty(20, 4))
    assert function(["?"], ["text"], [list(range(18))], {}).total.tolist() == [-0.5]
    for buffer in (0, 21):
        with pytest.raises(RewardError, match=rf"buffer={buffer} must lie in 1..max_length=20"):
            OverlongPenalty(20, buffer)


class Judge:
    """A function that needs a column and may fail for a completion."""

    on_failure = "mask"

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self) -> None:
        self.notes.append("start")

    def close(self) -> None:
        self.notes.append("close")

    def __call__(self, completions: list[str], value: list[Outcome]) -> list[Outcome]:
        return value


async def later(completions: list[str], value: list[float], **columns: Any) -> list[float]:
    """Return the values, as a coroutine."""
    return value


def test_rewards_are_scaled_and_then_bounded() -> None:
    judge = Judge()
    functions = RewardFunctions([Shaped(judge, scale=2.0, low=-1.0, high=3.0), Shaped(later, scale=-1.0)])
    with pytest.raises(RewardError, match=r"'Judge' needs the columns \['value'\]"):
        functions.check_columns([])
    functions.start()
    values = [-4.0, 1.0, 4.0, None, Failed("gone")]
    columns = {"value": values}
    shaped = functions.functions[0](completions=[""] * 5, prompts=[""] * 5, completion_ids=[[]] * 5, **columns)
    assert shaped == [-1.0, 2.0, 3.0, None, Failed("gone")]
    rewards = functions(["?"] * 3, ["a"] * 3, [[1]] * 3, {"value": values[:3]})
    # 2 * value within bounds, less value
    assert rewards.total.tolist() == [3.0, 1.0, -1.0]
    assert list(rewards.by_function) == ["Judge", "later"] and list(rewards.failed) == ["Judge"]
    functions.close()
    assert judge.notes == ["start", "close"]


@pytest.mark.parametrize("value", [[1.0, math.inf], [1.0, math.nan], [1e39, 1.0], {0: 1.0, 1: 2.0}])
def test_invalid_rewards_are_refused_before_bounds_apply(value: Any) -> None:
    given = {"prompts": ["?"] * 2, "completions": ["a"] * 2, "value": value}
    with pytest.raises(RewardError, match=r"reward function 'Judge' must return .*; it returned"):
        Shaped(Judge(), low=0.0, high=1.0)(**given)
    with pytest.raises(RewardError, match=r"reward function 'later' must return .*; it returned"):
        asyncio.run(Shaped(later, low=0.0, high=1.0)(**given))


@pytest.mark.parametrize("settings", [{"scale": math.inf}, {"scale": 0.0}, {"low": 1.0, "high": 0.0}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(RewardError, match=next(iter(settings))):
        Shaped(later, **settings)


@pytest.mark.parametrize(("max_length", "buffer"), [(8.5, 2), (8, 2.5), (True, 1), (4, 5)])
def test_lengths_of_a_penalty_are_whole_numbers_in_order(max_length: Any, buffer: Any) -> None:
    with pytest.raises(RewardError, match=r"must be a whole number|must lie in"):
        OverlongPenalty(max_length, buffer)


@pytest.mark.parametrize("max_new_tokens", [6, 7])
def test_a_penalty_is_refused_exactly_if_no_response_gets_one(max_new_tokens: int) -> None:
    penalty = OverlongPenalty(max_length=9, buffer=3)
    ever = min(penalty(completion_ids=[[0] * length for length in range(max_new_tokens + 1)])) < 0
    assert ever == (max_new_tokens == 7)
    if ever:
        RewardFunctions([penalty]).check_lengths(max_new_tokens)
    else:
        with pytest.raises(RewardError, match="begins above 6 tokens, and max_new_tokens=6 is no more"):
            RewardFunctions([penalty]).check_lengths(max_new_tokens)
