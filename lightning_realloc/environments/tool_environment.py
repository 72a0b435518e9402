"""Environments that answer tool calls: `ToolEnvironment`, and `AddedTools` around another environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_realloc.environments.message_environment import (
    Message,
    MessageEnvironment,
    StepResult,
    checked_conversation,
    checked_result,
    checked_tools,
)
from lightning_realloc.environments.tools.tool import Tool, check_distinct, tools_of
from lightning_realloc.environments.tools.tool_calls import (
    DEFAULT_ANSWER_CHARACTERS,
    DEFAULT_DEADLINE_S,
    ToolRunner,
)
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.loop.asking import call


class ToolEnvironment(MessageEnvironment):
    """Environment that answers tool calls; a turn without calls ends the episode.

    Unknown tools, wrong arguments, exceptions and time-outs are answers to the model, ``{"error": ...}``. It is shown a
    result that is a Pillow image, or a list of images, texts and parts of messages; another one that is no text becomes
    JSON. ``async`` tools of a turn run at the same time, plain ones one after another in threads.

    Args:
        tools: Functions with annotations and docstrings, their import paths, or `Tool` objects. All samples share the
            functions of ``tools=`` of an algorithm; state of one sample belongs in a subclass.
        tool_deadline_s: Most seconds of one call; None: half of ``Conversation(deadline_s=...)``.
        max_answer_characters: Most characters of one answer; the rest is cut off, which the answer says.

    Example:
        >>> import asyncio
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: First number.
        ...         b: Second number.
        ...     '''
        ...     return a + b
        >>> call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        >>> message = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> asyncio.run(ToolEnvironment([add]).step(message)).messages
        ({'role': 'tool', 'tool_call_id': 'call00000', 'name': 'add', 'content': '5'},)
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool | str] = (),
        *,
        tool_deadline_s: float | None = None,
        max_answer_characters: int = DEFAULT_ANSWER_CHARACTERS,
    ) -> None:
        self._has_deadline = tool_deadline_s is not None
        most_s = DEFAULT_DEADLINE_S if tool_deadline_s is None else tool_deadline_s
        if isinstance(most_s, bool) or not isinstance(most_s, int | float) or not most_s > 0:
            raise ConfigError(f"tool_deadline_s={tool_deadline_s!r} must be above 0; use math.inf to wait for ever")
        most = max_answer_characters
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError(f"max_answer_characters={most!r} must be a whole number of at least 1")
        self._runner = ToolRunner(tools_of(tools), deadline_s=most_s, max_characters=most)

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools that the chat template shows to the model."""
        return tuple(self._calls.tools.values())

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Add tools, before those that are there.

        Raises:
            ConfigError: for a name that is there already.
        """
        check_distinct((*tools, *self.tools))
        self._calls.tools = {tool.name: tool for tool in (*tools, *self.tools)}

    def bound_calls(self, deadline_s: float) -> None:
        """Bound the seconds of one call, unless the environment was given a bound."""
        if not self._has_deadline:
            self._calls.deadline_s = deadline_s

    async def step(self, message: Message) -> StepResult:
        """Return the answers to the message's calls, in their order; without calls, the episode is done."""
        calls = message.get("tool_calls") or ()
        if not calls:
            return StepResult(done=True)
        answers, metrics = await self._calls.answers(calls)
        return StepResult(answers, metrics=metrics)

    @property
    def _calls(self) -> ToolRunner:
        if not hasattr(self, "_runner"):
            name = type(self).__name__
            raise ConfigError(f"{name}.__init__ must begin with super().__init__(tools); {name} has no tools yet")
        return self._runner


class AddedTools(MessageEnvironment):
    """Environment with further tools, such as a simulated user while the model may search.

    Calls of the further tools are answered here. The environment sees turns without calls, and turns with calls of its
    own tools, as if there were no others.

    Args:
        inner: The environment.
        tools: Further tools, which come first in the prompt.
        tool_deadline_s: Most seconds of one of their calls.
    """

    def __init__(
        self, inner: MessageEnvironment, tools: Sequence[Tool], *, tool_deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        self.inner = inner
        self._own, self._deadline_s = tuple(tools), tool_deadline_s

    @property
    def tools(self) -> Sequence[Tool]:
        """The further tools, then the environment's own, which may depend on the row."""
        return (*self._own, *checked_tools(self.inner))

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Reset the environment."""
        begun = checked_conversation(await call(self.inner.reset, row), self.inner)
        check_distinct(self.tools)
        return begun

    async def step(self, message: Message) -> StepResult:
        """Answer calls of the further tools and of tools that do not exist; the environment answers the rest."""
        calls = list(message.get("tool_calls") or ())
        known = {tool.name for tool in checked_tools(self.inner)}
        for_inner = [found for found in calls if _name_of(found) in known]
        own = [found for found in calls if _name_of(found) not in known]
        answers, metrics = await ToolRunner(self.tools, deadline_s=self._deadline_s).answers(own)
        if own and not for_inner:
            return StepResult(answers, metrics=metrics)
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        seen = {**rest, "tool_calls": for_inner} if for_inner else rest
        result = checked_result(await call(self.inner.step, seen), self.inner)
        messages = _in_order_of_calls(calls, [*answers, *result.shown_messages])
        return StepResult(messages, reward=result.reward, done=result.done, metrics={**metrics, **result.metrics})

    async def get_reward(self) -> float | None:
        """Return the environment's reward."""
        reward: float | None = await call(self.inner.get_reward)
        return reward

    async def close(self) -> None:
        """Close the environment."""
        await call(self.inner.close)


def plain_environment(environment: MessageEnvironment) -> MessageEnvironment:
    """Return an environment without tools that were added to it."""
    return environment.inner if isinstance(environment, AddedTools) else environment


def only_calls_tools(environment: MessageEnvironment) -> bool:
    """Return whether an environment does nothing in a step but carry out the turn's calls."""
    return type(plain_environment(environment)).step is ToolEnvironment.step


def _name_of(found: Mapping[str, Any]) -> object:
    function = found.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _in_order_of_calls(calls: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[Message]:
    """Return messages with the answers to calls first, in the order of the calls."""
    places = {found.get("id"): place for place, found in enumerate(calls)}
    return sorted(messages, key=lambda message: places.get(message.get("tool_call_id"), len(calls)))
