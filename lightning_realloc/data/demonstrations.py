"""Data module of demonstrations for supervised fine-tuning: prompt and completion, conversations, or plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.assistant_spans import split_at_first_answer, tokens_and_assistant_mask
from lightning_realloc.data.chat import Text, is_conversation, prompt_token_ids, response_start, token_ids
from lightning_realloc.data.responses import (
    ResponseDataModule,
    ResponseText,
    TokensOfRow,
    conversation,
    encoded,
    learnt_text,
    response_text,
)
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError

Learnt = Literal["all", "last"]
"""Assistant messages to learn from."""


@dataclass(frozen=True, slots=True)
class _SourceText:
    """One row before tokenization."""

    text: ResponseText
    prefixes: Sequence[Text] = ()
    """Prefixes of the conversation before the assistant's later answers, if all answers are learnt."""


class SFTDataModule(ResponseDataModule):
    """Batches of prompts with the responses to learn, the same on every rank.

    The columns determine the format of a row:

    - ``prompt`` and ``completion``: text, or messages for the chat template. If only one of them is text, it becomes a
      user message (prompt) or an assistant message (completion).
    - ``messages``: the assistant's messages are learnt.
    - ``text``: all tokens are learnt except the first, which has no predecessor.

    Responses end with the tokenizer's end-of-sequence token. Columns ``tools`` and ``chat_template_kwargs`` are passed
    to the chat template. A batch is :class:`Samples` with ``prompt_ids``, ``response_ids`` and every column of the data
    as Python objects. If only some response tokens are learnt, ``model_mask`` marks them.

    Args:
        learn: For ``messages``: learn from ``"all"`` assistant messages, or from the ``"last"`` message only.
        settings: Arguments of :class:`ResponseDataModule`.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 2 =", "completion": " 4"}]
        >>> data = SFTDataModule(rows, batch_size=1, tokenizer="gpt2")
    """

    def __init__(self, data: RowSource, *, batch_size: int, learn: Learnt = "all", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        if learn not in get_args(Learnt):
            raise DataError(f"learn={learn!r} must be one of {', '.join(get_args(Learnt))}")
        self.learn = learn

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompt's column, so that equal prompts are never in both training and held-out rows."""
        return _format(rows[0])[0]

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``response_ids`` and the columns of the rows that fit."""
        columns = _format(rows[0])
        given = [_source_text(tokenizer, row, columns, self.learn, self.template_of(row)) for row in rows]
        return self.table_of_tokens(rows, list(_encoded(tokenizer, given)))


def _format(row: Row) -> tuple[str, ...]:
    """Return the columns that make up prompt and response."""
    for columns in (("prompt", "completion"), ("messages",), ("text",)):
        if set(columns) <= set(row.values):
            return columns
    raise DataError(
        f"{row.place} needs 'prompt' and 'completion', or 'messages', or 'text'; it has {sorted(row.values)}"
    )


def _source_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, columns: tuple[str, ...], learn: Learnt, template: Mapping[str, Any]
) -> _SourceText:
    values = [row.values[column] for column in columns]
    if values[-1] in ("", []):
        raise DataError(f"{row.place}: {columns[-1]!r} is empty, so nothing can be learnt; fill it or remove the row")
    match values:
        case [str(text)] if columns == ("text",):
            return _SourceText(learnt_text(text, row.place))
        case [messages] if columns == ("messages",) and is_conversation(messages):
            if learn == "last":
                return _SourceText(conversation(tokenizer, messages[:-1], messages[-1:], row.place, template=template))
            return _SourceText(*split_at_first_answer(tokenizer, messages, row.place, template=template))
        case [prompt, completion]:
            found = response_text(tokenizer, prompt, completion, row.place, template=template)
            if found is not None:
                return _SourceText(found)
    kinds = {column: type(row.values[column]).__name__ for column in columns}
    raise DataError(
        f"{row.place}: {columns} must be text or lists of messages, each with role, and content or tool_calls; got "
        f"{kinds}"
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, rows: Sequence[_SourceText]) -> Iterator[TokensOfRow]:
    """Yield the token ids of every row's prompt and response, and the mask of response tokens to learn."""
    prefixes = iter(token_ids(tokenizer, [text for row in rows for text in row.prefixes]))
    single = iter(encoded(tokenizer, [row.text for row in rows if not row.prefixes]))
    several = [row.text for row in rows if row.prefixes]
    openings = iter(prompt_token_ids(tokenizer, [text.prompt for text in several if text.prompt is not None]))
    wholes = iter(token_ids(tokenizer, [text.whole for text in several]))
    for row in rows:
        if row.prefixes:
            ids, place = next(wholes), row.text.whole.place
            beginnings = [next(openings), *(next(prefixes) for _ in row.prefixes)]
            starts = [response_start(beginning, ids, place) for beginning in beginnings]
            yield (ids[: starts[0]], *tokens_and_assistant_mask(tokenizer, ids, starts, place))
        else:
            prompt, response = next(single)
            yield prompt, response, [bool(prompt), *([True] * (len(response) - 1))]
