"""Tool calls in ``lightning-realloc chat``: read them, carry them out, show the answers, and let the model go on."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.data.chat import Message
from lightning_realloc.data.images.sample_images import ImageProcessor, shown_input
from lightning_realloc.environments.message_environment import StepResult, read_images
from lightning_realloc.environments.tools.tool import Tool
from lightning_realloc.environments.tools.tool_calls import ToolRunner, text_of
from lightning_realloc.environments.transcript import message_text
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import Parser, TurnParser
from lightning_realloc.errors import ConfigError, DataError, GenerationError
from lightning_realloc.generation import Completion
from lightning_realloc.generation.loop.environment import EVENT_LOOP

_MOST_SHOWN = 2000
"""Characters of an answer that are shown; the model reads all of it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that terminals obey. A tool's answer may hold any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """Tools of a conversation, and how answers use them."""

    tools: tuple[Tool, ...]
    """Tools that the chat template shows to the model."""
    max_turns: int = 8
    """Most turns of the model in one answer, by default as many as in training."""
    parser: Parser | None = None
    """How the model writes calls; None: as its chat template shows."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"--max-turns={self.max_turns} must be at least 1")


class ChatTools:
    """Lets a model call tools in its answers, as in training.

    Args:
        tokenizer: The model's tokenizer.
        settings: Tools, and how answers use them.
        write: Receives the answers as text; the model's own text is shown elsewhere.
        stop_token_ids: Tokens that end a turn of the model.

    Raises:
        ConfigError: for a chat template that cannot show tools and answers, and for calls in an unknown format.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ToolSettings,
        write: Callable[[str], object],
        *,
        stop_token_ids: Collection[int],
    ) -> None:
        self._write = write
        self._stops, self._max_turns = frozenset(stop_token_ids), settings.max_turns
        self._schemas = [tool.schema for tool in settings.tools]
        self._runner = ToolRunner(settings.tools)
        self._chat = ChatTurns(tokenizer, stop_token_ids=stop_token_ids)
        self._chat.check(self._schemas)
        self._parser = TurnParser(tokenizer, settings.parser)
        self._parser.check(self._schemas, self._chat.shown_call(self._schemas))

    def turns(
        self,
        messages: Sequence[Message],
        generate: Callable[[ModelInput], Completion],
        find_processor: Callable[[], ImageProcessor | None],
    ) -> list[Message]:
        """Return the model's turns and the tools' answers, up to a turn without calls.

        Calls of a turn that is cut off, and of the last turn that is allowed, are left out.

        Args:
            messages: The conversation so far.
            generate: Generates the turn after a prompt.
            find_processor: Returns the model's processor of images; None for a model of text.
        """
        turns: list[Message] = []
        ids = self._chat.prompt_ids(messages, self._schemas)
        for number in range(1, self._max_turns + 1):
            completion = generate(shown_input(ids, [*messages, *turns], find_processor))
            own = list(completion.token_ids)
            message = self._parser.parse_tokens(
                own,
                before=ids,
                stop_token_ids=self._stops,
                first_call=_num_calls([*messages, *turns]),
                tools=self._schemas,
            )
            calls = message.get("tool_calls", ())
            if calls and (reason := self._refusal(completion, number)):
                self._write(f"(calls are left out: {reason})\n")
                calls = ()
                message = {name: value for name, value in message.items() if name != "tool_calls"}
            turns.append(message)
            if not calls:
                break
            answers = [self._carry_out(call, find_processor) for call in calls]
            turns += answers
            ids = [*ids, *own, *self._chat.answer_ids(own, message, answers, self._schemas)]
        return turns

    def _refusal(self, completion: Completion, number: int) -> str:
        """Return why no calls of a turn are carried out; empty if they are."""
        if completion.finish_reason != "stop":
            return f"the turn was cut off after {len(completion.token_ids)} tokens; raise --max-new-tokens"
        return "" if number < self._max_turns else f"this was turn {number}; raise --max-turns"

    def _carry_out(self, call: Mapping[str, Any], find_processor: Callable[[], ImageProcessor | None]) -> Message:
        """Return the answer to a call, and show it. The model reads that Ctrl-C ended it, or that images are bad."""
        name, begin = call["function"]["name"], time.monotonic()
        future = None
        try:
            future = EVENT_LOOP.submit(self._runner.answers([call]))
            messages, _ = future.result()
            result = StepResult(messages)
            (answer,) = (read_images(result, name, find_processor) if result.shows_images else result).messages
        except (KeyboardInterrupt, DataError, GenerationError) as problem:
            if future is not None:
                future.cancel()
            stopped = isinstance(problem, KeyboardInterrupt)
            content = text_of({"error": f"the user stopped this call of {name}" if stopped else str(problem)})
            answer = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
        seconds = time.monotonic() - begin
        text = textwrap.indent(_shown(message_text(answer["content"])), "  ")
        self._write(f"[{name} answers after {seconds:.2f} s]\n{text}\n")
        return answer


def _num_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.get("tool_calls", ())) for message in messages)


def _shown(text: str) -> str:
    """Return a text as a terminal can show it, without its end if it is long."""
    more = len(text) - _MOST_SHOWN
    short = text if more <= 0 else f"{text[:_MOST_SHOWN]}\n[{more} more characters]"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", short.replace("\r\n", "\n"))
