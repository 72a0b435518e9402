"""Tokens of prompts, and of an environment's answers between two turns of the model, by the chat template.

What the model wrote is never tokenized again: the tokens of an answer are appended to it. So the template may change
earlier turns when the conversation continues, such as by dropping their thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import Message, Text, conversation_text, token_ids
from lightning_realloc.errors import ConfigError, DataError

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, as chat templates take them."""
_MARK = "e0f7a9c4d2"
"""Text in place of the model's turn, after which the turn's end is found."""
_TOKEN_MARK = "b8e1d6a3c7"
"""Text after the first character of the text of a special token."""
_ANSWER_MARK = "d4c9a7f0e2"
"""Text of an environment's message, to see whether the template contains it."""
_USER: Message = {"role": "user", "content": "."}
_PLACE = "an environment's messages"
_MOST_SHOWN = 60
"""Most characters of a rendered text that an error shows."""


class ChatTurns:
    """Renders messages by the tokenizer's chat template, and encodes them.

    Text of special tokens in messages of environments and partners stays text.

    Args:
        stop_token_ids: Tokens that end a turn of the model.
        template: Further arguments of the chat template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Collection[int],
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = dict(template or {})
        added = tokenizer.added_tokens_decoder
        # A stop token of ordinary text, such as a line break, does not end a turn in the template.
        self._stops = [added[index].content for index in stop_token_ids if index in added]
        self._special = [token.content for token in added.values() if token.special]
        self._special_text = _SpecialText(tokenizer, [*self._special, *self._stops])

    def prompt_ids(
        self, messages: Sequence[Message], tools: Tools = (), *, of_data: Sequence[Message] = ()
    ) -> list[int]:
        """Return the tokens of a conversation up to where the model's turn begins.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools that it shows.
            of_data: Messages of the data, in which text of special tokens becomes those tokens, as without tools.

        Raises:
            DataError: for messages that the chat template cannot render, or renders as no text.
        """
        marked = [message if message in of_data else self._special_text.marked(message) for message in messages]
        rendered = self._render(marked, tools)
        _check_shown(marked, rendered, lambda changed: self._render(changed, tools), of_data=of_data)
        ids = self._special_text.token_ids(rendered)
        if not ids:
            raise DataError(f"{_PLACE}: a prompt needs at least one token, and the chat template renders none")
        return ids

    def answer_ids(
        self, turn_ids: Sequence[int], message: Message, answer: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Return the tokens that follow the model's turn, up to where its next turn begins.

        They begin with the token that ends a turn in the template, unless it is the turn's last token.

        Args:
            turn_ids: Tokens that the model wrote.
            message: What :class:`TurnParser` makes of them; the answer refers to ids and names of its calls.
            answer: The environment's messages.

        Raises:
            DataError: for messages that the chat template cannot render.
        """
        calls = message.get("tool_calls") or ()
        marked = self._special_text.marked(answer)
        rendered = self._after_turn(calls, marked, tools)
        _check_shown(marked, rendered, lambda changed: self._after_turn(calls, changed, tools))
        end, after = self._first_end(rendered)
        ids = self._special_text.token_ids(end + after)  # as in a whole conversation, not as a text's start
        return ids[1:] if list(turn_ids[-1:]) == ids[:1] else ids

    def shown_call(self, tools: Tools) -> tuple[str, str]:
        """Return a turn that calls the first tool, as the chat template shows it: the text before it, and the turn."""
        name = str(tools[0]["function"]["name"])
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
        prompt = self._render([_USER], tools)
        whole = self._render([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
        before = "".join(
            ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
        )
        return before, self._until_stop(whole.removeprefix(before))

    def check(self, tools: Tools = ()) -> None:
        """Raise ConfigError if the chat template cannot show the tools and their answers, or the end of a turn."""
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"an environment of messages needs a chat template, and {type(self._tokenizer).__name__} has none; use "
                f"the tokenizer of a chat model, or set tokenizer.chat_template"
            )
        try:
            if tools:
                self._check_tools(tools)
            self._first_end(self._after_turn((), [_USER], tools))
        except DataError as error:
            raise ConfigError(
                f"an environment of messages needs a chat template that renders its answers; {error}"
            ) from error

    def _check_tools(self, tools: Tools) -> None:
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        rendered = self._render([_USER], tools)
        missing = [name for name in names if name not in rendered]
        if missing or rendered == self._render([_USER], ()):
            raise ConfigError(
                f"the model must read its tools, and the chat template leaves out {', '.join(missing or names)}; set "
                f"tokenizer.chat_template to one that renders tools, or describe them in the prompt and let the "
                f"environment have no tools"
            )
        call = {"id": "call00000", "type": "function", "function": {"name": names[0], "arguments": {}}}
        answer = {"role": "tool", "tool_call_id": "call00000", "name": names[0], "content": _ANSWER_MARK}
        after = self._after_turn([call], [answer], tools)
        if _ANSWER_MARK not in after:
            raise ConfigError(
                "the model must read answers of tools, and the chat template leaves them out; set "
                "tokenizer.chat_template to one that renders messages of the role tool"
            )
        end, _ = self._first_end(after)
        if end not in self._stops:
            raise ConfigError(
                f"a turn with tool calls must end with a stop token, which are {self._stops}; the chat template "
                f"continues with {after.partition(_ANSWER_MARK)[0][:_MOST_SHOWN]!r}: add the token that ends the turn "
                f"there to the stop tokens"
            )

    def _after_turn(self, calls: Sequence[Mapping[str, Any]], answer: Sequence[Message], tools: Tools) -> str:
        """Return the text that the template renders after the content of a turn, or the last argument of its calls."""
        turn: dict[str, Any] = {"role": "assistant", "content": "" if calls else _MARK}
        if calls:
            # All are marked, since some templates render the first one alone.
            turn["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"_": _MARK}}} for call in calls
            ]
        _, mark, after = self._render([_USER, turn, *answer], tools).rpartition(_MARK)
        if not mark:
            raise DataError(
                f"{_PLACE}: the chat template leaves out {'tool calls' if calls else 'turns of the assistant'}; set "
                f"tokenizer.chat_template to one that renders them"
            )
        return after

    def _until_stop(self, text: str) -> str:
        return text[: min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))]

    def _first_end(self, rendered: str) -> tuple[str, str]:
        """Return the first stop token of a text, without any the first special token, and the text after it.

        In gpt-oss, earlier turns without calls end with a token that the model does not stop at.
        """
        for tokens in (self._stops, self._special):
            if found := [(at, -len(token), token) for token in tokens if (at := rendered.find(token)) >= 0]:
                at, _, token = min(found)
                return token, rendered[at + len(token) :]
        raise ConfigError(
            f"a turn must end with a special token, after which the answer begins; the chat template continues with "
            f"{rendered[:_MOST_SHOWN]!r}: set tokenizer.chat_template to one that ends turns with "
            f"{self._stops or [self._tokenizer.eos_token]}"
        )

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        def text_of(some: Sequence[Message]) -> str:
            template = {**self._template, "tools": list(tools) or None}
            return conversation_text(
                self._tokenizer, list(some), _PLACE, add_generation_prompt=True, template=template
            ).text

        try:
            return text_of(messages)
        except DataError:
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == list(messages):
                raise
            return text_of(as_text)  # DeepSeek's templates append arguments to text


def _check_shown(
    messages: Sequence[Message],
    rendered: str,
    render: Callable[[Sequence[Message]], str],
    *,
    of_data: Sequence[Message] = (),
) -> None:
    """Raise DataError for messages that a template leaves out without an error, such as those of a role of its own.

    Turns of the assistant are left alone, since templates may change them.
    """
    for place, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "assistant" or message in of_data:
            continue
        if isinstance(content, str) and content.strip() in rendered:
            continue
        # Templates may escape a content, but not the mark.
        if _ANSWER_MARK not in render(
            [*messages[:place], {**message, "content": _ANSWER_MARK}, *messages[place + 1 :]]
        ):
            raise DataError(
                f"{_PLACE}: the chat template leaves out this message of the role {message['role']!r}; give it the "
                f"role 'user', or 'tool' if it answers a call"
            )


class _SpecialText:
    """Marks the text of special tokens in messages, and makes tokens of what a template renders of them.

    A mark is put into each such text before a template renders it, and tokens are made of the text between two marks.
    So templates may trim, escape and reorder contents.

    Args:
        tokenizer: The model's.
        tokens: Texts of special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._any_token = next(iter(tokens), "")
        marked = [text for text in (*tokens, _MARK, _TOKEN_MARK) if len(text) > 1]
        self._first_character = re.compile(
            "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in marked)
        )

    def marked(self, value: Any) -> Any:
        """Return a message, or a value in one, with a mark in each text of a special token."""
        if isinstance(value, str):
            return self._first_character.sub(rf"\g<0>{_TOKEN_MARK}", value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(inner) for key, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, list | tuple) else value

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered text; what is marked is text.

        Raises:
            DataError: for a text that the tokenizer cannot encode.
        """
        # Tokenizers refuse halves of surrogate pairs.
        first, *others = text.encode("utf-8", "replace").decode("utf-8").split(_TOKEN_MARK)
        # A token goes before each piece, since some tokenizers add a space at the start of a text.
        pieces = {piece: Text(self._any_token + piece, _PLACE, add_bos=False) for piece in others}
        ids, *found = token_ids(self._tokenizer, [Text(first, _PLACE, add_bos=False), *pieces.values()])
        of_piece = {piece: more[1:] for piece, more in zip(pieces, found, strict=True)}
        return [*ids, *(token for piece in others for token in of_piece[piece])]


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text_argument(call) for call in calls]} if calls else message


def _with_text_argument(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
