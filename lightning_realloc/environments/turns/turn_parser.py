"""Parse the text of a model's turn into an assistant message with its thought, its content and its tool calls.

transformers' response templates describe how a model writes them. A tokenizer may bring one; those of common families
are package data, ``response_formats.yaml``. Each call is parsed by itself: a malformed one leaves the others readable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from lightning_realloc.data.chat import Message
from lightning_realloc.environments.turns.written_calls import read_calls, read_malformed
from lightning_realloc.errors import ConfigError, GenerationError, describe_error, error_line
from lightning_realloc.rewards.signatures import check_returns, check_takes, function_name, import_function, is_async

Parser = str | Mapping[str, Any] | Callable[[str], Message]
"""Name of a format in ``response_formats.yaml``, a response template, or a function of a turn's text."""
Part = Literal["thinking", "calls", "answer"]
"""Part of a turn: thoughts, calls of tools, or all other text, each with the tokens that open and close it."""
PARTS: tuple[Part, ...] = get_args(Part)
_NO_CALLS = "text"
"""Format without tool calls, for chat templates that contain no format's marks."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates have for a thought."""
_MOST_SHOWN = 80
"""Most characters of a turn that an error shows."""
MOST_TOKENS_BEFORE = 64
"""Tokens before a turn that are read for the header of the assistant, which may open a thought."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Characters of a turn between the tokens that open and close a field of the format."""

    field: str
    """Name of the field, such as ``tool_calls`` for one call, or a list of calls."""
    begin: int
    end: int
    """Characters of the turn with the tokens that open and close the region."""
    body: str
    """Text between those tokens."""
    name: str | None
    """Name of the tool; None if it is in the body."""
    is_closed: bool


class TurnParser:
    """Parser of turns, which never fails on what a model writes.

    Args:
        tokenizer: Tokenizer whose chat template the model follows.
        parser: How the model writes tool calls; None: as the tokenizer's ``response_template`` says, else in the format
            whose marks are in its chat template. A function gets a turn without its stop token.

    Raises:
        ConfigError: for an unknown format, a response template that transformers does not accept, or a function that
            cannot be called with a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, parser: Parser | None = None) -> None:
        self._tokenizer = tokenizer
        if isinstance(parser, str) and ":" in parser:
            parser = import_function(parser, what="parser", error=ConfigError)
        self._given = parser
        self._function = parser if callable(parser) else None
        self.format = _format_name(tokenizer, parser)
        """Name of the format in ``response_formats.yaml``; None for a response template or function from elsewhere."""
        spec = _formats()[self.format]["template"] if self.format else parser
        if spec is None:
            spec = tokenizer.response_template
        self._fields: Mapping[str, ResponseTemplateField] = {}
        if isinstance(spec, Mapping):
            self._template = _loaded(spec)
            self._fields = self._template.fields
            fields = {name: field for name, field in spec["fields"].items() if name != "tool_calls"}
            self._rest_template = _loaded({**spec, "fields": fields or {"content": {}}})
            self._tags = _tags(spec["fields"].get("tool_calls", {})) if self.format else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of turns that the format has."""
        has = {"thinking": bool(self._thoughts), "calls": "tool_calls" in self._fields, "answer": True}
        return tuple(part for part in PARTS if has[part])

    @property
    def shows_thoughts(self) -> bool:
        """Whether the chat template or the vocabulary has a mark of thoughts, or a response template describes them."""
        if self.format is None:
            return bool(self._thoughts)
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        texts = [_template_text(self._tokenizer), *(token.content for token in added)]
        marks = [mark for field in self._thoughts for mark in (field.open_re, field.close_re) if mark is not None]
        return any(mark.search(text) for mark in marks for text in texts)

    def check(self, tools: Sequence[Mapping[str, Any]], shown: Sequence[str] = ()) -> None:
        """Raise ConfigError if there are tools, and no format is known in which the model calls them.

        Args:
            tools: JSON schemas of the tools.
            shown: Text before a turn that calls the first tool, and the turn, as the chat template shows them to the
                model. A format that was given must find the call; a function may read what the template does not show.
        """
        if tools and self.format == _NO_CALLS:
            raise ConfigError(
                f"tools need a format in which the model calls them, and the tokenizer has neither a response_template "
                f"nor a chat template of a known family; give parser= {_choices()}"
            )
        if not tools or not shown or self._given is None or self._function is not None:
            return
        before, turn = shown
        calls = self.parse(turn, first_call=0, tools=tools, before=before).get("tool_calls", ())
        name = tools[0]["function"]["name"]
        if [call["function"]["name"] for call in calls] != [name]:
            raise ConfigError(
                f"parser={_shortened(self._given)} finds no call in the chat template's own, which is "
                f"{turn.strip()[:_MOST_SHOWN]!r}; leave parser out, give the format of the model's calls, or set "
                f"tokenizer.chat_template to one that shows calls in this format"
            )

    def parse(
        self, text: str, *, first_call: int, tools: Sequence[Mapping[str, Any]] = (), before: str = "", end: str = ""
    ) -> Message:
        """Return a turn as a message with ``content``, and ``reasoning_content`` and ``tool_calls`` if it has any.

        Arguments of a call are a dict, or the text that the model wrote if it is no JSON object. A malformed call
        without a name stays in the content.

        Args:
            text: The turn without its stop token, and with all other special tokens.
            first_call: Number of the turn's first call, which makes its id.
            tools: JSON schemas of the tools: in some formats, they alone tell the number 1 from the text "1".
            before: Text before the turn, at least from the assistant's header on. It may open a thought.
            end: Text of the stop token, which response templates from elsewhere may look for.
        """
        if self._function is not None:
            return _from_function(self._read(text), first_call)
        whole = self._opened(before) + text + ("" if self.format else end)
        calls: list[dict[str, Any]] = []
        rest, done = "", 0
        for region in self._regions(whole):
            if region.field == "tool_calls" and (found := self._calls(region, whole, tools)):
                calls += found
                rest, done = rest + whole[done : region.begin], region.end
        rest += whole[done:]
        return _message(_parsed(rest, self._rest_template) or {"content": rest}, calls, first_call)

    def part_starts(self, text: str, *, before: str = "", end: str = "") -> list[tuple[int, Part]]:
        """Return the first character of each part of a turn, in order from 0, and the part.

        Blanks between two parts belong to the first one. A turn that cannot be read is all answer. See `parse` for the
        arguments.
        """
        if self._function is not None:
            return [(0, "answer")]
        opened = self._opened(before)
        whole = opened + text + ("" if self.format else end)
        starts: list[tuple[int, Part]] = []
        done = 0
        for region in self._regions(whole):
            part = self._part(region, whole)
            if part == "answer":
                continue
            if whole[done : region.begin].strip():
                starts.append((done, "answer"))
            starts.append((region.begin, part))
            done = region.end
        if not starts or whole[done : len(opened) + len(text)].strip():
            starts.append((done, "answer"))
        (_, first), *others = starts
        return [(0, first), *((max(0, begin - len(opened)), part) for begin, part in others)]

    def parse_tokens(
        self,
        own: Sequence[int],
        *,
        before: Sequence[int],
        stop_token_ids: Collection[int],
        first_call: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Message:
        """Return a turn as `parse` does.

        Args:
            own: Tokens of the turn, with its stop token if it has one.
            before: Tokens of the conversation before the turn.
            stop_token_ids: Tokens that end a turn.
            first_call: Number of the turn's first call.
            tools: JSON schemas of the tools.
        """
        end = len(own) - int(len(own) > 0 and own[-1] in stop_token_ids)
        return self.parse(
            self._text(own[:end]),
            first_call=first_call,
            tools=tools,
            before=self._text(before[-MOST_TOKENS_BEFORE:]),
            end=self._text(own[end:]),
        )

    def _read(self, text: str) -> object:
        """Return the result of the function that was given, for a turn."""
        assert self._function is not None
        try:
            return self._function(text)
        except Exception as error:
            raise GenerationError(
                f"parser={function_name(self._function)} raised {describe_error(error)}{error_line(error)} for the "
                f"turn {_shortened(text)}; let it return {{'content': text}} for a turn that it cannot read"
            ) from error

    @property
    def _thoughts(self) -> list[ResponseTemplateField]:
        return [field for name, field in self._fields.items() if name in _THOUGHTS]

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _opened(self, before: str) -> str:
        """Return the end of the text before a turn that is part of the message."""
        starts = [match.end() for match in self._template.start_anchor_re.finditer(before)]
        return before[starts[-1] :] if starts else ""

    def _regions(self, text: str) -> Iterator[_Region]:
        """Yield the regions of a turn in order. What looks like a region within another one is text."""
        begin = 0
        fields = [field for field in self._fields.values() if field.open_re is not None]
        while found := [(match, field) for field in fields if (match := field.open_re.search(text, begin))]:
            # transformers' rule: the first one, of those the longest.
            opening, field = min(found, key=lambda pair: (pair[0].start(), -pair[0].end(), pair[1].name))
            closing = field.close_re.search(text, opening.end()) if field.close_re is not None else None
            end = closing.end() if closing is not None else len(text)
            body = text[opening.end() : end if closing is None else closing.start()]
            name = opening.groupdict().get("name")
            yield _Region(field.name, opening.start(), end, body, name, is_closed=closing is not None)
            if end == begin:  # a template whose tokens are empty would find this place for ever
                break
            begin = end

    def _part(self, region: _Region, text: str) -> Part:
        """Return the part of a turn to which a region belongs. A field that cannot be read stays in the content."""
        if region.field == "tool_calls":
            return "calls" if self._calls(region, text) else "answer"
        if region.field not in _THOUGHTS:
            return "answer"
        raw = text[region.begin : region.end]
        return "answer" if _parsed(raw, self._rest_template) is None else "thinking"

    def _calls(self, region: _Region, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        raw = text[region.begin : region.end]
        # transformers leaves out text between arguments' tags, so the call would run with some of its arguments.
        is_whole = self._tags is None or self._tags.fullmatch(region.body) is not None
        parsed = _parsed(raw, self._template, tools) if region.is_closed and is_whole else None
        calls = read_calls(parsed.get("tool_calls")) if parsed else []
        return calls or read_malformed(region.body if region.body.strip() else raw, region.name)


@cache
def _formats() -> dict[str, dict[str, Any]]:
    import yaml  # only where turns are parsed

    text = files(__package__).joinpath("response_formats.yaml").read_text(encoding="utf-8")
    formats: dict[str, dict[str, Any]] = yaml.safe_load(text)["formats"]
    return formats


def _format_name(tokenizer: PreTrainedTokenizerBase, parser: Parser | None) -> str | None:
    if isinstance(parser, str):
        if parser not in _formats():
            raise ConfigError(f"parser={parser!r} is not known; give {_choices()}")
        return parser
    if callable(parser):
        _check_function(parser)
    elif not isinstance(parser, Mapping | None):
        raise ConfigError(f"parser={parser!r} is a {type(parser).__name__}; give {_choices()}")
    if parser is not None or getattr(tokenizer, "response_template", None) is not None:
        return None
    text = _template_text(tokenizer)
    return next(name for name, found in _formats().items() if all(mark in text for mark in found["marks"]))


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    templates = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(templates.values()) if isinstance(templates, Mapping) else str(templates)


def _check_function(parser: Callable[[str], Message]) -> None:
    way_out = "give its other arguments defaults, or functools.partial(...)"
    check_takes(parser, "the text of a turn", what="parser", way_out=way_out, error=ConfigError)
    check_returns(parser, f"parser {function_name(parser)}", error=ConfigError)
    if is_async(parser):
        raise ConfigError(
            f"parser {function_name(parser)} must return a message at once, and is async; define it with def, and let "
            f"a tool or the environment do what takes time"
        )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _choices() -> str:
    names = ", ".join(name for name in _formats() if name != _NO_CALLS)
    return (
        f"one of {names}; a response template of transformers as a dict; or a function from a turn's text to a message"
    )


def _loaded(spec: Mapping[str, Any]) -> ResponseTemplate:
    try:
        template: ResponseTemplate = load_response_template(dict(spec))
    except ValueError as error:
        raise ConfigError(f"transformers does not accept the response template: {error}; give {_choices()}") from error
    if template.implicit == "tool_calls":
        raise ConfigError(
            "the field tool_calls of a response template needs open or open_pattern, so that a malformed call can "
            "stay in the content; add it, or give parser= a function from a turn's text to a message"
        )
    for name in _THOUGHTS:
        field = template.fields.get(name)
        if field is not None and field.content == "text":  # transformers keeps the last thought of a turn
            template.fields[name] = replace(field, repeats=True, join="\n" if field.join is None else field.join)
    return template


def _tags(field: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern of the whole body of a call whose arguments are in tags; None for other calls."""
    tag = field.get("content_args", {}).get("tag_pattern")
    # Atomic groups: each tag is matched in one way, so that a body without closing tags takes linear time.
    return re.compile(rf"\s*+(?>{tag}\s*+)*+", re.DOTALL) if tag else None


def _parsed(text: str, template: ResponseTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """Return the message that transformers reads in a text; None if it is malformed."""
    try:
        found: dict[str, Any] = parse_response(text, template, prefix="", tools=[dict(tool) for tool in tools])
    except Exception:  # besides ValueError: RecursionError for deep JSON, and errors of transforms and tools' schemas
        return None
    return found


def _message(parsed: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], first_call: int) -> dict[str, Any]:
    """Return a message with one name for thoughts, text as content, and numbered calls."""
    others = {key: value for key, value in parsed.items() if key not in ("content", "tool_calls", *_THOUGHTS)}
    message: dict[str, Any] = {"role": "assistant", **others, "content": _text(parsed.get("content"))}
    if thought := next((text for key in _THOUGHTS if (text := _text(parsed.get(key)))), ""):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            # Mistral's templates demand ids of nine characters.
            {"id": f"call{first_call + index:05d}", "type": "function", "function": dict(call)}
            for index, call in enumerate(calls)
        ]
    return message


def _text(value: object) -> str:
    parts = value if isinstance(value, list) else [value]
    return "".join(part for part in parts if isinstance(part, str)).strip()


def _from_function(message: object, first_call: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"a parser returns a message, such as {{'content': text}} for a turn without calls; got {message!r}"
        )
    calls = read_calls(message.get("tool_calls"))
    if message.get("tool_calls") and not calls:
        raise ConfigError(
            f"a parser's tool_calls is a list of {{'name': ..., 'arguments': {{...}}}}; got {message['tool_calls']!r}"
        )
    return _message(message, calls, first_call)
