"""Carry out the tool calls of a turn, and answer each of them, whatever fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_realloc.data.chat import Message, is_image_part
from lightning_realloc.data.images.image_files import is_pillow_image
from lightning_realloc.environments.tools.arguments import CallError, arguments_of
from lightning_realloc.environments.tools.tool import Tool
from lightning_realloc.generation.loop.asking import call, stopwatch, time_limit
from lightning_realloc.rewards.signatures import is_async

_log = logging.getLogger(__name__)
UNKNOWN = "unknown"
"""Name in metrics of tools that do not exist, which models invent without bound."""
DEFAULT_DEADLINE_S = 30.0
"""Most seconds of a call where no `Conversation` bounds it."""
DEFAULT_ANSWER_CHARACTERS = 20_000
"""Most characters of an answer, about 5,000 tokens; more fill the context of small models with one answer."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one call."""

    message: Message
    """The answer to the model."""
    name: str
    """The tool, or `UNKNOWN`."""
    has_failed: bool
    seconds: float


class ToolRunner:
    """Carries out calls of its tools.

    Args:
        tools: The tools that calls may name.
        deadline_s: Most seconds of one call; infinity: the turn's deadline alone bounds it.
        max_characters: Most characters of one answer; the rest is cut off, which the answer says.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        max_characters: int = DEFAULT_ANSWER_CHARACTERS,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.deadline_s, self._max_characters = deadline_s, max_characters
        self.has_abandoned = False
        """Whether a call was given up, whose function may still run in its thread."""

    async def answers(self, calls: Sequence[Mapping[str, Any]]) -> tuple[list[Message], dict[str, float]]:
        """Return one answer per call, in the order of the calls, and counts and seconds by tool.

        ``async`` tools run at the same time. Plain ones run in the order of their calls, each in a thread, because they
        may share state. A call that fails or takes too long leaves the others alone.
        """
        outcomes: dict[int, _Outcome] = {}

        async def run(places: Sequence[int]) -> None:
            for place in places:
                outcomes[place] = await self._outcome(calls[place])

        at_once = [place for place, found in enumerate(calls) if self._is_async(found)]
        in_order = [place for place in range(len(calls)) if place not in at_once]
        async with asyncio.TaskGroup() as group:
            for places in ([place] for place in at_once):
                group.create_task(run(places))
            group.create_task(run(in_order))
        done = [outcomes[place] for place in range(len(calls))]
        return [outcome.message for outcome in done], _metrics(done)

    def _is_async(self, found: Mapping[str, Any]) -> bool:
        tool = self.tools.get(_function_of(found)[0])
        return tool is not None and is_async(tool.function)

    async def _outcome(self, found: Mapping[str, Any]) -> _Outcome:
        name, arguments = _function_of(found)
        elapsed_s = stopwatch()
        error = None
        try:
            content: str | list[Any] = self._content(await self._result(name, arguments))
        except CallError as problem:
            error = str(problem)
        except BaseException as problem:  # also SystemExit, which would end the event loop
            task = asyncio.current_task()
            if isinstance(problem, asyncio.CancelledError) and task is not None and task.cancelling():
                self.has_abandoned = True
                raise
            _log.debug("tool %s failed", name, exc_info=True)
            error = f"{type(problem).__name__}: {problem}"
        if error is not None:
            content = text_of({"error": self._cut(error)})
        message = {"role": "tool", "tool_call_id": found.get("id"), "name": name, "content": content}
        known = name if name in self.tools else UNKNOWN
        return _Outcome(message, known, error is not None, elapsed_s())

    async def _result(self, name: str, arguments: object) -> Any:
        tool = self.tools.get(name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            raise CallError(f"there is no tool {name!r}; the tools are: {known}")
        given = arguments_of(tool, arguments)
        deadline_s = self.deadline_s
        try:
            async with time_limit(deadline_s) as deadline:
                return await call(tool.function, **given)
        except TimeoutError:
            if not deadline.expired():  # the tool's own
                raise
            self.has_abandoned = True
            raise CallError(f"{name} did not answer within {deadline_s:g} seconds") from None

    def _content(self, result: object) -> str | list[Any]:
        """Return a tool's result as the content of a message: text, or parts if it shows images."""
        parts = shown_parts(result)
        if parts is None:
            return self._cut(text_of(result))
        left = self._max_characters
        for place, part in enumerate(parts):
            if not is_image_part(part):
                parts[place] = {"type": "text", "text": self._cut(part["text"], left)}
                left = max(0, left - len(part["text"]))
        return parts

    def _cut(self, text: str, most: int | None = None) -> str:
        most = self._max_characters if most is None else most
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[cut off here: these are the first {most} of {len(text)} characters]"


def shown_parts(result: object) -> list[Any] | None:
    """Return a tool's result that shows images as parts of a message; None for one that shows none.

    An image of Pillow is shown. So are those in a list of images, texts, and parts as OpenAI and TRL have them; other
    elements become text as by `text_of`.

    Raises:
        CallError: for parts other than texts and images.
    """
    listed = list(result) if isinstance(result, list | tuple) else [result]
    is_shown = [is_pillow_image(one) or (_is_part(one) and is_image_part(one)) for one in listed]
    if not any(is_shown):
        return None
    return [
        (one if _is_part(one) else {"type": "image", "image": one}) if shown else {"type": "text", "text": _text(one)}
        for one, shown in zip(listed, is_shown, strict=True)
    ]


def _text(one: object) -> str:
    return text_of([one] if _is_part(one) else one)


def text_of(result: object) -> str:
    """Return the text of a tool's result: itself if it is text, else JSON.

    Content in parts is joined, as chat templates do. Lone surrogates, which no tokenizer reads, become question marks.

    Raises:
        CallError: for parts other than text, such as sounds.
    """
    if (parts := content_parts(result)) is not None:
        text = "".join(parts)
    else:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()


def content_parts(content: object) -> list[str] | None:
    """Return the texts of ``[{"type": "text", "text": ...}, ...]``; None for what is not content in parts.

    Raises:
        CallError: for parts other than text, such as sounds.
    """
    if not isinstance(content, list) or not content or not all(map(_is_part, content)):
        return None
    others = sorted({part["type"] for part in content} - {"text"})
    if others:
        raise CallError(f"content has parts of type {', '.join(others)}; only texts can be read there")
    return [str(part["text"]) for part in content]


def _is_part(part: object) -> bool:
    """Return whether an object has a type, and a value of that name: rows of data with a field "type" have not."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in part


def _function_of(found: Mapping[str, Any]) -> tuple[str, object]:
    """Return the name and the arguments of a call; an empty name where it has none."""
    function = found.get("function")
    if not isinstance(function, Mapping):
        return "", None
    return str(function.get("name") or ""), function.get("arguments")


def _metrics(outcomes: Iterable[_Outcome]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        sums[f"tool_calls/{outcome.name}"] += 1
        sums[f"tool_failures/{outcome.name}"] += outcome.has_failed
        sums[f"tool_s/{outcome.name}"] += outcome.seconds
    return dict(sums)
