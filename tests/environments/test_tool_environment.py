"""Tool calls are answered in their order whatever finishes first or fails, and nothing runs on afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from lightning_realloc.environments import StepResult, Tool, ToolEnvironment
from lightning_realloc.environments.tool_environment import AddedTools
from lightning_realloc.environments.tools.tool import tools_of
from lightning_realloc.errors import ConfigError
from tests.environments.some_tools import Echo, add, call, shout, turn

T = TypeVar("T")


def tool(name: str, function: Any) -> Tool:
    """Return a tool of a function whose arguments are not described."""
    return Tool(name, function, {"type": "function", "function": {"name": name}})


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, and check that no task and no thread remains."""
    before = set(threading.enumerate())

    async def checked() -> T:
        result = await coroutine
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    result = asyncio.run(checked())
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    return result


def contents(result: StepResult) -> list[Any]:
    return [message["content"] for message in result.messages]


def test_a_turn_without_calls_ends_the_episode() -> None:
    assert run(ToolEnvironment([add]).step(turn(content="4"))) == StepResult(done=True)
    assert run(ToolEnvironment([add]).step({**turn(), "tool_calls": []})).done


def test_answers_have_the_form_of_tool_messages_and_are_counted() -> None:
    calls = [call("add", {"a": 2, "b": 3}, 4), call("shout", '{"text": "hé"}', 5), call("add", {"a": 1}, 6)]
    result = run(ToolEnvironment([add, shout]).step(turn(*calls)))
    assert result.messages == (
        {"role": "tool", "tool_call_id": "call00004", "name": "add", "content": "5"},
        {"role": "tool", "tool_call_id": "call00005", "name": "shout", "content": "HÉ"},
        {"role": "tool", "tool_call_id": "call00006", "name": "add", "content": "2"},
    )
    assert not result.done and result.reward is None
    counts = {name: value for name, value in result.metrics.items() if not name.startswith("tool_s/")}
    assert counts == {
        "tool_calls/add": 2, "tool_failures/add": 0, "tool_calls/shout": 1, "tool_failures/shout": 0,
    }  # fmt: skip
    assert {name for name in result.metrics if name.startswith("tool_s/")} == {"tool_s/add", "tool_s/shout"}


def test_asynchronous_tools_run_at_the_same_time_and_plain_ones_one_after_another() -> None:
    last_began = asyncio.Event()
    ended: list[str] = []
    running: list[str] = []

    async def first() -> str:
        await last_began.wait()  # would wait for ever if the next tool did not run meanwhile
        ended.append("first")
        return "1"

    async def last() -> str:
        last_began.set()
        ended.append("last")
        return "2"

    def plain(number: int) -> list[str]:
        running.append(f"begin {number}")
        threading.Event().wait(0.002)
        running.append(f"end {number}")
        return running[:]

    environment = ToolEnvironment([tool("first", first), tool("last", last), tool("plain", plain)])
    calls = [call("plain", {"number": 0}), call("first", {}), call("plain", {"number": 1}), call("last", {})]
    result = run(environment.step(turn(*calls)))
    assert ended == ["last", "first"]
    assert running == ["begin 0", "end 0", "begin 1", "end 1"]
    assert [message["name"] for message in result.messages] == ["plain", "first", "plain", "last"]
    assert contents(result)[1::2] == ["1", "2"]


def test_arguments_may_have_any_name() -> None:
    def plain(function: int, name: int, self: int) -> list[int]:
        return [function, name, self]

    async def asynchronous(function: int, arguments: int) -> list[int]:
        return [function, arguments]

    environment = ToolEnvironment([tool("plain", plain), tool("asynchronous", asynchronous)])
    given = {"function": 1, "name": 2, "self": 3}
    calls = call("plain", given), call("asynchronous", {"function": 4, "arguments": 5})
    assert contents(run(environment.step(turn(*calls)))) == ["[1, 2, 3]", "[4, 5]"]


def exits() -> None:
    raise SystemExit(3)


def fails() -> None:
    raise ValueError("bad\nluck")


async def gives_up() -> None:
    raise TimeoutError("the server is slow")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def test_failures_are_answers_that_leave_the_other_calls_alone() -> None:
    functions = {"exits": exits, "fails": fails, "gives_up": gives_up, "cancels_itself": cancels_itself}
    environment = ToolEnvironment([add, *(tool(name, function) for name, function in functions.items())])
    calls = [
        *(call(name, {}) for name in functions), call("find", {}), call("add", {"a": []}), call("add", "{"),
        {"id": "call00007", "type": "function"}, call("add", {"a": 1}),
    ]  # fmt: skip
    result = run(environment.step(turn(*calls)))
    errors = [json.loads(content)["error"] for content in contents(result)[:-1]]
    assert errors[:4] == [
        "SystemExit: 3",
        "ValueError: bad\nluck",
        "TimeoutError: the server is slow",
        "CancelledError: ",
    ]
    assert errors[4] == "there is no tool 'find'; the tools are: add, exits, fails, gives_up, cancels_itself"
    assert "must be of type integer" in errors[5] and "no JSON" in errors[6] and "no tool ''" in errors[7]
    assert contents(result)[-1] == "2"
    failures = {name: value for name, value in result.metrics.items() if name.startswith("tool_failures/")}
    assert failures == {f"tool_failures/{name}": 1 for name in functions} | {
        "tool_failures/unknown": 2, "tool_failures/add": 2,
    }  # fmt: skip


def test_calls_past_the_deadline_are_given_up_and_the_others_answered() -> None:
    release, cancelled = threading.Event(), []

    def hangs() -> str:
        release.wait(10)
        return "too late"

    async def hangs_too() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def both() -> StepResult:
        environment = ToolEnvironment([add, tool("hangs", hangs), tool("hangs_too", hangs_too)], tool_deadline_s=0.05)
        result = await environment.step(turn(call("hangs", {}), call("hangs_too", {}), call("add", {"a": 1})))
        release.set()
        return result

    result = run(both())
    assert contents(result) == [
        '{"error": "hangs did not answer within 0.05 seconds"}',
        '{"error": "hangs_too did not answer within 0.05 seconds"}',
        "2",
    ]
    assert cancelled == [True]


def test_a_cancelled_step_cancels_its_calls() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def cancel() -> None:
        calls = [call("waits", {})] * 3
        step = asyncio.create_task(ToolEnvironment([tool("waits", waits)]).step(turn(*calls)))
        await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    run(cancel())
    assert ended == [True] * 3


def test_results_become_text_that_every_tokenizer_reads() -> None:
    results: dict[str, Any] = {
        "object": {"é": [1, None]},
        "other": {"path": threading.Event},
        "text": "a\ud800b",
        "nothing": None,
        "key": {(1,): 2},
    }
    environment = ToolEnvironment([tool(name, lambda value=value: value) for name, value in results.items()])
    result = run(environment.step(turn(*(call(name, {}) for name in results))))
    texts = contents(result)
    assert texts[:4] == ['{"é": [1, null]}', '{"path": "<class \'threading.Event\'>"}', "a?b", "null"]
    assert json.loads(texts[4])["error"].startswith("TypeError: keys must be")


def test_content_in_parts_is_joined_unless_it_shows_images() -> None:
    words = [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]
    rows = [{"type": "article", "title": "One"}]
    shown = [*words, {"type": "image", "image": b""}]
    sound = [*words, {"type": "audio", "audio": b""}]
    results = {"words": words, "picture": shown, "rows": rows, "empty": [], "sound": sound}
    tools = [tool(name, lambda found=found: found) for name, found in results.items()]
    made = contents(run(ToolEnvironment(tools).step(turn(*(call(name, {}) for name in results)))))
    assert made[0] == "One two." and json.loads(made[2]) == rows and made[3] == "[]"
    assert made[1] == shown
    assert json.loads(made[4]) == {"error": "content has parts of type audio; only texts can be read there"}


def test_long_answers_are_cut_off_and_say_so() -> None:
    def fails() -> None:
        raise ValueError("x" * 50)

    functions = {"exact": lambda: "x" * 8, "long": lambda: "x" * 9, "fails": fails}
    environment = ToolEnvironment([tool(name, f) for name, f in functions.items()], max_answer_characters=8)
    exact, long, failed = contents(run(environment.step(turn(*(call(name, {}) for name in functions)))))
    assert exact == "x" * 8
    assert long == "x" * 8 + "\n[cut off here: these are the first 8 of 9 characters]"
    assert json.loads(failed)["error"].startswith("ValueErr\n[cut off here")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"tool_deadline_s": 0}, "tool_deadline_s=0 must be above 0; use math.inf"),
        ({"tool_deadline_s": "3"}, "tool_deadline_s='3' must be above 0"),
        ({"max_answer_characters": 0}, "max_answer_characters=0 must be a whole number of at least 1"),
    ],
)
def test_invalid_bounds_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ToolEnvironment([add], **settings)


def test_a_subclass_that_forgets_the_base_class_is_told_so() -> None:
    class Forgetful(ToolEnvironment):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Forgetful\.__init__ must begin with super\(\)\.__init__\(tools\)"):
        run(Forgetful().step(turn(call("add", {}))))


class Desk(Echo):
    """A user with a tool of their own, who answers calls of it and speaks."""

    tools = tools_of([add])  # type: ignore[assignment]

    def step(self, message: Any) -> StepResult:
        self.seen.append(message)
        answers = [{"role": "tool", "tool_call_id": found["id"], "name": "add", "content": "desk"}
                   for found in message.get("tool_calls", ())]  # fmt: skip
        return StepResult([*answers, {"role": "user", "content": "Well?"}], metrics={"asked": 1})


def test_added_tools_answer_their_calls_and_leave_the_rest_to_the_environment() -> None:
    desk = Desk()
    environment = AddedTools(desk, tools_of([shout]))
    assert [tool.name for tool in environment.tools] == ["shout", "add"]
    shouted, added, invented = call("shout", {"text": "a"}, 0), call("add", {"a": 1}, 1), call("find", {}, 2)

    alone = run(environment.step(turn(shouted)))
    assert contents(alone) == ["A"] and desk.seen == []

    mixed = run(environment.step(turn(added, shouted, invented)))
    assert contents(mixed) == [
        "desk",
        "A",
        '{"error": "there is no tool \'find\'; the tools are: shout, add"}',
        "Well?",
    ]
    assert mixed.metrics["asked"] == mixed.metrics["tool_calls/shout"] == mixed.metrics["tool_failures/unknown"] == 1

    run(environment.step(turn(content="Hello.")))
    assert desk.seen == [turn(added), turn(content="Hello.")]
