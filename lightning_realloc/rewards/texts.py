"""What did the model write, and in whose words is it reported?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """Return completions as texts: of a conversation, what its last message says."""
    return [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]


def describe_batch(given: Mapping[str, Any]) -> str:
    """Say how much a function was given, and to which prompts: a group's completions share one."""
    shown = list(dict.fromkeys(shortened(prompt) for prompt in given["prompts"]))
    listed = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    return f"{len(given['completions'])} completions of {'the prompt' if len(shown) == 1 else 'the prompts'} {listed}"


def describe_completion(index: int, given: Mapping[str, Any]) -> str:
    """Name one completion of a batch, and its prompt."""
    completion, prompt = shortened(given["completions"][index]), shortened(given["prompts"][index])
    return f"the completion {completion} of the prompt {prompt}"


def shortened(value: object) -> str:
    """Return a value as a line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
