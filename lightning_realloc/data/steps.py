"""Data module for process supervision: responses in steps with a right or wrong label per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.chat import Text, prompt_text, prompt_token_ids, response_start
from lightning_realloc.data.images.row_images import check_whole_images
from lightning_realloc.data.responses import ResponseDataModule, cut
from lightning_realloc.data.row_tables import make_samples
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError

_ROWS_PER_BATCH = 100
"""Rows per tokenizer call; raising it raises the host memory of their texts, one for each step."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Tokens of one response, and its steps."""

    ids: list[int]
    ends: list[bool]
    """Mask of the tokens that end a step."""
    labels: list[float]
    """1.0 at the end of a right step, else 0.0."""

    def first_tokens(self, length: int) -> _Steps:
        """Return the first ``length`` tokens."""
        return _Steps(self.ids[:length], self.ends[:length], self.labels[:length])


class StepDataModule(ResponseDataModule):
    """Batches of responses in steps, the same on every rank.

    Columns: ``prompt`` (text, or messages for the chat template), ``completions`` (a list of steps, text) and
    ``labels`` (one per step: true or 1, false or 0). Columns ``tools`` and ``chat_template_kwargs`` are passed to the
    chat template.
    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids``, per response token ``step_ends`` (bool) and
    ``step_labels`` (1.0 at the end of a right step, else 0.0), and every other column of the data as Python objects.

    Args:
        step_separator: Text after every step; its last token carries the label.
        settings: Arguments of :class:`ResponseDataModule`; ``truncate`` drops steps that end after the limit.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 3 * 4 =", "completions": ["3 * 4 = 12", "2 + 12 = 15"], "labels": [True, False]}]
        >>> data = StepDataModule(rows, batch_size=1, tokenizer="gpt2")
    """

    def __init__(self, data: RowSource, *, batch_size: int, step_separator: str = "\n", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        self.step_separator = step_separator

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return the rows that fit."""
        self.require(rows, "prompt", "completions", "labels")
        limit = self.limit()
        kept: list[Row] = []
        prompts: list[list[int]] = []
        steps: list[_Steps] = []
        for row, (prompt, response) in zip(rows, self._encoded(tokenizer, rows), strict=True):
            if self.fits(row, len(prompt) + len(response.ids), limit):
                kept.append(row)
                prompts.append(prompt)
                length = len(cut(row.place, prompt, response.ids, limit))
                steps.append(_up_to_last_step_end(row, response.first_tokens(length)))
                check_whole_images(row, prompt + steps[-1].ids)
        if not kept:
            return make_samples({}, 0, "row")
        tokens = {
            "prompt_ids": Ragged.from_list(prompts),
            "response_ids": Ragged.from_list([step.ids for step in steps]),
            "step_ends": Ragged.from_list([step.ends for step in steps], dtype=torch.bool),
            "step_labels": Ragged.from_list([step.labels for step in steps], dtype=torch.float32),
        }
        return make_samples(tokens, len(kept), "row", self.data_of(kept, without=["completions", "labels"]))

    def _encoded(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[tuple[list[int], _Steps]]:
        """Yield the token ids of every row's prompt, and its steps.

        Where a step ends is known from the tokens of the text up to its end.
        """
        for begin in range(0, len(rows), _ROWS_PER_BATCH):
            some = rows[begin : begin + _ROWS_PER_BATCH]
            texts = [self._beginnings(tokenizer, row) for row in some]
            ids = iter(prompt_token_ids(tokenizer, list(chain.from_iterable(texts))))
            for row, beginnings in zip(some, texts, strict=True):
                yield _split_at_steps(row, [next(ids) for _ in beginnings])

    def _beginnings(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> list[Text]:
        """Return the prompt, the prompt with the first step, and so on up to the whole text."""
        prompt = prompt_text(tokenizer, row.values["prompt"], row.place, template=self.template_of(row))
        steps = (step + self.step_separator for step in _checked_steps(row))
        return [replace(prompt, text=text) for text in accumulate(steps, initial=prompt.text)]


def _split_at_steps(row: Row, beginnings: Sequence[list[int]]) -> tuple[list[int], _Steps]:
    """Return the token ids of the prompt, and the steps, from the ids of the row's text up to each step's end."""
    whole = beginnings[-1]
    bounds = [response_start(ids, whole, row.place) for ids in beginnings]
    response = _Steps([], [], [])
    for (start, end), label in zip(pairwise(bounds), row.values["labels"], strict=True):
        if end <= start:
            raise DataError(f"{row.place}: a step has no token to carry its label; remove it")
        response.ids.extend(whole[start:end])
        response.ends.extend([False] * (end - start - 1) + [True])
        response.labels.extend([0.0] * (end - start - 1) + [float(label)])
    return whole[: bounds[0]], response


def _checked_steps(row: Row) -> list[str]:
    steps, labels = row.values["completions"], row.values["labels"]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise DataError(f"{row.place}: 'completions' must be a list of steps, each a text that is not empty")
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{row.place}: 'labels' needs one label per step, {len(steps)}; got {count}")
    for label in labels:
        if not isinstance(label, int | float) or label not in (0, 1):
            raise DataError(f"{row.place}: a step's label must be true or 1, or false or 0; got {label!r}")
    return steps


def _up_to_last_step_end(row: Row, response: _Steps) -> _Steps:
    """Return the response up to the last token that ends a step."""
    if True not in response.ends:
        raise DataError(
            f"{row.place}: none of its steps ends within the limit, so nothing is left to learn; raise max_tokens, "
            f"or set long_rows='drop'"
        )
    return response.first_tokens(len(response.ends) - response.ends[::-1].index(True))
