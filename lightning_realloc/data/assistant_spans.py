"""Find the assistant's tokens in a conversation by rendering each of its prefixes with the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import Message, Text, conversation_text, with_eos
from lightning_realloc.data.responses import ResponseText
from lightning_realloc.errors import DataError


def answer_positions(messages: Sequence[Message]) -> list[int]:
    """Return the positions of assistant messages that follow another message."""
    return [place for place, message in enumerate(messages) if place > 0 and message["role"] == "assistant"]


def split_at_first_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], place: str, *, template: Mapping[str, Any]
) -> tuple[ResponseText, list[Text]]:
    """Render a conversation for training on all answers: prompt up to the first answer, and the prefixes of later ones.

    Each prefix holds all messages before an answer and the template's generation prompt.

    Raises:
        DataError: if the conversation does not end with an answer.
    """
    turns = answer_positions(messages)
    if turns[-1:] != [len(messages) - 1]:
        raise DataError(
            f"{place}: a conversation needs a message from the assistant to learn, at its end, and one before it; "
            f"its roles are {[message['role'] for message in messages]}"
        )
    first, *others = turns
    whole = conversation_text(tokenizer, messages, place, add_generation_prompt=False, template=template)
    prefixes = [
        conversation_text(tokenizer, messages[:turn], place, add_generation_prompt=True, template=template)
        for turn in (first, *others)
    ]
    return ResponseText(prefixes[0], whole, is_continuation=False), prefixes[1:]


def tokens_and_assistant_mask(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prefixes: Sequence[list[int]], place: str
) -> tuple[list[int], list[bool]]:
    """Return the tokens after the first prefix, ended by end-of-sequence, and a mask of the assistant's tokens.

    An answer ends with its end-of-sequence token; the last answer ends with the conversation.

    Args:
        ids: Token ids of the whole conversation.
        prefixes: Token ids of its prefixes, the shortest first.

    Raises:
        DataError: if the template renders a prefix differently, or ends an answer without the end-of-sequence token.
    """
    if any(ids[: len(prefix)] != prefix for prefix in prefixes):
        raise DataError(
            f"{place}: the chat template changes earlier messages when the conversation continues, so answers' tokens "
            f"cannot be located; use a prefix-preserving template, or learn='last'"
        )
    start, end = len(prefixes[0]), tokenizer.eos_token_id
    mask = [False] * (len(ids) - start)
    for first, following in pairwise(len(prefix) for prefix in prefixes):
        answer = ids[first:following]
        if end not in answer:
            raise DataError(
                f"{place}: the chat template ends an earlier answer without the tokenizer's end-of-sequence token "
                f"{tokenizer.eos_token!r}, so its end cannot be located; set tokenizer.eos_token to the token that "
                f"ends a turn, or learn='last'"
            )
        length = answer.index(end) + 1
        mask[first - start : first - start + length] = [True] * length
    last = len(prefixes[-1])
    # Templates usually end a turn themselves, with line breaks after the end token.
    final = ids[last:] if end in ids[last:] else with_eos(tokenizer, ids[last:])
    return [*ids[start:last], *final], [*mask[: last - start], *([True] * len(final))]
