"""Render prompts with their responses, and find the tokens of the assistant's answers in them.

Prompt and response are tokenized as one text. Of a conversation, the chat template renders the part up to each answer,
with and without it. A thought that the generation prompt opens, and the template then drops, is put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import (
    Message,
    Text,
    conversation_text,
    ended_answer,
    is_conversation,
    prompt_text,
    prompt_token_ids,
    response_start,
    token_ids,
    with_eos,
)
from lightning_realloc.errors import DataError

TokensOfRow = tuple[list[int], list[int], list[bool]]
"""Token ids of a prompt and of its response, and the mask of response tokens to learn."""
_OPENED_THOUGHT = re.compile(r"<think>\s*\Z")


@dataclass(frozen=True, slots=True)
class ResponseText:
    """Prompt and response before tokenization."""

    prompt: Text | None
    """Prompt; None if the whole text is learnt."""
    whole: Text
    """Prompt and response as one text."""
    is_rendered: bool
    """Whether the chat template rendered the text, and so may have ended the response."""
    later: tuple[Text, ...] = ()
    """Beginnings of the text up to each further answer of the response."""


def learnt_text(text: str, place: str) -> ResponseText:
    """Return a text without a prompt, of which all tokens are learnt."""
    return ResponseText(None, Text(text, place, add_bos=True), is_rendered=False)


def rendered_responses(
    tokenizer: PreTrainedTokenizerBase, prompt: object, response: object, place: str, *, template: Mapping[str, Any]
) -> list[ResponseText]:
    """Return a prompt and its response, each text or messages, as by :func:`answers`; [] if one of them is neither.

    If only one of them is messages, the text becomes a user message (prompt) or an assistant message (response).
    """
    if isinstance(prompt, str) and isinstance(response, str):
        whole = Text(prompt + response, place, add_bos=True)
        return [ResponseText(prompt_text(tokenizer, prompt, place), whole, is_rendered=False)]
    if is_conversation(response) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if is_conversation(prompt) and isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    if not is_conversation(prompt) or not is_conversation(response):
        return []
    if response[0]["role"] != "assistant":
        raise DataError(
            f"{place}: a response needs a message from the assistant to learn at its beginning; with the prompt's, "
            f"its roles are {_roles([*prompt, *response])}: move the messages before the answer to the prompt"
        )
    return answers(tokenizer, [*prompt, *response], place, first=len(prompt), template=template)


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt: object, response: object, place: str, *, template: Mapping[str, Any]
) -> ResponseText | None:
    """Return a prompt and its response as one sequence; None if one of them is neither text nor messages.

    Raises:
        DataError: if the chat template renders earlier answers of the response differently once it continues.
    """
    found = rendered_responses(tokenizer, prompt, response, place, template=template)
    if len(found) > 1:
        raise DataError(
            f"{place}: the chat template changes earlier answers when the conversation continues, such as by dropping "
            f"their thoughts, so a response of several answers is no single sequence; let the response end after its "
            f"first answer, or use a prefix-preserving template"
        )
    return found[0] if found else None


def answers(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    place: str,
    *,
    first: int = 1,
    only_last: bool = False,
    template: Mapping[str, Any],
) -> list[ResponseText]:
    """Render a conversation for training on the assistant's messages from the position ``first`` on.

    Each answer is rendered as at its turn, without the messages after it. Answers share a sequence as long as the
    template renders the earlier ones unchanged in it, and begin a new one where it does not.

    Args:
        only_last: Whether to learn from the last of these messages alone.

    Raises:
        DataError: without such a message, and if the template renders the part before an answer differently once the
            answer follows.
    """
    turns = [turn for turn, message in enumerate(messages) if turn >= max(first, 1) and message["role"] == "assistant"]
    if not turns:
        raise DataError(
            f"{place}: a conversation needs a message from the assistant to learn, and one before it; its roles are "
            f"{_roles(messages)}"
        )

    def rendered(end: int, add_generation_prompt: bool) -> Text:
        return conversation_text(
            tokenizer, messages[:end], place, add_generation_prompt=add_generation_prompt, template=template
        )

    found: list[tuple[list[Text], Text]] = []
    for turn in turns[-1:] if only_last else turns:
        opening, whole = rendered(turn, True), rendered(turn + 1, False)
        if not whole.text.startswith(opening.text):
            opening, whole = _with_thought(opening, whole, messages[turn])
        # Some templates end the last message with a line break that they leave out between messages.
        if found and whole.text.startswith(found[-1][1].text.rstrip()):
            found[-1] = ([*found[-1][0], opening], whole)
        else:
            found.append(([opening], whole))
    return [ResponseText(prompt, whole, is_rendered=True, later=tuple(later)) for (prompt, *later), whole in found]


def _with_thought(opening: Text, whole: Text, answer: Message) -> tuple[Text, Text]:
    """Return the prompt and the whole text as generation makes them, where the template drops an opened thought.

    The generation prompts of DeepSeek-R1's distillations and of QwQ end with ``<think>``, and their templates render an
    answer without its thought. An answer that never had one follows the prompt without ``<think>``.

    Raises:
        DataError: if the texts differ in something else.
    """
    before = _OPENED_THOUGHT.sub("", opening.text)
    if not whole.text.startswith(before):
        raise DataError(
            f"{whole.place}: the chat template must render a prompt the same way whether or not an answer follows, so "
            f"that the answer's tokens can be located; use a prefix-preserving template, or chat_template_kwargs with "
            f"which both agree, such as enable_thinking=True for answers with thoughts"
        )
    opened, rendered = opening.text[len(before) :], whole.text[len(before) :]
    content = answer.get("content") or ""
    if answer.get("reasoning_content"):
        content = f"{answer['reasoning_content'].strip()}\n</think>\n\n{content.lstrip()}"
    if rendered.startswith("<think>"):  # followed by other white space than in the generation prompt
        return opening, replace(whole, text=opening.text + rendered.removeprefix("<think>").lstrip())
    if "</think>" not in content:
        return replace(opening, text=before), whole
    thought, _, after = content.rpartition("</think>")
    thought = thought.removeprefix(opened) if thought.startswith(opened) else thought.removeprefix("<think>").lstrip()
    rest = rendered.removeprefix("</think>")
    gap = "" if rest[:1].isspace() else after[: len(after) - len(after.lstrip())]
    return opening, replace(whole, text=f"{opening.text}{thought}</think>{gap}{rest}")


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[ResponseText]) -> Iterator[TokensOfRow]:
    """Yield the token ids of every prompt and of its response, which ends with the end-of-sequence token."""
    prompts = iter(prompt_token_ids(tokenizer, [text.prompt for text in texts if text.prompt is not None]))
    later = iter(token_ids(tokenizer, [beginning for text in texts for beginning in text.later]))
    for text, ids in zip(texts, token_ids(tokenizer, [text.whole for text in texts]), strict=True):
        place = text.whole.place
        start = 0 if text.prompt is None else response_start(next(prompts), ids, place)
        starts = [start, *(response_start(next(later), ids, place) for _ in text.later)]
        if text.later:
            yield (ids[:start], *_tokens_and_assistant_mask(tokenizer, ids, starts, place))
        else:
            response = ended_answer(tokenizer, ids[start:]) if text.is_rendered else with_eos(tokenizer, ids[start:])
            yield ids[:start], response, [start > 0, *([True] * (len(response) - 1))]


def _roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages]


def _tokens_and_assistant_mask(
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
                f"ends a turn, or in SFTDataModule learn='last'"
            )
        length = answer.index(end) + 1
        mask[first - begin : first - begin + length] = [True] * length
    final = ended_answer(tokenizer, ids[last:])
    return [*ids[begin:last], *final], [*mask, *([True] * len(final))]
