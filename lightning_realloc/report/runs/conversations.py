"""Read the conversations that `RolloutTable` wrote, as messages to show: thoughts, calls, answers, seconds and rewards.

Texts are plain, and of bounded length.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_realloc.environments.transcript import call_text, message_text
from lightning_realloc.errors import counted
from lightning_realloc.recording.followed_file import BROKEN_LINE, MAX_LINE_BYTES
from lightning_realloc.report.runs.thumbnails import IMAGES_COLUMN, checked_names

CONVERSATIONS_FILE = "rollouts.jsonl"
MAX_CONVERSATIONS = 100
"""Conversations of a report, the newest; more make a larger page."""
MAX_MESSAGES = 200
"""Messages of a conversation that are shown, the first ones."""
MAX_TEXT_CHARACTERS = 4000
"""Longest text of a message; longer ones are cut."""
MAX_CHARACTERS = 1_500_000
"""Characters of all conversations of a report; more make a larger page."""
_FACTS = ("reward", "score", "finish_reason")
"""Fields of a conversation that are shown as they are."""


def read_conversations(path: Path, problems: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the newest conversations of a file, the newest first; what cannot be read is named among the problems."""
    if not path.is_file():
        return ()
    found: list[dict[str, Any]] = []
    num_broken, room = 0, MAX_CHARACTERS
    try:
        with path.open("rb") as file:
            lines = deque(enumerate(_whole_lines(file)), maxlen=MAX_CONVERSATIONS)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return ()
    for number, line in reversed(lines):
        try:
            shown = shown_conversation(json.loads(line), number)
        except BROKEN_LINE:
            num_broken += 1
            continue
        room -= len(json.dumps(shown))
        if room < 0:
            break
        found.append(shown)
    if num_broken:
        left = "it is" if num_broken == 1 else "they are"
        problems.append(f"{path.name} has {counted(num_broken, 'broken line')}; {left} left out")
    return tuple(found)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that have an end; of one that is too long, its last part, which is no JSON."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield line


def shown_conversation(content: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a conversation for the page: its id, step, facts, failure and messages.

    Args:
        content: A line of the file.
        number: The line's number.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: for content of another form.
    """
    pictures = iter(checked_names(content.get(IMAGES_COLUMN)))
    messages = [*(_shown(message, pictures) for message in content["prompt"]), *_answered(content, pictures)]
    failure = content["failure"]
    return {
        "id": str(number),
        "step": int(content["step"]),
        "facts": [[name, _short(content[name])] for name in _FACTS if content.get(name) is not None],
        "seconds": sum(map(float, content["seconds"])),
        "turns": sum(one["role"] == "assistant" for one in messages[len(content["prompt"]) :]),
        "failure": None if failure is None else _cut(str(failure)),
        "messages": messages[:MAX_MESSAGES],
        "num_left_out": max(0, len(messages) - MAX_MESSAGES),
    }


def _answered(content: Mapping[str, Any], pictures: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the messages after the prompt; turns of the model with the environment's reward and seconds."""
    rewards, seconds = iter(content["rewards"]), iter(content["seconds"])
    for message in content["messages"]:
        shown = _shown(message, pictures)
        if message["role"] == "assistant":
            reward, spent = next(rewards, None), next(seconds, None)
            shown["reward"] = None if reward is None else float(reward)
            shown["seconds"] = None if spent is None else float(spent)
        yield shown


def _shown(message: Mapping[str, Any], pictures: Iterator[str]) -> dict[str, Any]:
    """Return a message for the page, with the next of the sample's thumbnails for each of its images."""
    calls, content = message.get("tool_calls") or (), message.get("content")
    parts = content if isinstance(content, list) else ()
    shown = [next(pictures, None) for part in parts if part.get("type") == "image"]
    return {
        "role": str(message["role"]),
        "name": None if message.get("name") is None else _cut(str(message["name"])),
        "thought": _cut(str(message.get("reasoning_content") or "").strip()),
        "text": _cut(message_text(content)),
        "pictures": [name for name in shown if name is not None],
        "calls": [_cut(call_text(call["function"])) for call in calls],
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cut(str(value))


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    return f"{text[:MAX_TEXT_CHARACTERS]}… ({len(text):,} characters)"
