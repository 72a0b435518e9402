"""How do a prompt and what responds to it become token ids? Text and conversations, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import (
    Message,
    Text,
    answer_of,
    conversation_text,
    is_conversation,
    prompt_text,
    prompt_token_ids,
    token_ids,
    with_end,
)
from lightning_realloc.data.module import LongRows, RowDataModule, TokenLimit
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError


class ResponseDataModule(RowDataModule):
    """What data modules of prompts with given responses have in common.

    Args:
        data: A JSONL or Parquet file, a folder that ``datasets`` saved, a :class:`DatasetSource`, a list of
            dictionaries, or a ``datasets.Dataset``.
        batch_size: Rows per iteration, over all ranks together.
        val_data: Held-out rows, read like ``data``.
        val_fraction: Instead of ``val_data``: the share of ``data`` that is held out, chosen by a hash of the row.
        tokenizer: A Hugging Face name, folder or tokenizer; by default the LightningModule's.
        seed: Of the order of the rows and of what is held out.
        shuffle: Whether rows come in another order every epoch.
        drop_last: Whether an epoch leaves out a last batch that is smaller than the others.
        max_tokens: Most tokens of prompt and response together; by default as many as the models have positions.
        long_rows: What happens to longer ones: ``refuse`` them all with an error, ``truncate`` their responses, or
            ``drop`` them.
        bucket_batches: Rows of similar length share a batch, chosen among so many batches of the shuffled order;
            None: whatever their lengths.
        shuffle_buffer: Of a stream: how many of its rows are read at a time, and shuffled.
    """

    def __init__(
        self,
        data: RowSource,
        *,
        batch_size: int,
        val_data: RowSource | None = None,
        val_fraction: float = 0.0,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        max_tokens: int | None = None,
        long_rows: LongRows = "refuse",
        bucket_batches: int | None = None,
        shuffle_buffer: int = 1000,
    ) -> None:
        super().__init__(
            data, batch_size=batch_size, val_data=val_data, val_fraction=val_fraction, tokenizer=tokenizer,
            seed=seed, shuffle=shuffle, drop_last=drop_last, long_rows=long_rows, bucket_batches=bucket_batches,
            shuffle_buffer=shuffle_buffer,
        )  # fmt: skip
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"max_tokens={max_tokens} must be at least 1; use None for the models' limit")
        self.max_tokens = max_tokens

    def limit(self) -> TokenLimit | None:
        """Return the smaller one of the models' context and ``max_tokens``, None where neither is known."""
        context = self.model_context()
        limits = [] if context is None else [TokenLimit(context, f"the models' context of {context} positions")]
        if self.max_tokens is not None:
            limits.append(TokenLimit(self.max_tokens, "max_tokens"))
        return min(limits, key=lambda limit: limit.tokens, default=None)

    def fits(self, row: Row, num_tokens: int, limit: TokenLimit | None) -> bool:
        """Return whether the row is kept; DataError where it is too long and long rows are refused."""
        return self.fitted(row, num_tokens, limit, "shorten it, or set long_rows to 'truncate' or 'drop'")


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A prompt and its response before the tokenizer."""

    prompt: Text | None
    """None where all of the row is learnt."""
    rest: Text
    goes_on: bool
    """Whether ``rest`` follows the prompt; False where it is the whole conversation, prompt and all."""


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt: object, response: object, place: str, *, tools: object = None
) -> ResponseText | None:
    """Return a prompt and its response, both text or both messages; None where they are neither."""
    if isinstance(prompt, str) and isinstance(response, str):
        return ResponseText(prompt_text(tokenizer, prompt, place), Text(response, place, opened=False), goes_on=True)
    if is_conversation(prompt) and is_conversation(response):
        return conversation(tokenizer, prompt, response, place, tools=tools)
    return None


def whole_text(text: str, place: str) -> ResponseText:
    """Return a text all of which is learnt."""
    return ResponseText(None, Text(text, place, opened=True), goes_on=True)


def conversation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Message], answer: list[Message], place: str, *,
    tools: object = None,
) -> ResponseText:  # fmt: skip
    """Return messages to begin from and the assistant's that follow, laid out by the chat template."""
    if not prompt or any(message["role"] != "assistant" for message in answer):
        raise DataError(
            f"{place}: a conversation needs a message from the assistant to learn, and one before it; "
            f"its roles are {[message['role'] for message in [*prompt, *answer]]}"
        )
    whole = conversation_text(tokenizer, [*prompt, *answer], place, add_generation_prompt=False, tools=tools)
    return ResponseText(prompt_text(tokenizer, prompt, place, tools=tools), whole, goes_on=False)


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[ResponseText]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of every prompt and of its response, which ends with the end-of-sequence token."""
    prompts = iter(prompt_token_ids(tokenizer, [text.prompt for text in texts if text.prompt is not None]))
    rests = token_ids(tokenizer, [text.rest for text in texts])
    pairs: list[tuple[list[int], list[int]]] = []
    for text, rest in zip(texts, rests, strict=True):
        prompt = [] if text.prompt is None else next(prompts)
        answer = with_end(tokenizer, rest) if text.goes_on else answer_of(tokenizer, prompt, rest, text.rest.place)
        pairs.append((prompt, answer))
    return pairs


def cut(place: str, prompt: list[int], response: list[int], limit: TokenLimit | None) -> list[int]:
    """Return as much of the response as the limit leaves room for behind the prompt."""
    if limit is None or len(prompt) + len(response) <= limit.tokens:
        return response
    room = limit.tokens - len(prompt)
    if room < 1:
        raise DataError(
            f"{place}: its prompt alone has {len(prompt)} tokens, and {limit.source} allows {limit.tokens}, so "
            f"nothing of the response is left to learn; set long_rows='drop' or shorten the prompt"
        )
    return response[:room]
