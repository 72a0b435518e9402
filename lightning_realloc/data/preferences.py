"""Data module of preference pairs: a chosen and a rejected response to one prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.data.assistant_spans import ResponseText, TokensOfRow, encoded, response_text
from lightning_realloc.data.chat import is_conversation
from lightning_realloc.data.images.row_images import check_whole_images
from lightning_realloc.data.responses import ResponseDataModule, cut
from lightning_realloc.data.row_tables import TokenLimit, make_samples
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError


class PreferenceDataModule(ResponseDataModule):
    """Batches of preference pairs, the same on every rank.

    Columns: ``prompt``, ``chosen`` and ``rejected``, each text or messages for the chat template. Columns ``tools`` and
    ``chat_template_kwargs`` are passed to the chat template.

    Without a column ``prompt``, the prompt is the common beginning of both sides. It is also used if ``prompt`` is text
    and both sides are whole conversations. For text, the common beginning is everything before the first difference;
    for messages, all equal messages before it. Otherwise a text next to messages becomes a user message (prompt) or an
    assistant message (side).

    A batch is :class:`Samples` with two samples per row, the chosen one first: ``prompt_ids``, ``response_ids``,
    ``margin`` (the same number for both) if the data has one, and every column of the data as Python objects.

    Args:
        margin_column: Optional column with the margin by which the chosen response is better, for reward models.
        settings: Arguments of :class:`ResponseDataModule`; ``batch_size`` counts pairs.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
        >>> data = PreferenceDataModule(rows, batch_size=1, tokenizer="gpt2")
    """

    group_size = 2

    def __init__(self, data: RowSource, *, batch_size: int, margin_column: str = "margin", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        self.margin_column = margin_column

    def shaped(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return the rows with a prompt each; without a given one it is the common beginning of both sides."""
        self.require(rows, "chosen", "rejected")
        return tuple(with_prompt(row) for row in rows)

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return both samples of every pair that fits."""
        limit = self.limit()
        sides = list(
            encoded(tokenizer, [text for row in rows for text in _texts(tokenizer, row, self.template_of(row))])
        )
        kept: list[Row] = []
        tokens: list[TokensOfRow] = []
        for row, *pair in zip(rows, sides[0::2], sides[1::2], strict=True):
            chosen, rejected = _with_one_prompt(*pair)
            if self.fits(row, len(chosen[0]) + max(len(chosen[1]), len(rejected[1])), limit):
                kept.append(row)
                both = _cut_pair(row, chosen, rejected, limit)
                for prompt, response, _ in both:
                    check_whole_images(row, prompt + response)
                tokens += both
        if not kept:
            return make_samples({}, 0, "pair")
        prompts, responses, learnt = zip(*tokens, strict=True)
        columns: dict[str, Column] = {
            "prompt_ids": Ragged.from_list(prompts),
            "response_ids": Ragged.from_list(responses),
            **self.mask_columns(learnt),
        }
        if self.margin_column in rows[0].values:
            columns["margin"] = _margins(kept, self.margin_column).repeat_interleave(2)
        data = self.data_of([row for row in kept for _ in range(2)], without=[self.margin_column])
        return make_samples(columns, len(prompts), "pair", data)


def implied_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any] | None:
    """Return the common beginning of both sides and the rest of each; None if they are neither texts nor messages.

    A space before the first difference of texts belongs to the responses, because tokenizers attach it to the next
    word. Responses of messages begin with the last answer before the first difference, which may be a tool's message.
    """
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    if not are_texts and not (is_conversation(chosen) and is_conversation(rejected)):
        return None
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if length is None:
        length = min(len(chosen), len(rejected))
    elif not are_texts:
        turns = (turn for turn in range(length, 0, -1) if chosen[turn]["role"] == rejected[turn]["role"] == "assistant")
        length = next(turns, length)
    elif chosen[:length].endswith(" "):
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


def with_prompt(row: Row) -> Row:
    """Return the row with its prompt, given or implied.

    Raises:
        DataError: for sides that are equal or empty, or that have no common beginning.
    """
    values = dict(row.values)
    if values["chosen"] == values["rejected"]:
        raise DataError(
            f"{row.place}: chosen and rejected are equal, so nothing can be learnt from them; remove the row"
        )
    if "prompt" not in values or _repeats_prompt(values):
        implied = implied_prompt(values["chosen"], values["rejected"])
        if implied is not None:
            values["prompt"], values["chosen"], values["rejected"] = implied
        if values.get("prompt") in ("", []):
            raise DataError(f"{row.place}: chosen and rejected have no common beginning; give a column 'prompt'")
    for name in ("chosen", "rejected"):
        if values[name] in ("", []):
            raise DataError(f"{row.place}: the {name} response is empty; give it text or remove the row")
    return Row(row.place, values)


def _repeats_prompt(values: Mapping[str, Any]) -> bool:
    """Return whether the prompt is text and both sides are whole conversations, which contain it."""
    sides = (values["chosen"], values["rejected"])
    return isinstance(values["prompt"], str) and all(
        is_conversation(side) and side[0]["role"] != "assistant" for side in sides
    )


def _texts(tokenizer: PreTrainedTokenizerBase, row: Row, template: Mapping[str, Any]) -> list[ResponseText]:
    prompt, responses = row.values.get("prompt"), (row.values["chosen"], row.values["rejected"])
    texts = [response_text(tokenizer, prompt, response, row.place, template=template) for response in responses]
    found = [text for text in texts if text is not None]
    if len(found) < 2 or isinstance(responses[0], str) != isinstance(responses[1], str):
        kinds = {
            name: type(row.values[name]).__name__ for name in ("prompt", "chosen", "rejected") if name in row.values
        }
        raise DataError(
            f"{row.place}: prompt, chosen and rejected must be text or lists of messages, each with role, and content "
            f"or tool_calls, and chosen and rejected alike; got {kinds}"
        )
    return found


def _with_one_prompt(chosen: TokensOfRow, rejected: TokensOfRow) -> tuple[TokensOfRow, TokensOfRow]:
    """Return both sides with the tokens of the prompt that both have.

    A token of the prompt's end may be joined with a response on one side only; it is then part of both responses.
    """
    prompt = min(chosen[0], rejected[0], key=len)

    def of_prompt(own: list[int], response: list[int], learnt: list[bool]) -> TokensOfRow:
        joined = own[len(prompt) :]
        return prompt, joined + response, [True] * len(joined) + learnt

    return of_prompt(*chosen), of_prompt(*rejected)


def _cut_pair(row: Row, chosen: TokensOfRow, rejected: TokensOfRow, limit: TokenLimit | None) -> list[TokensOfRow]:
    """Return both sides, cut to the limit; DataError if they are equal then."""
    sides: list[TokensOfRow] = []
    for prompt, whole, learnt in (chosen, rejected):
        response = cut(row.place, prompt, whole, limit)
        sides.append((prompt, response, learnt[: len(response)]))
    if sides[0][1] == sides[1][1]:
        raise DataError(
            f"{row.place}: chosen and rejected are the same {len(sides[0][1])} tokens after encoding and truncation; "
            f"raise max_tokens, set long_rows='drop' or remove the row"
        )
    return sides


def _margins(rows: Sequence[Row], column: str) -> Tensor:
    for row in rows:
        value = row.values[column]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"{row.place}: {column!r} must be a finite number, by how much chosen is better; got {value!r}"
            )
    return torch.tensor([float(row.values[column]) for row in rows])
