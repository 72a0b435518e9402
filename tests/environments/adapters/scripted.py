"""A scripted model that plays an environment of messages, as an episode does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_realloc.environments import Message, MessageEnvironment, StepResult
from lightning_realloc.environments.message_environment import checked_conversation, checked_result, checked_reward
from lightning_realloc.generation.loop.asking import call


@dataclass(slots=True)
class ScriptedGame:
    """A played conversation."""

    prompt: Sequence[Message] | None = None
    """Messages that ``reset`` returned."""
    results: list[StepResult] = field(default_factory=list)
    reward: float | None = None
    """Reward of the episode, as the environment gives it at the end."""

    @property
    def said(self) -> list[list[Any]]:
        """Content of the environment's messages, by turn."""
        return [[message["content"] for message in result.messages] for result in self.results]


def play(environment: MessageEnvironment, row: Mapping[str, Any], turns: Sequence[str | Message]) -> ScriptedGame:
    """Return the conversation of an environment with a model that says these turns, until one ends the episode."""
    return asyncio.run(_play(environment, row, turns))


async def _play(
    environment: MessageEnvironment, row: Mapping[str, Any], turns: Sequence[str | Message]
) -> ScriptedGame:
    game = ScriptedGame(checked_conversation(await call(environment.reset, row), environment))
    for turn in turns:
        message = {"role": "assistant", "content": turn} if isinstance(turn, str) else turn
        result = checked_result(await call(environment.step, message), environment)
        game.results.append(result)
        if result.done:
            break
    game.reward = checked_reward(await call(environment.get_reward), "get_reward()")
    await call(environment.close)
    return game
