"""Find the assistant's tokens in a conversation by rendering each of its prefixes with the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import Message, Text, conversation_text, ended_answer
from lightning_realloc.data.responses import ResponseText, rendered
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
        DataError: if the conversation does not end with an answer, or the template renders a prefix differently.
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
    if others and not all(whole.text.startswith(prefix.text) for prefix in prefixes):
        raise DataError(
            f"{place}: the chat template changes earlier messages when the conversation continues, so answers' tokens "
            f"cannot be located; use a prefix-preserving template, or learn='last'"
        )
    return rendered(prefixes[0], whole), prefixes[1:]


def tokens_and_assistant_mask(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], starts: Sequence[int], place: str
) -> tuple[list[int], list[bool]]:
    """Return the tokens from the first answer on, ended by end-of-sequence, and a mask of the assistant's tokens.

    An answer ends with its end-of-sequence token; the last answer ends with the conversation.

    Args:
        ids: Token ids of the whole conversation.
        starts: Index of the first token of every answer.

    Raises:
        DataError: if the template ends an answer without the end-of-sequence token.
    """
    begin, last, end = starts[0], starts[-1], tokenizer.eos_token_id
    mask = [False] * (last - begin)
    for first, following in pairwise(starts):
        answer = ids[first:following]
        if end not in answer:
            raise DataError(
                f"{place}: the chat template ends an earlier answer without the tokenizer's end-of-sequence token "
                f"{tokenizer.eos_token!r}, so its end cannot be located; set tokenizer.eos_token to the token that "
                f"ends a turn, or learn='last'"
            )
        length = answer.index(end) + 1
        mask[first - begin : first - begin + length] = [True] * length
    final = ended_answer(tokenizer, ids[last:])
    return [*ids[begin:last], *final], [*mask, *([True] * len(final))]
