"""Data module of demonstrations for supervised fine-tuning: prompt and completion, conversations, or plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, get_args

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.assistant_spans import (
    ResponseText,
    TokensOfRow,
    answers,
    encoded,
    learnt_text,
    rendered_responses,
)
from lightning_realloc.data.chat import is_conversation
from lightning_realloc.data.responses import ResponseDataModule
from lightning_realloc.data.row_tables import TokenLimit
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError, require_choice

Learnt = Literal["all", "last"]
"""Assistant messages to learn from."""


class SFTDataModule(ResponseDataModule):
    """Batches of prompts with the responses to learn, the same on every rank.

    The columns determine the format of a row:

    - ``prompt`` and ``completion``: text, or messages for the chat template. If only one of them is text, it becomes a
      user message (prompt) or an assistant message (completion).
    - ``messages``: the assistant's messages are learnt, each as at its turn. If the chat template changes earlier
      answers when a conversation continues, they become sequences of their own. Messages after the last answer are not
      read.
    - ``text``: all tokens are learnt except the first, which has no predecessor.

    Responses end with the tokenizer's end-of-sequence token. Columns ``tools`` and ``chat_template_kwargs`` are passed
    to the chat template. A batch is :class:`Samples` with ``prompt_ids``, ``response_ids`` and every column of the data
    as Python objects. If only some response tokens are learnt, ``model_mask`` marks them.

    Args:
        learn: For ``messages``: learn from ``"all"`` assistant messages, or from the ``"last"`` one only.
        settings: Arguments of :class:`ResponseDataModule`.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 2 =", "completion": " 4"}]
        >>> data = SFTDataModule(rows, batch_size=1, tokenizer="gpt2")
    """

    def __init__(self, data: RowSource, *, batch_size: int, learn: Learnt = "all", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        require_choice("learn", learn, get_args(Learnt), DataError)
        self.learn = learn

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompt's column, so that equal prompts are never in both training and held-out rows."""
        return _format(rows[0])[0]

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``response_ids`` and the columns of the rows that fit."""
        columns = _format(rows[0])
        texts = [_texts(tokenizer, row, columns, self.learn, self.template_of(row)) for row in rows]
        if any(len(found) > 1 for found in texts):
            rank_zero_warn(
                "the chat template changes earlier answers when a conversation continues, such as by dropping their "
                "thoughts; such answers are sequences of their own, and batch_size counts sequences"
            )
        limit = self.limit() if self.long_rows == "truncate" else None
        tokens = encoded(tokenizer, list(chain.from_iterable(texts)))
        kept: list[tuple[Row, TokensOfRow]] = []
        for row, found in zip(rows, texts, strict=True):
            first, *later = islice(tokens, len(found))
            kept += [(row, first), *((row, one) for one in later if not _is_cut_away(one, limit))]
        return self.table_of([row for row, _ in kept], [one for _, one in kept])


def _is_cut_away(tokens: TokensOfRow, limit: TokenLimit | None) -> bool:
    """Return whether a conversation that is cut to ``limit`` ends before this answer."""
    return limit is not None and len(tokens[0]) >= limit.tokens


def _format(row: Row) -> tuple[str, ...]:
    """Return the columns that make up prompt and response."""
    for columns in (("prompt", "completion"), ("messages",), ("text",)):
        if set(columns) <= set(row.values):
            return columns
    raise DataError(
        f"{row.place} needs 'prompt' and 'completion', or 'messages', or 'text'; it has {sorted(row.values)}"
    )


def _texts(
    tokenizer: PreTrainedTokenizerBase, row: Row, columns: tuple[str, ...], learn: Learnt, template: Mapping[str, Any]
) -> list[ResponseText]:
    """Return the sequences to learn from a row."""
    values = [row.values[column] for column in columns]
    if values[-1] in ("", []):
        raise DataError(f"{row.place}: {columns[-1]!r} is empty, so nothing can be learnt; fill it or remove the row")
    match values:
        case [str(text)] if columns == ("text",):
            return [learnt_text(text, row.place)]
        case [messages] if columns == ("messages",) and is_conversation(messages):
            return answers(tokenizer, messages, row.place, only_last=learn == "last", template=template)
        case [prompt, completion]:
            found = rendered_responses(tokenizer, prompt, completion, row.place, template=template)
            if found:
                return found
    kinds = {column: type(row.values[column]).__name__ for column in columns}
    raise DataError(
        f"{row.place}: {columns} must be text or lists of messages, each with role, and content or tool_calls; got "
        f"{kinds}"
    )
