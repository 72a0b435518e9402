"""Environments with TRL's contract: public methods are the tools, ``reset`` gets columns, ``get_reward`` the reward.

Source: the docstring of ``environment_factory`` in TRL's ``GRPOTrainer``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_realloc.data.chat import as_message, is_conversation
from lightning_realloc.data.prompts import EMPTY_PROMPT
from lightning_realloc.environments.message_environment import Message
from lightning_realloc.environments.tool_environment import ToolEnvironment
from lightning_realloc.environments.tools.arguments import CallError
from lightning_realloc.environments.tools.tool import RESERVED_NAMES, Tool
from lightning_realloc.environments.tools.tool_calls import content_parts, shown_parts
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.rewards.signatures import accepted

_OWN_METHODS = RESERVED_NAMES - {"step"}
"""Methods that are no tools. TRL knows no ``close``: a method of this name releases what the object holds."""


def has_trl_contract(found: object) -> bool:
    """Return whether an object or class has a method ``reset`` and is not called itself."""
    kind = found if isinstance(found, type) else type(found)
    return callable(getattr(kind, "reset", None)) and "__call__" not in dir(kind)


class TrlEnvironment(ToolEnvironment):
    """Environment that makes one of an object with TRL's contract.

    Public methods are the tools, in the order of their names. What ``reset(**columns)`` returns, a string or parts of a
    message with texts and images, is appended to the last message of the prompt. ``get_reward()`` is asked once, at the
    end.

    TRL constructs an object once and resets it often, so constructors may be slow, or connect to a server. An object
    without ``close`` is therefore given back at the end of its episode, unless one of its methods may still run.

    Args:
        wrapped: The object. Methods may be ``async``.
        control_column: Column that selects the environment, which ``reset`` does not get; None: there is none.
        give_back: Receives the object at the end.
        bounds: Those of `ToolEnvironment`.
    """

    def __init__(
        self,
        wrapped: Any,
        *,
        control_column: str | None = None,
        give_back: Callable[[Any], None] | None = None,
        **bounds: Any,
    ) -> None:
        super().__init__(_methods(wrapped), **bounds)
        self.wrapped = wrapped
        """The object that was given."""
        self.has_reward = hasattr(wrapped, "get_reward")
        """Whether the object has a reward of its own."""
        self._control_column = control_column
        self._give_back = give_back
        self._was_cancelled = False

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Reset the object with the row's columns; return the prompt with what it adds, None if it adds nothing.

        Raises:
            ConfigError: for results other than texts and images, such as sounds.
        """
        columns = {name: value for name, value in row.items() if name != self._control_column}
        said = await self._ask(self.wrapped.reset, **accepted(self.wrapped.reset, columns))
        if said is None:
            return None
        name = f"{type(self.wrapped).__name__}.reset"
        try:
            parts: Sequence[str | Mapping[str, Any]] | None
            parts = [said] if isinstance(said, str) else shown_parts(said) or content_parts(said)
        except CallError as problem:
            raise ConfigError(
                f"{name} must return texts and images: {problem}; describe the rest in words"
            ) from problem
        if parts is None:
            raise ConfigError(
                f"{name} must return text or parts to append to the prompt, or None; it returned {repr(said)[:60]}"
            )
        return _appended(row.get("prompt"), parts)

    async def get_reward(self) -> float | None:
        """Return the object's reward; None: it has none."""
        reward: float | None = await self._ask(self.wrapped.get_reward) if self.has_reward else None
        return reward

    async def close(self) -> None:
        """Close the object, or give it back for another episode."""
        give_back, self._give_back = self._give_back, None
        if hasattr(self.wrapped, "close"):
            await call(self.wrapped.close)
        elif give_back is not None and not (self._was_cancelled or self._calls.has_abandoned):
            give_back(self.wrapped)

    async def _ask(self, method: Callable[..., Any], /, **columns: Any) -> Any:
        try:
            return await call(method, **columns)
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise


def _methods(wrapped: object) -> list[Tool]:
    """Return the tools of an object: its public methods, but for those of the contract."""
    members = inspect.getmembers(type(wrapped), predicate=inspect.isfunction)
    names = [name for name, _ in members if not name.startswith("_") and name not in _OWN_METHODS]
    if "step" in names:
        raise ConfigError(
            f"{type(wrapped).__name__} has a method 'step', which is no tool; derive from MessageEnvironment if it "
            f"answers turns, or rename it if it is a tool of the model"
        )
    return [Tool.from_function(getattr(wrapped, name)) for name in names]


def _appended(prompt: object, parts: Sequence[str | Mapping[str, Any]]) -> list[Message]:
    messages = as_message(prompt, True) or EMPTY_PROMPT
    if not is_conversation(messages):
        raise ConfigError(f"the row's prompt must be text or messages with 'role' and 'content'; it is {prompt!r:.80}")
    last = dict(messages[-1])
    content = last.get("content") or ""
    texts = [part for part in parts if isinstance(part, str)]
    if isinstance(content, str) and len(texts) == len(parts):
        last["content"] = "".join([content, *texts])
    else:
        given = [content] if isinstance(content, str) else content
        last["content"] = [{"type": "text", "text": p} if isinstance(p, str) else p for p in (*given, *parts) if p]
    return [*messages[:-1], last]
