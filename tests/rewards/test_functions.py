"""Reward functions: weights, columns, conversations, and errors of broken functions."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerState

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import Failed, NumericAnswer, RewardFunctions, Rewards, Shaped, exact_match

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


def test_rewards_are_the_weighted_sum_of_the_functions_that_apply() -> None:
    # exact_match 1 and 0, length 2 and 4, only_first 10 and none:
    # 1 * 1 + 0.5 * 2 + 2 * 10 = 22;  1 * 0 + 0.5 * 4 = 2
    rewards = _judge(exact_match, length, only_first, weights=[1.0, 0.5, 2.0], answer=["2", 3])
    assert rewards.total.tolist() == [22.0, 2.0]
    assert rewards.total.dtype == torch.float32
    assert rewards.by_function["length"].tolist() == [2.0, 4.0]
    assert math.isnan(rewards.by_function["only_first"][1])
    assert _judge(length).total.tolist() == [2.0, 4.0]


def test_functions_can_be_import_paths_and_repeat() -> None:
    path = "lightning_realloc.rewards"
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


def test_each_completion_has_the_form_of_its_prompt() -> None:
    seen: list[Any] = []

    def spy(completions: Any, **columns: Any) -> list[int]:
        seen.append(completions)
        return [0, 0]

    asked, message = [{"role": "user", "content": "1+1"}], {"role": "assistant", "content": COMPLETIONS[1]}
    RewardFunctions(spy)(["1+1", asked], COMPLETIONS, IDS, {})
    RewardFunctions(spy)([asked, "1+1"], COMPLETIONS[::-1], IDS, {})
    assert seen == [[COMPLETIONS[0], [message]], [[message], COMPLETIONS[0]]]


def test_the_beginning_of_an_answer_in_the_prompt_is_part_of_its_completion() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any, **columns: Any) -> list[int]:
        seen.update(prompts=prompts, completions=completions)
        return [0, 0]

    asked = {"role": "user", "content": "1+1"}
    begun = [asked, {"role": "assistant", "content": "It is "}]
    RewardFunctions(spy)([begun, begun], COMPLETIONS, IDS, {})
    assert seen["prompts"] == [[asked], [asked]]
    assert seen["completions"] == [[{"role": "assistant", "content": f"It is {text}"}] for text in COMPLETIONS]


def test_a_function_may_name_only_the_columns_that_it_needs() -> None:
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
        ([1.0, 1e39], r"'broken' must return finite numbers.* 1e\+39 for the completion ' 4\\n' of the prompt '1\+2='"),
        ([1.0, -3e38], r"'broken' must .* finite numbers \(of at most 1e\+18\).* -3e\+38 for the completion ' 4\\n'"),
        ([-1e300, 1.0], r"'broken' must return finite numbers.* -1e\+300 for the completion '2' of the prompt '1\+1='"),
        (torch.tensor([1.0, 1e39], dtype=torch.float64), r"'broken' must return finite numbers.* 1e\+39 for"),
        ([1.0, 10**400], r"'broken' must return finite numbers.* 10000.* for the completion ' 4\\n'"),
        ({0: 1.0, 1: 0.5}, r"'broken' must return a list of numbers; it returned \{0: 1.0, 1: 0.5\}"),
        ({1.0, 0.5}, r"'broken' must return a list of numbers; it returned \{"),
        (b"ab", r"'broken' must return a list of numbers; it returned b'ab'"),
        ([1.0, None], r"all of \['broken'\] returned None for the completion ' 4\\n' of the prompt '1\+2='"),
        (1.0, "'broken' must return a list of numbers; it returned 1.0"),
        (None, "'broken' must return a list of numbers; it returned None"),
    ],
)
def test_invalid_rewards_are_refused_with_function_prompt_and_completion(value: object, rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        _judge(returning(value))


@pytest.mark.parametrize("answer", ["none of them", None])
def test_the_row_is_named_that_no_function_can_judge(answer: object) -> None:
    with pytest.raises(RewardError) as caught:
        _judge(NumericAnswer(reader="plain"), answer=["2", answer], source=["a", "b"])
    assert f"; its row has answer={answer!r}: correct that, or leave the row out" in str(caught.value)


def test_rewards_that_have_a_finite_deviation_are_accepted_and_larger_sums_refused() -> None:
    total = _judge(returning([1e18, -1e18])).total
    torch.testing.assert_close(total, torch.tensor([1e18, -1e18]))
    assert bool(total.repeat(64).std().isfinite())
    rule = r"a weighted sum of rewards must be at most 1e\+18; it is 1e\+19 for the completion ' 4\\n' of the"
    with pytest.raises(RewardError, match=rule):
        RewardFunctions(returning([1.0, 1e18]), weights=[10.0])(PROMPTS, COMPLETIONS, IDS, {})


def test_a_function_that_raises_is_named_with_its_batch() -> None:
    def failing(**columns: Any) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(
        RewardError,
        match=r"'failing' raised KeyError in test_functions.py, line \d+: 'gold'; it was given 2 completions of the "
        r"prompts '1\+1=', '1\+2='",
    ) as info:
        _judge(failing)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=r"it was given 3 completions of the prompt '1\+1=';"):  # a group shares it
        RewardFunctions(failing)(["1+1="] * 3, ["2", "3", "4"], [[1], [2], [3]], {})


@pytest.mark.parametrize(
    ("functions", "weights", "rule"),
    [
        ([], None, "at least one reward function"),
        ([length], [1.0, 2.0], "each reward function needs a finite weight: 1 expected; got"),
        ([length], [math.nan], "finite weight"),
        ([length], [1e39], "finite weight"),
        (["no_such_package.reward"], None, "'no_such_package.reward' cannot be imported"),
        (["train.py:right_answer"], None, "name the module instead of its file: train:right_answer$"),
        (["lightning_realloc.rewards:nothing"], None, "cannot be imported .*nothing"),
        (5, None, "^reward function 5 must be callable; it is a int"),
        ([torch.nn.Linear(1, 1)], None, "a Linear takes tokens; give a reward model to an algorithm"),
        (["reward"], None, "import path is 'package.module:name'; got 'reward'"),
        ([3], None, "^reward function 3 must be callable; it is a int"),
    ],
)
def test_unusable_functions_and_weights_are_refused(functions: Any, weights: list[float] | None, rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        RewardFunctions(functions, weights=weights)


class Meeting:
    """A coroutine function that returns after ``others`` calls have started."""

    begun = 0

    def __init__(self, others: int) -> None:
        self.others = others
        self.threads: list[int] = []

    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        Meeting.begun += 1
        self.threads.append(threading.get_ident())
        while Meeting.begun < self.others:
            await asyncio.sleep(0.001)
        return [float(self.others)] * len(completions)


def test_coroutine_functions_run_concurrently_with_the_others() -> None:
    Meeting.begun = 0
    meetings = [Meeting(3), Meeting(3)]

    def plain(completions: list[str], **columns: Any) -> list[float]:
        while Meeting.begun < 2:  # both wait for this one
            time.sleep(0.001)
        Meeting.begun += 1
        return [1.0] * len(completions)

    functions = RewardFunctions([*meetings, plain])
    assert functions(PROMPTS, COMPLETIONS, IDS, {}).total.tolist() == [7.0, 7.0]
    assert functions(PROMPTS, COMPLETIONS, IDS, {}).total.tolist() == [7.0, 7.0]
    assert list(functions(PROMPTS, COMPLETIONS, IDS, {}).by_function) == ["Meeting", "Meeting_2", "plain"]
    (loop_thread,) = set(meetings[0].threads + meetings[1].threads)  # one event loop for all batches
    assert loop_thread != threading.get_ident()
    functions.close()
    assert loop_thread not in {thread.ident for thread in threading.enumerate()}


def test_a_failing_coroutine_function_is_named_and_the_others_are_cancelled() -> None:
    ended: list[str] = []

    async def failing(**columns: Any) -> list[float]:
        raise KeyError("gold")

    async def endless(**columns: Any) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("endless")
        return []

    functions = RewardFunctions([failing, endless])
    with pytest.raises(RewardError, match=r"'failing' raised KeyError in test_functions.py, line \d+: 'gold'; it was"):
        functions(PROMPTS, COMPLETIONS, IDS, {})
    functions.close()
    assert ended == ["endless"]

    async def short(**columns: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match="'short' must return one number per completion; it returned 1"):
        _judge(short)


def test_trls_extra_arguments_are_given_to_functions() -> None:
    def late(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("share", 0.5)
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    functions = RewardFunctions(late)
    functions.check_columns([])
    functions.trainer_state = lambda: TrainerState(global_step=5, max_steps=10)
    assert functions(PROMPTS, COMPLETIONS, IDS, {}).total.tolist() == [0.5, 0.5]


class Flaky:
    """A function that fails for the first completion."""

    def __init__(self, on_failure: str) -> None:
        self.on_failure = on_failure

    def __call__(self, completions: list[str], **columns: Any) -> list[float | Failed]:
        return [Failed("the wire was cut"), *[2.0] * (len(completions) - 1)]


def test_a_failed_sample_has_no_reward_if_failures_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rewards = _judge(Flaky("mask"), length)
    assert math.isnan(rewards.total[0]) and rewards.total[1] == 6.0  # 2 + 4 tokens
    assert math.isnan(rewards.by_function["Flaky"][0])
    assert {name: failed.tolist() for name, failed in rewards.failed.items()} == {"Flaky": [True, False]}
    assert "Flaky: 1 of 2 samples are left out of this iteration; the wire was cut" in caplog.text
    with pytest.raises(RewardError, match=r"'Flaky' could not judge 1 of 2 completions; the wire was cut"):
        _judge(Flaky("fail"))
    assert _judge(length).failed == {}


def raising(on_failure: str) -> Any:
    """Return a plain function that raises."""

    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("unexpected answer")

    broken.on_failure = on_failure  # type: ignore[attr-defined]
    return broken


def asynchronous(on_failure: str) -> Any:
    """Return a coroutine function that raises."""

    async def broken(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        raise KeyError("unexpected answer")

    broken.on_failure = on_failure  # type: ignore[attr-defined]
    return broken


@pytest.mark.parametrize("make", [raising, asynchronous, lambda on_failure: Shaped(raising(on_failure), scale=2.0)])
def test_a_plain_function_may_leave_samples_out_that_it_fails_on(
    make: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rewards = _judge(make("mask"), length)
    assert rewards.failed["broken"].tolist() == [True, True] == rewards.total.isnan().tolist()
    assert "broken: 2 of 2 samples are left out of this iteration; reward function 'broken' raised" in caplog.text
    with pytest.raises(RewardError, match=r"raised KeyError .* with the attribute on_failure = 'mask' such samples"):
        _judge(make("fail"), length)


def test_a_function_that_fails_on_everything_ends_the_run_after_some_batches() -> None:
    function = raising("mask")
    for limit in (3, 2):
        functions = RewardFunctions([function, length])
        for _ in range(limit - 1):
            functions(PROMPTS, COMPLETIONS, IDS, {})
        with pytest.raises(RewardError, match=rf"could be judged in {limit} consecutive batches; .*raised"):
            functions(PROMPTS, COMPLETIONS, IDS, {})
        function.give_up_after = 2


def test_functions_with_start_and_close_are_started_and_closed() -> None:
    class Server:
        calls: list[str] = []  # noqa: RUF012

        def start(self) -> None:
            self.calls.append("start")

        def close(self) -> None:
            self.calls.append("close")

        def __call__(self, **columns: Any) -> list[float]:
            return []

    functions = RewardFunctions([Server(), length])
    functions.start()
    functions.close()
    assert Server.calls == ["start", "close"]
    with pytest.raises(RewardError, match=r"Server must be .* it is a class, make an instance: Server\(...\)"):
        RewardFunctions(Server)


def test_functions_read_environments_by_an_argument_or_in_kwargs() -> None:
    def named(environments: list[str], **columns: Any) -> list[float]:
        return [float(len(each)) for each in environments]

    def in_kwargs(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(kwargs["environments"][place])) for place in range(len(completions))]

    async def asked_for(**kwargs: Any) -> list[float]:
        return [float(len(each)) for each in kwargs.get("environments") or ["four", ""]]

    functions = RewardFunctions([length, named, in_kwargs, asked_for, functools.partial(in_kwargs, other=1)])
    assert functions.reading_environments == ("named", "in_kwargs", "asked_for", "partial")
    judged = functions.judge_environments(PROMPTS, COMPLETIONS, IDS, {}, ["ab", "c"])
    assert judged == {name: [2.0, 1.0] for name in functions.reading_environments}
    with pytest.raises(RewardError, match="'named' has an argument 'environments', and there are no environments"):
        functions.do_without_environments()
    alone = RewardFunctions(asked_for)
    alone.do_without_environments()
    assert not alone.reading_environments and alone(PROMPTS, COMPLETIONS, IDS, {}).total.tolist() == [4.0, 0.0]
