"""Every form of the settings environment= and tools= makes one environment per sample, or is refused at once."""

from __future__ import annotations

import asyncio
import functools
import pickle
from typing import Any

import pytest

from lightning_realloc.algorithms.rollout.conversations.dialogues import EpisodeDialogues, dialogues_of
from lightning_realloc.environments import MessageEnvironment, StepResult, ToolEnvironment
from lightning_realloc.environments.environment_factory import EnvironmentFactory, is_message_source
from lightning_realloc.environments.tool_environment import plain_environment
from lightning_realloc.environments.tools.tool import Tool, tools_of
from lightning_realloc.environments.trl_environment import TrlEnvironment
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Conversation
from tests.environments.some_tools import AsyncCounter, Counter, Echo, add, call, shout, turn


def make_echo() -> Echo:
    return Echo(3)


class Rewarded(Echo):
    def get_reward(self) -> float:
        return 1.0


class Judged(ToolEnvironment):
    """Tools, with a reward of its own in step."""

    def __init__(self) -> None:
        super().__init__([add])

    async def step(self, message: Any) -> StepResult:
        return StepResult(reward=1.0, done=True)


class FromRow(MessageEnvironment):
    """Its tools are those that the row names."""

    def reset(self, row: Any) -> None:
        self._tools = tools_of([add] if row["adds"] else [])

    @property
    def tools(self) -> Any:
        return self._tools

    def step(self, message: Any) -> StepResult:
        return StepResult(done=True)


def names(environment: MessageEnvironment) -> list[str]:
    return [tool.name for tool in environment.tools]


@pytest.mark.parametrize(
    ("source", "kind", "most"),
    [
        (Echo, Echo, 2), (make_echo, Echo, 3), (functools.partial(Echo, 5), Echo, 5), (Echo(7), Echo, 7),
        ("tests.environments.some_tools:Echo", Echo, 2), (f"{__name__}.make_echo", Echo, 3),
        (Counter, TrlEnvironment, None), (Counter(), TrlEnvironment, None),
        (functools.partial(Counter), TrlEnvironment, None),
        ("tests.environments.some_tools:Counter", TrlEnvironment, None),
        ({"class_path": f"{__name__}.NeedyCounter", "init_args": {"path": "a"}}, TrlEnvironment, None),
        ({"class_path": "tests.environments.some_tools.Echo", "init_args": {"most": 4}}, Echo, 4),
        ({"class_path": "tests.environments.some_tools.Echo"}, Echo, 2),
    ],
)  # fmt: skip
def test_each_form_of_a_source_makes_an_environment_of_its_own_for_every_sample(
    source: Any, kind: type, most: int | None
) -> None:
    assert is_message_source(source)
    factory = EnvironmentFactory(source)
    made = [factory.make({}) for _ in range(3)]
    assert all(type(environment) is kind for environment in made)
    states = [environment.wrapped if isinstance(environment, TrlEnvironment) else environment for environment in made]
    assert len(set(map(id, states))) == 3 and not any(state is source for state in states)
    assert most is None or [environment.most for environment in made] == [most] * 3  # type: ignore[attr-defined]


def test_copies_of_an_object_share_nothing() -> None:
    prototype = Echo()
    factory = EnvironmentFactory(prototype)
    first, second = factory.make({}), factory.make({})
    first.step(turn(content="a"))
    assert isinstance(first, Echo) and isinstance(second, Echo)
    assert (len(first.seen), second.seen, prototype.seen) == (1, [], [])


def test_tools_alone_are_an_environment() -> None:
    factory = EnvironmentFactory(None, [add, shout])
    environment = factory.make({})
    assert names(environment) == ["add", "shout"] == [tool.name for tool in factory.tools]
    assert not factory.gives_rewards and not factory.writes_prompts
    assert environment is not factory.make({})


@pytest.mark.parametrize("source", [Counter, Echo, Judged, FromRow])
def test_tools_are_added_to_those_of_an_environment(source: type) -> None:
    factory = EnvironmentFactory(source, [shout])
    for _ in range(2):
        environment = factory.make({})
        asyncio.run(_begin(environment))
        own = {Counter: ["increment"], Echo: [], Judged: ["add"], FromRow: ["add"]}[source]
        assert names(environment) == ["shout", *own]
    answer = asyncio.run(_step(environment, turn(call("shout", {"text": "a"}))))
    assert source is Judged or answer.messages[0]["content"] == "A"


async def hang() -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "0.02"),
        (Counter, "0.02"),
        (Echo, "0.02"),
        (functools.partial(ToolEnvironment, tool_deadline_s=0.04), "0.04"),
    ],
)
def test_one_call_of_a_tool_has_half_of_the_answers_deadline(source: Any, expected: str) -> None:
    dialogues = dialogues_of(source, [hang], None, Conversation(deadline_s=0.04))
    assert isinstance(dialogues, EpisodeDialogues)
    answer = asyncio.run(_step(dialogues.factory.make({}), turn(call("hang", {}))))
    assert f"hang did not answer within {expected} seconds" in answer.messages[0]["content"]


async def _begin(environment: MessageEnvironment) -> None:
    begun = environment.reset({"adds": True})
    if asyncio.iscoroutine(begun):
        await begun


async def _step(environment: MessageEnvironment, message: Any) -> StepResult:
    result = environment.step(message)
    return result if isinstance(result, StepResult) else await result


@pytest.mark.parametrize(
    ("source", "tools", "rewards", "known"),
    [
        (Counter, [], True, ["increment"]), (AsyncCounter, [], False, ["increment"]), (Echo, [], True, []),
        (Echo, [add], True, ["add"]), (Rewarded, [add], True, ["add"]), (Judged, [], True, ["add"]),
        (FromRow, [], True, []), (functools.partial(ToolEnvironment, [add]), [], False, ["add"]),
        ({"a": AsyncCounter, "b": Counter}, [], True, ["increment"]),
        ({"a": Echo, "b": Counter}, [shout], True, ["shout", "increment"]),
    ],
)  # fmt: skip
def test_rewards_and_tools_are_known_before_the_first_row(
    source: Any, tools: list[Any], rewards: bool, known: list[str]
) -> None:
    factory = EnvironmentFactory(source, tools)
    assert factory.gives_rewards is rewards
    assert factory.writes_prompts is (source in (Counter, AsyncCounter, FromRow) or isinstance(source, dict))
    assert [tool.name for tool in factory.tools] == known


def test_the_column_selects_one_of_several_environments_and_stays_out_of_resets() -> None:
    factory = EnvironmentFactory({"count": Counter, "echo": "tests.environments.some_tools:Echo"})
    counter = factory.make({"environment": "count"})
    assert isinstance(counter, TrlEnvironment) and isinstance(factory.make({"environment": "echo"}), Echo)
    asyncio.run(counter.reset({"environment": "count", "level": 3}))
    assert counter.wrapped.columns == {"level": 3}
    with pytest.raises(ConfigError, match=r"names one of 'count', 'echo'; in a row it is 'chess'; correct the row"):
        factory.make({"environment": "chess"})
    with pytest.raises(ConfigError, match=r"in a row it is missing, of columns \['level', 'prompt'\]"):
        factory.make({"prompt": "?", "level": 3})
    factory.check_rows({"environment": ["count", "echo", "count"]})
    for columns, given in (({"environment": ["count", None]}, "is None"), ({"level": [1]}, "is missing, of columns")):
        with pytest.raises(ConfigError, match=f"in a row it {given}"):
            factory.check_rows(columns)


class Needy(MessageEnvironment):
    def __init__(self, path: str) -> None:
        self.path = path


class NeedyCounter(Counter):
    def __init__(self, path: str) -> None:
        super().__init__()


class Broken(MessageEnvironment):
    def __init__(self) -> None:
        raise OSError("no server")


class Connected(Echo):
    def __init__(self) -> None:
        self.lines = (line for line in ("a", "b"))  # generators can be neither copied nor pickled


def changed(**methods: Any) -> type:
    return type("Changed", (Echo,), methods)


def yielding(self: Any, *given: Any) -> Any:
    yield StepResult(done=True)


async def yielding_later(self: Any, *given: Any) -> Any:
    yield StepResult(done=True)


@pytest.mark.parametrize(
    ("source", "tools", "rule"),
    [
        (None, [], r"environment=None and tools=\[\] make no environment; give one of them"),
        (Needy, [], r"environment=Needy cannot be made \(TypeError.*'path'\); .* needs by functools\.partial"),
        (NeedyCounter, [], r"environment=NeedyCounter cannot be made \(TypeError"),
        (Broken, [], r"environment=Broken cannot be made \(OSError: no server\)"),
        ({"class_path": f"{__name__}.NeedyCounter", "init_args": {"way": 1}}, [], r"cannot be made \(TypeError.*'way'"),
        ({"a": {"class_path": "os.mkdir", "init_args": {"path": "x"}}}, [], r"class_path='os.mkdir' names no class"),
        (Connected(), [], r"cannot be copied \(TypeError.*give its class, or functools\.partial"),
        (7, [], r"environment=7 is a int; give a class or object of MessageEnvironment"),
        (int, [], r"environment=int makes a int; it must make a MessageEnvironment, or an object with a method reset"),
        ({}, [], r"maps names to environments; got environment=\{\}"),
        ({"a": {"b": Echo}}, [], r"environment\['a'\]=.* is a dict"),
        ({"a": Echo, "b": Needy}, [], r"environment\['b'\]=Needy cannot be made"),
        ("tests.environments.some_tools:Ecko", [], "environment '.*:Ecko' cannot be imported"),
        (Echo, [add, Tool("add", make_echo, {"function": {"name": "add"}})], r"is that of .*; rename one of them"),
        (Judged, [add], r"'add' is that of .*; leave one of them out"),
        (type("Desk", (Echo,), {"tools": tools_of([add])}), [add], r"'add' is that of .*; leave one of them out"),
        (type("Listing", (Echo,), {"tools": [add]}), [], r"Listing\.tools must be a list of Tool"),
        (Echo, "tests.environments.some_tools:add", r"must be a list of functions"),
        (MessageEnvironment, [], r"MessageEnvironment has no method for it; define step\(self, message\)"),
        (changed(step=lambda self, message, row: None), [], r"Changed\.step cannot be called as step\(mess.*'row'"),
        (changed(reset=lambda self: None), [add], r"define it as reset\(self, row\)"),
        (changed(close=lambda self, now: None), [], r"Changed\.close cannot be called as close\(\).*'now'"),
        (changed(step=yielding), [], r"Changed\.step must return its result, and contains yield"),
        (changed(reset=yielding_later), [add], r"Changed\.reset must return its result, and contains yield"),
        (type("Desk", (Counter,), {"get_reward": yielding}), [], r"Desk\.get_reward must return .* write return"),
    ],
)  # fmt: skip
def test_settings_of_which_no_environment_can_be_made_are_refused(source: Any, tools: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        EnvironmentFactory(source, tools)


def test_objects_of_trl_are_constructed_once_and_reset_for_the_next_sample() -> None:
    made: list[Counter] = []

    class Counted(Counter):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    factory = EnvironmentFactory(Counted)
    environments = [factory.make({}) for _ in range(2)]
    for environment in environments:
        asyncio.run(environment.close())  # type: ignore[arg-type]
    again = [factory.make({}) for _ in range(3)]
    wrapped = {id(environment.wrapped) for environment in again if isinstance(environment, TrlEnvironment)}
    assert len(made) == 3 and wrapped == set(map(id, made))


def test_factories_reach_other_processes_without_the_objects_of_this_one() -> None:
    factory = EnvironmentFactory({"a": Counter, "b": functools.partial(Echo, 4)}, [shout])
    there = pickle.loads(pickle.dumps(factory))
    environment = there.make({"environment": "a"})
    own = plain_environment(environment)
    assert isinstance(own, TrlEnvironment) and own.wrapped.count == -1
    assert names(environment) == ["shout", "increment"]
    pickle.dumps(EnvironmentFactory(Connected))  # its object stays here


class OfTokens:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, turn: Any) -> list[int]:
        return [1]


def of_turn(turn: Any) -> list[int]:
    return [1]


def test_environments_that_answer_a_turn_with_tokens_are_told_apart() -> None:
    for source in (OfTokens, OfTokens(None), of_turn, functools.partial(of_turn), 7):
        assert not is_message_source(source)
    assert is_message_source({"a": Echo}) and is_message_source(Needy) and is_message_source(NeedyCounter)
