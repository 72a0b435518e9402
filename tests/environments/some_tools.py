"""Tools and environments that several test files use, at the top of a module so that they can be imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_realloc.environments import MessageEnvironment, StepResult


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


async def shout(text: str, how: Literal["up", "down"] = "up") -> str:
    """Change the case of a text.

    Args:
        text: The text.
        how: Direction.
    """
    return text.upper() if how == "up" else text.lower()


class Counter:
    """TRL's contract: public methods are tools, ``reset`` gets columns, ``get_reward`` ends the episode."""

    def __init__(self) -> None:
        self.count = -1

    def reset(self, start: int = 0, **columns: Any) -> str | None:
        self.count, self.columns = start, columns
        return f" It begins at {start}." if start else None

    def increment(self, step: int) -> int:
        """Raise the counter.

        Args:
            step: Amount to add.

        Returns:
            The counter.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class AsyncCounter:
    """The same contract, all methods asynchronous, without a reward."""

    async def reset(self, **columns: Any) -> str:
        self.count = 0
        return " Go."

    async def increment(self, step: int) -> int:
        """Raise the counter.

        Args:
            step: Amount to add.
        """
        self.count += step
        return self.count

    def _hidden(self) -> None:
        """Private methods are no tools."""


class Echo(MessageEnvironment):
    """Repeats the model's message, counts its turns, and ends after a number of them."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.seen: list[Mapping[str, Any]] = []

    def step(self, message: Mapping[str, Any]) -> StepResult:
        self.seen.append(message)
        said = [{"role": "user", "content": message["content"]}]
        return StepResult(said, reward=1.0, done=len(self.seen) >= self.most, metrics={"length": 1})


def call(name: str, arguments: object, number: int = 0) -> dict[str, Any]:
    """Return a tool call as the parser of turns makes it."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: Mapping[str, Any], content: str = "") -> dict[str, Any]:
    """Return a message of the model with these calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message
