"""Supervised pairs: what is given, and what is to be learnt after it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import is_conversation
from lightning_realloc.data.responses import (
    ResponseDataModule,
    ResponseText,
    conversation,
    response_text,
    whole_text,
)
from lightning_realloc.data.rows import Row
from lightning_realloc.errors import DataError
from lightning_realloc.runtime.samples import Samples


class SFTDataModule(ResponseDataModule):
    """Batches of prompts with the responses to learn, the same on every rank.

    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids`` and every column of the data as python objects.
    The columns decide what a row is: ``prompt`` and ``completion`` (text, or messages for the chat template);
    ``messages``, of which the last one is learnt; or ``text``, all of which is learnt. Responses end with the
    tokenizer's end-of-sequence token. A column ``tools`` is given to the chat template.

    Settings: those of :class:`ResponseDataModule`.

    Raises:
        DataError: in ``setup``, for anything in the data that cannot be used, with its file and line.
    """

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the column that says what is given: equal prompts are never on both sides."""
        return _format(rows[0])[0]

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``response_ids`` and the columns of the rows that fit."""
        columns = _format(rows[0])
        return self.table_of(rows, [_text(tokenizer, row, columns) for row in rows], tokenizer)


def _format(row: Row) -> tuple[str, ...]:
    """Return the columns that make up prompt and response."""
    for columns in (("prompt", "completion"), ("messages",), ("text",)):
        if set(columns) <= set(row.values):
            return columns
    raise DataError(
        f"{row.place} needs 'prompt' and 'completion', or 'messages', or 'text'; it has {sorted(row.values)}"
    )


def _text(tokenizer: PreTrainedTokenizerBase, row: Row, columns: tuple[str, ...]) -> ResponseText:
    values = [row.values[column] for column in columns]
    tools = row.values.get("tools")
    if values[-1] in ("", []):
        raise DataError(f"{row.place}: {columns[-1]!r} is empty; give it text or leave the row out")
    match values:
        case [str(text)] if columns == ("text",):
            return whole_text(text, row.place)
        case [messages] if columns == ("messages",) and is_conversation(messages):
            return conversation(tokenizer, messages[:-1], messages[-1:], row.place, tools=tools)
        case [prompt, completion]:
            found = response_text(tokenizer, prompt, completion, row.place, tools=tools)
            if found is not None:
                return found
    kinds = {column: type(row.values[column]).__name__ for column in columns}
    raise DataError(
        f"{row.place}: {columns} must be all text or all lists of messages with role and content; got {kinds}"
    )
