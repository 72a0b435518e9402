"""Text of completions, and short descriptions of prompts and completions for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """Return completions as texts; for a conversation, the content of its last message."""
    return [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]


def describe_batch(given: Mapping[str, Any]) -> str:
    """Describe a batch by its number of completions and its distinct prompts."""
    shown = list(dict.fromkeys(shortened(prompt) for prompt in given["prompts"]))
    listed = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    return f"{len(given['completions'])} completions of {'the prompt' if len(shown) == 1 else 'the prompts'} {listed}"


def describe_completion(index: int, given: Mapping[str, Any]) -> str:
    """Describe one completion of a batch and its prompt."""
    completion, prompt = shortened(given["completions"][index]), shortened(given["prompts"][index])
    return f"the completion {completion} of the prompt {prompt}"


def shortened(value: object) -> str:
    """Return the ``repr`` of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
