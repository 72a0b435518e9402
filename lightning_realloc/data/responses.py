"""Base class of data modules with given responses, and tokenization of prompts with responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
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
from lightning_realloc.data.data_module import RowDataModule, TokenLimit, make_samples
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError

TokensOfRow = tuple[list[int], list[int], list[bool]]
"""Token ids of a prompt and of its response, and the mask of response tokens to learn."""


class ResponseDataModule(RowDataModule):
    """Base class of data modules whose rows hold prompts with responses.

    Args:
        max_tokens: Maximum number of tokens of prompt and response together; by default the models' context.
        settings: Arguments of :class:`RowDataModule`: data, batch size, held-out rows, tokenizer, seed, order, and long
            rows. ``long_rows="truncate"`` cuts the responses.
    """

    def __init__(self, data: RowSource, *, batch_size: int, max_tokens: int | None = None, **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"max_tokens={max_tokens} must be at least 1; use None for the models' limit")
        self.max_tokens = max_tokens

    def limit(self) -> TokenLimit | None:
        """Return the smaller one of the models' context and ``max_tokens``; None if neither is known."""
        return self.token_limit(self.max_tokens, "max_tokens")

    def fits(self, row: Row, num_tokens: int, limit: TokenLimit | None) -> bool:
        """Return whether the row is kept; DataError if it is too long and long rows are refused."""
        return self.fitted(row, num_tokens, limit, "shorten it, or set long_rows to 'truncate' or 'drop'")

    def table_of(
        self,
        rows: Sequence[Row],
        texts: Sequence[ResponseText],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[bool] | None = None,
    ) -> Samples:
        """Return ``prompt_ids``, ``response_ids``, ``label`` if given, and the columns of the rows that fit."""
        pairs = encoded(tokenizer, texts)
        return self.table_of_tokens(
            rows, [(prompt, response, [True] * len(response)) for prompt, response in pairs], labels
        )

    def table_of_tokens(
        self, rows: Sequence[Row], tokens: Sequence[TokensOfRow], labels: Sequence[bool] | None = None
    ) -> Samples:
        """Return :meth:`table_of` for tokenized rows, with ``model_mask`` if some response tokens are not learnt."""
        limit = self.limit()
        kept = [
            place
            for place, (row, (prompt, response, _)) in enumerate(zip(rows, tokens, strict=True))
            if self.fits(row, len(prompt) + len(response), limit)
        ]
        if not kept:
            return make_samples({}, 0, "row")
        prompts = [tokens[place][0] for place in kept]
        responses = [cut(rows[place].place, *tokens[place][:2], limit) for place in kept]
        learnt = [tokens[place][2][: len(response)] for place, response in zip(kept, responses, strict=True)]
        made: dict[str, Column] = {} if labels is None else {"label": torch.tensor([labels[place] for place in kept])}
        if not all(map(all, learnt)):
            made["model_mask"] = Ragged.from_list(learnt, dtype=torch.bool)
            made["num_model_tokens"] = torch.tensor([sum(mask) for mask in learnt])
        ids = {"prompt_ids": Ragged.from_list(prompts), "response_ids": Ragged.from_list(responses)}
        data = self.data_of([rows[place] for place in kept], without=[] if labels is None else ["label"])
        return make_samples({**ids, **made}, len(kept), "row", data)


@dataclass(frozen=True, slots=True)
class ResponseText:
    """Prompt and response before tokenization."""

    prompt: Text | None
    """Prompt; None if the whole text is learnt."""
    whole: Text
    """Prompt and response as one text."""
    is_rendered: bool
    """Whether the chat template rendered the text, and so may have ended the response."""


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt: object, response: object, place: str, *, template: Mapping[str, Any]
) -> ResponseText | None:
    """Return a prompt and its response, each text or messages; None if one of them is neither.

    If only one of them is messages, the text becomes a user message (prompt) or an assistant message (response).
    """
    if isinstance(prompt, str) and isinstance(response, str):
        whole = Text(prompt + response, place, add_bos=True)
        return ResponseText(prompt_text(tokenizer, prompt, place), whole, is_rendered=False)
    if is_conversation(response) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if is_conversation(prompt) and isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    if is_conversation(prompt) and is_conversation(response):
        return conversation(tokenizer, prompt, response, place, template=template)
    return None


def learnt_text(text: str, place: str) -> ResponseText:
    """Return a text without a prompt, of which all tokens are learnt."""
    return ResponseText(None, Text(text, place, add_bos=True), is_rendered=False)


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[Message],
    answer: list[Message],
    place: str,
    *,
    template: Mapping[str, Any],
) -> ResponseText:
    """Return a prompt of messages and the assistant's messages after it, rendered by the chat template."""
    if not prompt or any(message["role"] != "assistant" for message in answer):
        raise DataError(
            f"{place}: a conversation needs a message from the assistant to learn, and one before it; "
            f"its roles are {[message['role'] for message in [*prompt, *answer]]}"
        )
    whole = conversation_text(tokenizer, [*prompt, *answer], place, add_generation_prompt=False, template=template)
    return rendered(prompt_text(tokenizer, prompt, place, template=template), whole)


def rendered(prompt: Text, whole: Text) -> ResponseText:
    """Return a prompt and its response, both rendered by the chat template.

    Raises:
        DataError: if the template renders the prompt differently once a response follows.
    """
    if not whole.text.startswith(prompt.text):
        raise DataError(
            f"{whole.place}: the chat template must render a prompt the same way whether or not an answer follows, so "
            f"that the answer's tokens can be located; use a prefix-preserving template"
        )
    return ResponseText(prompt, whole, is_rendered=True)


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[ResponseText]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of every prompt and of its response, which ends with the end-of-sequence token."""
    prompts = iter(prompt_token_ids(tokenizer, [text.prompt for text in texts if text.prompt is not None]))
    pairs: list[tuple[list[int], list[int]]] = []
    for text, ids in zip(texts, token_ids(tokenizer, [text.whole for text in texts]), strict=True):
        start = 0 if text.prompt is None else response_start(next(prompts), ids, text.whole.place)
        response = ended_answer(tokenizer, ids[start:]) if text.is_rendered else with_eos(tokenizer, ids[start:])
        pairs.append((ids[:start], response))
    return pairs


def cut(place: str, prompt: list[int], response: list[int], limit: TokenLimit | None) -> list[int]:
    """Return the response, cut to the tokens that the limit leaves after the prompt."""
    if limit is None or len(prompt) + len(response) <= limit.tokens:
        return response
    room = limit.tokens - len(prompt)
    if room < 1:
        raise DataError(
            f"{place}: its prompt alone has {len(prompt)} tokens, and {limit.source} allows {limit.tokens}, so "
            f"no token of the response is left to learn; set long_rows='drop' or shorten the prompt"
        )
    return response[:room]
