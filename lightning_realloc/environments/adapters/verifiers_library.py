"""Environments of verifiers, as environments of messages, and their data as rows.

The library's own rollout runs, with a client that waits for the turns of the trained model. It stays in one event loop
of its own, since an episode's methods may be called from several.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import AssistantMessage, Response, ResponseMessage, ToolCall

from lightning_realloc.data.chat import plain_messages
from lightning_realloc.environments.message_environment import Message, MessageEnvironment, StepResult
from lightning_realloc.environments.tools.tool import Tool
from lightning_realloc.errors import ConfigError

T = TypeVar("T")
_MODEL = "policy"
"""Name of the model, which the library passes on alone."""


class VerifiersEnvironment(MessageEnvironment):
    """Environment that plays a rollout of a `SingleTurnEnv`, `MultiTurnEnv` or `ToolEnv` of verifiers.

    The reward is that of the environment's rubric. Rows are those of `verifiers_rows`. All responses of a process share
    the library's environment, which keeps the state of each rollout apart.

    Args:
        source: A name for ``verifiers.load_environment``, a function that makes an environment, or an environment. Only
            the first two can be sent to other ranks.
        arguments: Arguments of the function, or of the named environment.
    """

    def __init__(self, source: str | Callable[..., Any] | vf.Environment, **arguments: Any) -> None:
        self._source = _Source(source, arguments)
        self._rollout: _Rollout | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools of the environment, or those of the row after `reset`."""
        found = self._source.environment.tool_defs if self._rollout is None else self._rollout.tools
        return [_tool(definition) for definition in found or ()]

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Begin a rollout up to the first question to the model.

        Raises:
            ConfigError: for a rubric that compares the rollouts of a group.
        """
        self._rollout = _Rollout(self._source.environment)
        asked = _run(self._rollout.begin(row))
        assert asked is not None, "a rollout asks the model first"
        return _messages(asked)

    def step(self, message: Message) -> StepResult:
        """Continue the rollout up to its next question, or to its end and score."""
        rollout = self._begun()
        before = rollout.asked
        asked = _run(rollout.answer(message))
        if asked is None:
            _run(rollout.score())
            return StepResult(done=True, metrics=rollout.metrics)
        shown = _messages(asked)
        if len(asked) <= len(before) or _messages(before) != shown[: len(before)]:
            raise ConfigError(
                f"{type(rollout.environment).__name__} rewrites earlier messages, and episodes here only append; write "
                f"a MessageEnvironment for it"
            )
        return StepResult(shown[len(before) + 1 :])

    def get_reward(self) -> float:
        """Return the rubric's reward; a rollout that the limits end is scored as if its prompt were too long."""
        rollout = self._begun()
        if rollout.reward is None:
            _run(rollout.stop())
            _run(rollout.score())
        assert rollout.reward is not None, "it was scored"
        return rollout.reward

    def close(self) -> None:
        """Cancel the rollout if it has not ended, with the environment's cleanup."""
        if self._rollout is not None:
            _run(self._rollout.cancel())

    def _begun(self) -> _Rollout:
        assert self._rollout is not None, "an episode begins with reset"
        return self._rollout


def verifiers_rows(
    source: str | Callable[..., Any] | vf.Environment, size: int = -1, seed: int | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    """Return the data set of an environment as rows for `PromptDataModule`.

    Args:
        source: The environment, as that of `VerifiersEnvironment`.
        size: Number of rows; -1: all.
        seed: Seed of the rows' order; None: the data set's order.
        arguments: As those of `VerifiersEnvironment`.
    """
    dataset = _Source(source, arguments).environment.get_dataset(n=size, seed=seed)
    return [{**row, "prompt": [_without_none(message) for message in row["prompt"]]} for row in dataset]


class _Source:
    """The library's environment, made once in each process."""

    def __init__(self, source: str | Callable[..., Any] | vf.Environment, arguments: Mapping[str, Any]) -> None:
        self._source = source
        self._arguments = arguments
        self._made: Any = None
        self.environment  # noqa: B018, checks that it can be made

    @property
    def environment(self) -> Any:
        if self._made is None:
            made: Any = self._source
            if isinstance(made, str):
                made = vf.load_environment(made, **self._arguments)
            elif not isinstance(made, vf.Environment):
                made = made(**self._arguments)
            if not isinstance(made, vf.MultiTurnEnv):
                raise ConfigError(
                    f"{self._source!r} makes a {type(made).__name__}; VerifiersEnvironment plays environments that are "
                    f"derived from verifiers.MultiTurnEnv"
                )
            if made.rubric.has_group_rewards:
                raise ConfigError(
                    f"the rubric of {type(made).__name__} compares the rollouts of a group, and a response is scored "
                    f"alone here; leave these functions out, or give them as reward="
                )
            self._made = made
        return self._made

    def __deepcopy__(self, memo: object) -> _Source:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Source, (self._source, self._arguments)


class _TrainedModel(Client):
    """Client of the library that hands each question over, and waits for the answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.questions: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[Response | Exception] = asyncio.Queue()

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Response:
        self.questions.put_nowait((prompt, tools))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        return None

    async def _unused(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("get_response asks no server")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = _unused


class _Rollout:
    """A rollout that runs between questions to the model. Its methods run in the loop of `_loop`."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.asked: Sequence[Any] = ()
        """Messages of the last question."""
        self.tools: Sequence[Any] = ()
        self.reward: float | None = None
        self.metrics: Mapping[str, float] = {}

    async def begin(self, row: Mapping[str, Any]) -> Sequence[Any] | None:
        self._model = _TrainedModel()
        self._task = asyncio.create_task(self.environment.rollout(dict(row), self._model, _MODEL, {}))
        return await self._next_question()

    async def answer(self, message: Message) -> Sequence[Any] | None:
        """Return the next question; None: the rollout has ended."""
        self._model.answers.put_nowait(_response(message))
        return await self._next_question()

    async def stop(self) -> None:
        """End the rollout as the library does if a prompt is too long: without an error."""
        self._model.answers.put_nowait(vf.OverlongPromptError())
        await self._task

    async def score(self) -> None:
        state = self._task.result()
        rubric = self.environment.rubric
        await (rubric.score_rollout if self.environment.score_rollouts else rubric.dummy_score_rollout)(state)
        await rubric.cleanup(state)
        self.reward = float(state["reward"])
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}

    async def cancel(self) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _next_question(self) -> Sequence[Any] | None:
        question = asyncio.create_task(self._model.questions.get())
        await asyncio.wait([question, self._task], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            self.asked, tools = question.result()
            self.tools = tools or ()
            return self.asked
        question.cancel()
        error = self._task.result()["error"]
        if error is not None:
            raise error
        return None


def _response(message: Message) -> Response:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ToolCall(id=call["id"], name=call["function"]["name"], arguments=written))
    made = ResponseMessage(
        content=message.get("content"),
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id="", created=0, model=_MODEL, message=made)


def _messages(given: Sequence[Any]) -> list[Message]:
    """Return the library's messages in the form of transformers' chat templates."""
    names: dict[str, str] = {}
    found = []
    for message in given:
        made = message.model_dump(exclude_none=True)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if made["role"] == "tool":
            made["name"] = names.get(made["tool_call_id"], "")
        found.append({**made, "content": made.get("content", "")})
    return plain_messages(found, "an environment of verifiers")


def _tool(definition: Any) -> Tool:
    described = {name: getattr(definition, name) for name in ("name", "description", "parameters")}
    return Tool(definition.name, _answered_by_rollout, {"type": "function", "function": described})


def _answered_by_rollout(**_: Any) -> None:
    raise AssertionError("the rollout answers calls")


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the columns that a table adds to it."""
    return {name: value for name, value in message.items() if value is not None}


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in the adapter's loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid())).result()


@lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return a running loop of this process; a forked one needs a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments of verifiers", daemon=True).start()
    return loop
