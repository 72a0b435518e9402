"""Environments behind a server of OpenEnv, as environments of messages.

Each episode has a client, and so a session of the server, of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openenv.core import EnvClient, GenericEnvClient

from lightning_realloc.data.chat import is_conversation
from lightning_realloc.environments.message_environment import Message, MessageEnvironment, StepResult
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.loop.asking import call

_OWN_FIELDS = frozenset({"done", "reward", "metadata"})
"""Fields of every observation, which are not for the model."""


class OpenEnvEnvironment(MessageEnvironment):
    """Environment that a server of OpenEnv plays, through ``reset`` and ``step`` of a client.

    The conversation begins with the row's prompt, to which the server's first observation is added as a message of the
    user. Rewards are those of the server's steps.

    Args:
        base_url: Address of the server, such as ``"http://localhost:8000"``. It must allow as many sessions as an
            iteration has responses: each keeps its own from its first observation to its reward.
        action: From a turn of the model to the client's action; or the name of the action's field that takes its text.
        observe: From an observation to text; None: a single field's text, or JSON of all fields.
        client: Class of the client, such as that of a package for one environment.
        reset_columns: Columns of the row that ``reset`` gets by name. All responses to a row must get the same task, as
            by a seed.
        timeout_s: Most seconds of an answer of the server.
    """

    def __init__(
        self,
        base_url: str,
        action: str | Callable[[Message], Any] = "message",
        *,
        observe: Callable[[Any], str] | None = None,
        client: type[EnvClient] = GenericEnvClient,
        reset_columns: Sequence[str] = ("seed",),
        timeout_s: float = 60.0,
    ) -> None:
        if not isinstance(client, type) or not issubclass(client, EnvClient):
            raise ConfigError(f"client={client!r} must be a class derived from openenv.core.EnvClient")
        if isinstance(reset_columns, str):
            raise ConfigError(f"reset_columns={reset_columns!r} must be a list of columns; write [{reset_columns!r}]")
        self._base_url = base_url
        self._action = action
        self._observe = observe or _shown
        self._client_class = client
        self._reset_columns = tuple(reset_columns)
        self._timeout_s = timeout_s
        self._client: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Begin a session of the server.

        Raises:
            ConfigError: for a row without the columns that ``reset`` needs.
        """
        missing = [name for name in self._reset_columns if name not in row]
        if missing:
            raise ConfigError(
                f"reset of {self._base_url} gets the columns {list(self._reset_columns)}, and the row has no "
                f"{missing}; add them, so that all responses to a row get the same task, or set reset_columns"
            )
        self._client = self._client_class(base_url=self._base_url, message_timeout_s=self._timeout_s)
        result = await self._client.reset(**{name: row[name] for name in self._reset_columns})
        given = row.get("prompt")
        opening = {"role": "user", "content": await call(self._observe, result.observation)}
        if not is_conversation(given):
            return [opening]
        if given[-1]["role"] != "user":
            return [*given, opening]
        joined = f"{given[-1]['content']}\n\n{opening['content']}"  # templates refuse two messages of one role
        return [*given[:-1], {**given[-1], "content": joined}]

    async def step(self, message: Message) -> StepResult:
        """Send the model's turn to the server."""
        chosen = self._action
        action = {chosen: message["content"]} if isinstance(chosen, str) else await call(chosen, message)
        result = await self._client.step(action)
        reward = None if result.reward is None else float(result.reward)
        if result.done:
            return StepResult(reward=reward, done=True)
        return StepResult([{"role": "user", "content": await call(self._observe, result.observation)}], reward=reward)

    async def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _shown(observation: Any) -> str:
    """Return an observation's own fields: the text of a single one, or JSON."""
    fields = observation if isinstance(observation, Mapping) else observation.model_dump()
    own = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    if len(own) == 1:
        (value,) = own.values()
        if isinstance(value, str):
            return value
    return json.dumps(own, ensure_ascii=False, default=str)
