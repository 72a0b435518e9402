"""Which tokens of a conversation does the assistant say? Found by laying out each beginning of it on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import Message, Text, conversation_text, with_end
from lightning_realloc.data.responses import ResponseText
from lightning_realloc.errors import DataError


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """Return which messages are the assistant's, and answer something before them."""
    return [place for place, message in enumerate(messages) if place > 0 and message["role"] == "assistant"]


def from_first_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], place: str, *, template: Mapping[str, Any]
) -> tuple[ResponseText, list[Text]]:
    """Return a conversation whose response begins with the assistant's first answer, and how its others begin.

    Each beginning is all that comes before an answer, with what the template opens the assistant's turn with.

    Raises:
        DataError: for one that does not end with an answer.
    """
    turns = assistant_turns(messages)
    if turns[-1:] != [len(messages) - 1]:
        raise DataError(
            f"{place}: a conversation needs a message from the assistant to learn, at its end, and one before it; "
            f"its roles are {[message['role'] for message in messages]}"
        )
    first, *others = turns
    whole = conversation_text(tokenizer, messages, place, add_generation_prompt=False, template=template)
    begun = [
        conversation_text(tokenizer, messages[:turn], place, add_generation_prompt=True, template=template)
        for turn in (first, *others)
    ]
    return ResponseText(begun[0], whole, goes_on=False), begun[1:]


def said_by_assistant(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], begun: Sequence[list[int]], place: str
) -> tuple[list[int], list[bool]]:
    """Return a conversation's tokens behind its first beginning, ended, and which of them the assistant says.

    An answer goes up to its end-of-sequence token, the last one up to the end.

    Args:
        ids: Of the whole conversation.
        begun: Of its beginnings, the shortest first.

    Raises:
        DataError: when the template lays out beginnings differently, or does not end an answer with that token.
    """
    if any(ids[: len(beginning)] != beginning for beginning in begun):
        raise DataError(
            f"{place}: the chat template lays out earlier messages otherwise once the conversation goes on, so that "
            f"answers' tokens cannot be told apart; use a prefix-preserving template, or learn='last'"
        )
    start, end = len(begun[0]), tokenizer.eos_token_id
    said = [False] * (len(ids) - start)
    for first, following in pairwise(len(beginning) for beginning in begun):
        answer = ids[first:following]
        if end not in answer:
            raise DataError(
                f"{place}: the chat template ends an earlier answer without the tokenizer's end-of-sequence token "
                f"{tokenizer.eos_token!r}, so that it cannot be told from what follows; set tokenizer.eos_token to "
                f"what ends a turn, or learn='last'"
            )
        length = answer.index(end) + 1
        said[first - start : first - start + length] = [True] * length
    last = len(begun[-1])
    # Templates usually close a turn themselves, with line breaks behind the end token.
    final = ids[last:] if end in ids[last:] else with_end(tokenizer, ids[last:])
    return [*ids[start:last], *final], [*said[: last - start], *([True] * len(final))]
