"""Supervised pairs: what is given, and what is to be learnt after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.assistant_spans import from_first_answer, said_by_assistant
from lightning_realloc.data.chat import Text, is_conversation, prompt_token_ids, token_ids
from lightning_realloc.data.responses import (
    ResponseDataModule,
    ResponseText,
    TokensOfRow,
    conversation,
    encoded,
    response_text,
    whole_text,
)
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError

Learnt = Literal["all", "last"]
"""Which of the assistant's messages are learnt."""


@dataclass(frozen=True, slots=True)
class _Given:
    """One row before the tokenizer."""

    text: ResponseText
    begun: Sequence[Text] = ()
    """How the assistant's later answers begin, where all are learnt."""


class SFTDataModule(ResponseDataModule):
    """Batches of prompts with the responses to learn, the same on every rank.

    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids`` and every column of the data as python objects.
    The columns decide what a row is: ``prompt`` and ``completion`` (text, or messages for the chat template; text
    beside messages is what the user, or the assistant, says); ``messages``, of which the assistant's are learnt; or
    ``text``, all of which is learnt but its first token, which nothing predicts. Responses end with the tokenizer's
    end-of-sequence token. Columns ``tools`` and ``chat_template_kwargs`` are given to the chat template. Where not all
    of a response is learnt, ``model_mask`` says what is.

    Args:
        learn: Of ``messages``: ``"all"`` that the assistant says, or the ``"last"`` message alone.
        settings: Those of :class:`ResponseDataModule`.

    Raises:
        DataError: in ``setup``, for anything in the data that cannot be used, with its file and line.
    """

    def __init__(self, data: RowSource, *, batch_size: int, learn: Learnt = "all", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        if learn not in get_args(Learnt):
            raise DataError(f"learn={learn!r} must be one of {', '.join(get_args(Learnt))}")
        self.learn = learn

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the column that says what is given: equal prompts are never on both sides."""
        return _format(rows[0])[0]

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``response_ids`` and the columns of the rows that fit."""
        columns = _format(rows[0])
        given = [_given(tokenizer, row, columns, self.learn, self.template_of(row)) for row in rows]
        return self.table_of_tokens(rows, list(_encoded(tokenizer, given)))


def _format(row: Row) -> tuple[str, ...]:
    """Return the columns that make up prompt and response."""
    for columns in (("prompt", "completion"), ("messages",), ("text",)):
        if set(columns) <= set(row.values):
            return columns
    raise DataError(
        f"{row.place} needs 'prompt' and 'completion', or 'messages', or 'text'; it has {sorted(row.values)}"
    )


def _given(
    tokenizer: PreTrainedTokenizerBase, row: Row, columns: tuple[str, ...], learn: Learnt, template: Mapping[str, Any]
) -> _Given:
    values = [row.values[column] for column in columns]
    if values[-1] in ("", []):
        raise DataError(
            f"{row.place}: {columns[-1]!r} is empty, so nothing can be learnt; fill it or leave the row out"
        )
    match values:
        case [str(text)] if columns == ("text",):
            return _Given(whole_text(text, row.place))
        case [messages] if columns == ("messages",) and is_conversation(messages):
            if learn == "last":
                return _Given(conversation(tokenizer, messages[:-1], messages[-1:], row.place, template=template))
            return _Given(*from_first_answer(tokenizer, messages, row.place, template=template))
        case [prompt, completion]:
            found = response_text(tokenizer, prompt, completion, row.place, template=template)
            if found is not None:
                return _Given(found)
    kinds = {column: type(row.values[column]).__name__ for column in columns}
    raise DataError(
        f"{row.place}: {columns} must be text or lists of messages, each with role, and content or tool_calls; got "
        f"{kinds}"
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Given]) -> Iterator[TokensOfRow]:
    """Yield the token ids of every row's prompt and response, and which of the response's are learnt."""
    begun = iter(token_ids(tokenizer, [text for row in rows for text in row.begun]))
    single = iter(encoded(tokenizer, [row.text for row in rows if not row.begun]))
    several = [row.text for row in rows if row.begun]
    openings = iter(prompt_token_ids(tokenizer, [text.prompt for text in several if text.prompt is not None]))
    wholes = iter(token_ids(tokenizer, [text.rest for text in several]))
    for row in rows:
        if row.begun:
            prompt = next(openings)
            later = [next(begun) for _ in row.begun]
            yield (prompt, *said_by_assistant(tokenizer, next(wholes), [prompt, *later], row.text.rest.place))
        else:
            prompt, response = next(single)
            yield prompt, response, [bool(prompt), *([True] * (len(response) - 1))]
