"""A talk of single words with a partner, for tests of models that environments talk to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_realloc.environments import MessageEnvironment, StepResult
from tests.environments.guessing import NUMBERS

MAX_REPLY = 6
"""Most tokens of a partner's reply."""


class Talking(MessageEnvironment):
    """Hands what the model says to its partner, whose reply is the answer; rewards numbers that the partner says."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin a talk, which the partner knows from its own side."""
        self.talk = [{"role": "user", "content": f"Guess {row['secret']}"}]
        self.num_numbers = 0

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Return the partner's reply."""
        self.talk.append({"role": "user", "content": message["content"]})
        reply = await self.partners["other"].reply(self.talk, max_new_tokens=MAX_REPLY)
        self.talk.append(reply)
        self.num_numbers += sum(word in map(str, range(NUMBERS)) for word in reply["content"].split())
        return StepResult([{"role": "user", "content": reply["content"]}], reward=0.1 * self.num_numbers)
