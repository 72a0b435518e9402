"""Conversations as text for tables, reports and logs: turns with calls, answers, rewards and seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_realloc.data.chat import Message


def transcript(conversation: Mapping[str, Any]) -> str:
    """Return a conversation of the column ``conversation`` as text, one paragraph for each message.

    Example:
        >>> call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        >>> print(transcript({
        ...     "messages": [{"role": "assistant", "content": "", "tool_calls": [call]},
        ...                  {"role": "tool", "name": "add", "content": "3"}],
        ...     "rewards": [0.5], "seconds": [0.25], "failure": None}))
        assistant calls add(a=1, b=2) [reward 0.5, 0.25 s]
        tool add: 3
    """
    rewards, seconds = iter(conversation["rewards"]), iter(conversation["seconds"])
    lines = []
    for message in conversation["messages"]:
        if message["role"] == "assistant":
            lines.append(f"{_turn(message)} [{_outcome(next(rewards, None), next(seconds, 0.0))}]")
        else:
            name = f" {message['name']}" if message.get("name") else ""
            lines.append(f"{message['role']}{name}: {message_text(message.get('content'))}")
    if conversation["failure"] is not None:
        lines.append(f"failed: {conversation['failure']}")
    return "\n".join(lines)


def _turn(message: Message) -> str:
    thought, content = message.get("reasoning_content"), message_text(message.get("content"))
    parts = [f"thinks: {thought.strip()}"] if thought else []
    parts += [f"says: {content}"] if content else []
    parts += [f"calls {call_text(call['function'])}" for call in message.get("tool_calls") or ()]
    return f"{message['role']} " + ", ".join(parts or ["says nothing"])


def message_text(content: object) -> str:
    """Return a message's content; parts that are no text, such as images, as their type."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return json.dumps(content, ensure_ascii=False)


def call_text(function: Mapping[str, Any]) -> str:
    """Return a call of a tool as text, such as ``add(a=1, b=2)``."""
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function['name']}({arguments})"


def _outcome(reward: float | None, seconds: float) -> str:
    return ("" if reward is None else f"reward {reward:g}, ") + f"{seconds:.2f} s"
