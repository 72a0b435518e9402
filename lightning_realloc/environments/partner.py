"""Models of the run that an environment talks to, by the chat template of each."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_realloc.data.chat import Message, is_conversation
from lightning_realloc.environments.tools.tool import Tool, tools_of
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.loop.environment import EVENT_LOOP

if TYPE_CHECKING:
    from lightning_realloc.environments.turns.chat_turns import ChatTurns
    from lightning_realloc.environments.turns.turn_parser import TurnParser
    from lightning_realloc.generation.partners import PartnerQueue


@dataclass(frozen=True, slots=True)
class Voice:
    """How a model is asked, and how its answers are read."""

    role: str
    """Role of the model."""
    parser: TurnParser
    stop_token_ids: frozenset[int]
    """Tokens that end a turn of the model."""
    chat: ChatTurns | None = None
    """Chat template; None: that of the episode, whose settings a row may override."""


@dataclass(frozen=True, slots=True)
class PartnerSettings:
    """The partners of a run's environments."""

    voices: dict[str, Voice]
    """How each is talked to, by the name that environments know."""
    queue: PartnerQueue
    """Takes questions to the models."""


@dataclass(slots=True, eq=False)
class Replies:
    """Replies of one episode, by the question's name, turn and number in the turn.

    An environment that plays the episode again reads them again, also after the models have changed.
    """

    sample_id: int
    """Sample of the episode, which keys random numbers."""
    known: dict[tuple[str, int, int], tuple[tuple[int, ...], Message]] = field(default_factory=dict)
    """Tokens of the prompt, and the reply."""

    def key_of(self, question: tuple[str, int, int]) -> int:
        """Return the number that keys the random numbers of a question's answer."""
        text = "/".join(map(str, (self.sample_id, *question)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class Partners(dict[str, "Partner"]):
    """Partners of one environment by name; an unknown name raises ConfigError."""

    turn: int = 0
    """Turn of the model that the environment answers; 0: `reset`."""
    num_asked: Counter[str]
    """Questions in this turn, by the partner's name."""
    is_over: bool = False
    """Whether the episode is over, so that the environment is only closed."""

    def begin_turn(self, number: int) -> None:
        """Number the questions of a turn from 0 on."""
        self.turn, self.num_asked = number, Counter()

    def __missing__(self, name: object) -> Partner:
        known = f"; there are {', '.join(map(repr, self))}" if self else ", and there are none"
        raise ConfigError(f"an environment asks for partners[{name!r}]{known}; give the algorithm partners= with it")


class Partner:
    """A model that an environment talks to.

    Args:
        name: Name of the partner.
        voice: How it is talked to.
        chat: Chat template of the episode.
        partners: Partners of the same environment.
        replies: Replies of the episode.
        queue: Takes questions to the model.
    """

    def __init__(
        self, name: str, voice: Voice, chat: ChatTurns, partners: Partners, replies: Replies, queue: PartnerQueue
    ) -> None:
        self._name, self._voice, self._chat = name, voice, voice.chat or chat
        self._partners, self._replies, self._queue = partners, replies, queue

    def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[str | Callable[..., Any] | Tool] = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Coroutine[Any, Any, Message]:
        """Return the model's next message in a conversation, to be awaited in an async method.

        The same question in a replayed episode gets the same reply. Time until the reply counts in no deadline.

        Args:
            messages: The conversation from the model's point of view: its own messages have the role ``assistant``.
            tools: Functions with annotations and a docstring that it may call.
            max_new_tokens: Most tokens of the reply; None: as the rollout.
            temperature: None: that of the rollout.

        Returns:
            ``{"role": "assistant", "content": ...}``, with ``reasoning_content`` and ``tool_calls`` where it has them.

        Raises:
            ConfigError: for anything but messages, settings that sampling does not have, and a call that is not awaited
                by an environment.
            GenerationError: for a conversation without room for a reply.
        """
        if not EVENT_LOOP.runs_here:
            raise ConfigError(
                f"partners[{self._name!r}].reply is awaited by environments, and was called in a plain method or "
                f"a loop of its own; define the method or tool with async def, and write await ...reply(...)"
            )
        if self._partners.is_over:
            raise ConfigError(
                f"partners[{self._name!r}].reply was called in close(), after the episode; ask in reset, step or "
                f"get_reward"
            )
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not is_conversation(list(messages)):
            raise ConfigError(
                f"partners[{self._name!r}].reply needs messages with 'role' and 'content'; got {repr(messages)[:80]}"
            )
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        try:
            SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except GenerationError as error:
            raise ConfigError(f"partners[{self._name!r}].reply: {error}") from None
        return self._reply(messages, tools, max_new_tokens, temperature)

    async def _reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[str | Callable[..., Any] | Tool],
        max_new_tokens: int | None,
        temperature: float | None,
    ) -> Message:
        partners, voice = self._partners, self._voice
        question = (self._name, partners.turn, partners.num_asked[self._name])
        partners.num_asked[self._name] += 1
        schemas = [tool.schema for tool in tools_of(tools)]
        prompt = tuple(self._chat.prompt_ids(messages, schemas))
        known = self._replies.known.get(question)
        if known is None or known[0] != prompt:
            tokens = await self._queue.ask(
                voice.role,
                self._replies.key_of(question),
                prompt,
                stop_token_ids=voice.stop_token_ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
            )
            message = voice.parser.parse_tokens(
                tokens, before=prompt, stop_token_ids=voice.stop_token_ids, first_call=0, tools=schemas
            )
            known = self._replies.known[question] = prompt, message
        return copy.deepcopy(known[1])


def partners_of(settings: PartnerSettings, chat: ChatTurns, replies: Replies) -> Partners:
    """Return the partners of a new environment of an episode."""
    made = Partners()
    made.begin_turn(0)
    for name, voice in settings.voices.items():
        made[name] = Partner(name, voice, chat, made, replies, settings.queue)
    return made
