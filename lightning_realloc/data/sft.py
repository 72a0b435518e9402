"""Supervised pairs: what is given, and what is to be learnt after it."""

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
from lightning_realloc.data.module import LongRows, RowDataModule, TokenLimit, tabulated
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError
from lightning_realloc.runtime.samples import Ragged, Samples

Pair = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class SFTDataModule(RowDataModule):
    """Batches of prompts with the responses to learn, the same on every rank.

    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids`` and every column of the data as python objects.
    The columns decide what a row is: ``prompt`` and ``completion`` (text, or messages for the chat template);
    ``messages``, of which the last one is learnt; or ``text``, all of which is learnt. Responses end with the
    tokenizer's end-of-sequence token.

    Args:
        data: A JSONL file, a list of dictionaries, or a ``datasets.Dataset``.
        batch_size: Rows per optimizer step, over all ranks together.
        val_data: Held-out rows, read like ``data``.
        val_fraction: Instead of ``val_data``: the share of ``data`` that is held out, chosen by a hash of the row.
        tokenizer: A Hugging Face name, folder or tokenizer; by default the LightningModule's.
        seed: Of the order of the rows and of what is held out.
        shuffle: Whether rows come in another order every epoch.
        drop_last: Whether an epoch leaves out a last batch that is smaller than the others.
        max_tokens: Most tokens of prompt and response together; by default as many as the models have positions.
        long_rows: What happens to longer ones: ``refuse`` them all with an error, ``truncate`` their responses, or
            ``drop`` them.

    Raises:
        DataError: in ``setup``, for anything in the data that cannot be used, with its file and line.
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
    ) -> None:
        super().__init__(
            data, batch_size=batch_size, val_data=val_data, val_fraction=val_fraction, tokenizer=tokenizer,
            seed=seed, shuffle=shuffle, drop_last=drop_last, long_rows=long_rows,
        )  # fmt: skip
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"max_tokens={max_tokens} must be at least 1; use None for the models' limit")
        self.max_tokens = max_tokens

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the column that says what is given: equal prompts are never on both sides."""
        return _format(rows[0])[0]

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``response_ids`` and the columns of the rows that fit."""
        columns = _format(rows[0])
        limit = self._limit()
        kept: list[Row] = []
        pairs: list[Pair] = []
        for row, (prompt, response) in zip(rows, _pairs(tokenizer, rows, columns), strict=True):
            num_tokens = len(prompt) + len(response)
            if self.fitted(row, num_tokens, limit, "shorten it, or set long_rows to 'truncate' or 'drop'"):
                kept.append(row)
                pairs.append((prompt, _cut(row, prompt, response, limit)))
        if not kept:
            return tabulated({}, 0, "row")
        tokens = {
            "prompt_ids": Ragged.from_list([prompt for prompt, _ in pairs]),
            "response_ids": Ragged.from_list([response for _, response in pairs]),
        }
        return tabulated({**self.columns_of(kept), **tokens}, len(kept), "row")

    def _limit(self) -> TokenLimit | None:
        context = self.model_context()
        limits = [] if context is None else [TokenLimit(context, f"the models' context of {context} positions")]
        if self.max_tokens is not None:
            limits.append(TokenLimit(self.max_tokens, "max_tokens"))
        return min(limits, key=lambda limit: limit.tokens, default=None)


def _format(row: Row) -> tuple[str, ...]:
    """Return the columns that make up prompt and response."""
    for columns in (("prompt", "completion"), ("messages",), ("text",)):
        if set(columns) <= set(row.values):
            return columns
    raise DataError(
        f"{row.place} needs 'prompt' and 'completion', or 'messages', or 'text'; it has {sorted(row.values)}"
    )


@dataclass(frozen=True, slots=True)
class _PairText:
    """A row before the tokenizer."""

    prompt: Text | None
    """None where all of the row is learnt."""
    rest: Text
    goes_on: bool
    """Whether ``rest`` follows the prompt; False where it is the whole conversation, prompt and all."""


def _pairs(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], columns: tuple[str, ...]) -> list[Pair]:
    texts = [_pair_text(tokenizer, row, columns) for row in rows]
    prompts = iter(prompt_token_ids(tokenizer, [text.prompt for text in texts if text.prompt is not None]))
    rests = token_ids(tokenizer, [text.rest for text in texts])
    pairs: list[Pair] = []
    for text, rest in zip(texts, rests, strict=True):
        prompt = [] if text.prompt is None else next(prompts)
        answer = with_end(tokenizer, rest) if text.goes_on else answer_of(tokenizer, prompt, rest, text.rest.place)
        pairs.append((prompt, answer))
    return pairs


def _pair_text(tokenizer: PreTrainedTokenizerBase, row: Row, columns: tuple[str, ...]) -> _PairText:
    match [row.values[column] for column in columns]:
        case [str(text)] if columns == ("text",):
            return _PairText(None, Text(text, row.place, opened=True), goes_on=True)
        case [messages] if columns == ("messages",) and is_conversation(messages):
            return _conversation(tokenizer, row, messages[:-1], messages[-1:])
        case [str(prompt), str(completion)]:
            rest = Text(completion, row.place, opened=False)
            return _PairText(prompt_text(tokenizer, prompt, row.place), rest, goes_on=True)
        case [prompt, completion] if is_conversation(prompt) and is_conversation(completion):
            return _conversation(tokenizer, row, prompt, completion)
    kinds = {column: type(row.values[column]).__name__ for column in columns}
    raise DataError(
        f"{row.place}: {columns} must be all text or all lists of messages with role and content; got {kinds}"
    )


def _conversation(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: list[Message], answer: list[Message]
) -> _PairText:
    if not prompt or any(message["role"] != "assistant" for message in answer):
        raise DataError(
            f"{row.place}: a conversation needs a message from the assistant to learn, and one before it; "
            f"its roles are {[message['role'] for message in [*prompt, *answer]]}"
        )
    whole = conversation_text(tokenizer, [*prompt, *answer], row.place, add_generation_prompt=False)
    return _PairText(prompt_text(tokenizer, prompt, row.place), whole, goes_on=False)


def _cut(row: Row, prompt: list[int], response: list[int], limit: TokenLimit | None) -> list[int]:
    """Return as much of the response as the limit leaves room for behind the prompt."""
    if limit is None or len(prompt) + len(response) <= limit.tokens:
        return response
    room = limit.tokens - len(prompt)
    if room < 1:
        raise DataError(
            f"{row.place}: its prompt alone has {len(prompt)} tokens, and {limit.source} allows {limit.tokens}, so "
            f"nothing of the response is left to learn; set long_rows='drop' or shorten the prompt"
        )
    return response[:room]
