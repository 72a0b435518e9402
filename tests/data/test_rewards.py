"""Reward functions: weights, columns, conversations, and what broken ones are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_realloc.data.rewards import RewardFunctions, Rewards, exact_match
from lightning_realloc.errors import RewardError

PROMPTS = ["1+1=", "1+2="]
COMPLETIONS = ["2", " 4\n"]
IDS = [[53, 2], [35, 55, 13, 2]]


def _judge(*functions: Any, weights: list[float] | None = None, **columns: list[object]) -> Rewards:
    return RewardFunctions(functions, weights=weights)(PROMPTS, COMPLETIONS, IDS, columns)


def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def only_first(prompts: list[str], **columns: Any) -> list[float | None]:
    return [10.0] + [None] * (len(prompts) - 1)


def returning(value: object) -> Callable[..., Any]:
    def broken(**columns: Any) -> Any:
        return value

    return broken


def test_rewards_are_the_weighted_sum_of_what_applies() -> None:
    # exact_match 1 and 0, length 2 and 4, only_first 10 and none:
    # 1 * 1 + 0.5 * 2 + 2 * 10 = 22;  1 * 0 + 0.5 * 4 = 2
    rewards = _judge(exact_match, length, only_first, weights=[1.0, 0.5, 2.0], answer=["2", 3])
    assert rewards.total.tolist() == [22.0, 2.0]
    assert rewards.total.dtype == torch.float32
    assert rewards.by_function["length"].tolist() == [2.0, 4.0]
    assert math.isnan(rewards.by_function["only_first"][1])
    assert _judge(length).total.tolist() == [2.0, 4.0]


def test_functions_can_be_import_paths_and_repeat() -> None:
    path = "lightning_realloc.data.rewards"
    functions = RewardFunctions([f"{path}.exact_match", f"{path}:exact_match", length])
    assert functions.names == ("exact_match", "exact_match_2", "length")
    assert functions(PROMPTS, COMPLETIONS, IDS, {"answer": ["2", "4"]}).total.tolist() == [4.0, 6.0]
    assert RewardFunctions(f"{path}.exact_match").names == ("exact_match",)


def test_conversations_get_their_completions_as_messages() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any, **columns: Any) -> list[int]:
        seen.update(prompts=prompts, completions=completions)
        return [0, 1]

    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    rewards = RewardFunctions([spy, exact_match])(prompts, COMPLETIONS, IDS, {"answer": ["2", "4"]})
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    assert seen["prompts"] == prompts
    assert rewards.total.tolist() == [1.0, 2.0]


def test_a_function_may_name_just_what_it_needs() -> None:
    def right(completions: list[str], answer: list[str]) -> list[bool]:
        return [text == wanted for text, wanted in zip(completions, answer, strict=True)]

    assert _judge(right, answer=["2", "4"], level=[1, 2]).total.tolist() == [1.0, 0.0]
    assert _judge(returning(torch.tensor([0.5, 1.5]))).total.tolist() == [0.5, 1.5]
    with pytest.raises(
        RewardError, match=r"'right' needs the columns \['answer'\], the data has \['level', 'prompt'\]"
    ):
        RewardFunctions(right).check_columns(["prompt", "level"])
    RewardFunctions(right).check_columns(["answer"])


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ([1.0], r"'broken' must return one number per completion; it returned 1 for 2 completions of .*'1\+1='"),
        ([1.0, math.nan], r"'broken' must .* finite numbers.* nan for the completion ' 4\\n' of the prompt '1\+2='"),
        ([math.inf, 1.0], r"'broken' must .* finite numbers.* inf for the completion '2' of the prompt '1\+1='"),
        ([1.0, "good"], r"'broken' must return finite numbers.* 'good' for the completion ' 4\\n' of the prompt"),
        ([1.0, "1.0"], r"'broken' must return finite numbers.* '1.0' for the completion"),
        ([1.0, None], r"all of \['broken'\] returned None for the completion ' 4\\n' of the prompt '1\+2='"),
        (1.0, "'broken' must return a list of numbers; it returned 1.0"),
        (None, "'broken' must return a list of numbers; it returned None"),
    ],
)
def test_what_is_no_reward_is_refused_with_function_prompt_and_completion(value: object, rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        _judge(returning(value))


def test_a_function_that_raises_is_named_with_its_batch() -> None:
    def failing(**columns: Any) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(
        RewardError,
        match=r"'failing' raised KeyError in test_rewards.py, line \d+: 'gold'; it was given 2 completions of the "
        r"prompts '1\+1=', '1\+2='",
    ) as info:
        _judge(failing)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=r"it was given 3 completions of the prompt '1\+1='$"):  # a group shares it
        RewardFunctions(failing)(["1+1="] * 3, ["2", "3", "4"], [[1], [2], [3]], {})


@pytest.mark.parametrize(
    ("functions", "weights", "rule"),
    [
        ([], None, "at least one reward function"),
        ([length], [1.0, 2.0], "1 reward functions need as many finite weights"),
        ([length], [math.nan], "finite weights"),
        (["no_such_package.reward"], None, "'no_such_package.reward' cannot be imported"),
        (["lightning_realloc.data.rewards:nothing"], None, "cannot be imported .*nothing"),
        (["reward"], None, "import path is 'package.module:name'; got 'reward'"),
        ([3], None, "must be callable; 3 is a int"),
    ],
)
def test_unusable_functions_and_weights_are_refused(functions: Any, weights: list[float] | None, rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        RewardFunctions(functions, weights=weights)
