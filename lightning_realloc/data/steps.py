"""Process supervision: responses in steps, each of which was judged right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.chat import Text, prompt_text, prompt_token_ids, token_ids
from lightning_realloc.data.data_module import tabulated
from lightning_realloc.data.responses import ResponseDataModule, cut
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError


@dataclass(frozen=True, slots=True)
class _Steps:
    """One response."""

    ids: list[int]
    ends: list[bool]
    """True at the last token of a step."""
    labels: list[float]
    """1.0 where a right step ends."""

    def upto(self, length: int) -> _Steps:
        """Return the first tokens."""
        return _Steps(self.ids[:length], self.ends[:length], self.labels[:length])


class StepDataModule(ResponseDataModule):
    """Batches of responses in steps, the same on every rank.

    Columns: ``prompt`` (text, or messages for the chat template), ``completions`` (a list of steps, text) and
    ``labels`` (one per step: true or 1, false or 0). Columns ``tools`` and ``chat_template_kwargs`` are given to
    the chat template.

    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids``, per response token ``step_ends`` (bool) and
    ``step_labels`` (1.0 where a right step ends, else 0.0), and every other column of the data as python objects.

    Args:
        step_separator: Text behind every step; its last token is where the step is judged.
        settings: Of :class:`ResponseDataModule`; ``truncate`` cuts steps off that end behind the limit.

    Raises:
        DataError: in ``setup``, for anything in the data that cannot be used, with its file and line.
    """

    def __init__(self, data: RowSource, *, batch_size: int, step_separator: str = "\n", **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        self.step_separator = step_separator

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompts' column: equal prompts are never on both sides."""
        return "prompt"

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return the rows that fit."""
        self.require(rows, "prompt", "completions", "labels")
        limit = self.limit()
        prompts = prompt_token_ids(
            tokenizer,
            [prompt_text(tokenizer, row.values["prompt"], row.place, template=self.template_of(row)) for row in rows],
        )
        kept: list[Row] = []
        kept_prompts: list[list[int]] = []
        steps: list[_Steps] = []
        for row, prompt, response in zip(rows, prompts, self._steps(tokenizer, rows), strict=True):
            if self.fits(row, len(prompt) + len(response.ids), limit):
                kept.append(row)
                kept_prompts.append(prompt)
                steps.append(_whole(row, response.upto(len(cut(row.place, prompt, response.ids, limit)))))
        if not kept:
            return tabulated({}, 0, "row")
        tokens = {
            "prompt_ids": Ragged.from_list(kept_prompts),
            "response_ids": Ragged.from_list([step.ids for step in steps]),
            "step_ends": Ragged.from_list([step.ends for step in steps], dtype=torch.bool),
            "step_labels": Ragged.from_list([step.labels for step in steps], dtype=torch.float32),
        }
        return tabulated(tokens, len(kept), "row", self.data_of(kept, without=["completions", "labels"]))

    def _steps(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[_Steps]:
        """Return every row's steps, each encoded by itself, so that it ends with a token of its own."""
        texts = [
            Text(step + self.step_separator, row.place, opened=False) for row in rows for step in _checked_steps(row)
        ]
        encoded = iter(token_ids(tokenizer, texts))
        found: list[_Steps] = []
        for row in rows:
            response = _Steps([], [], [])
            for label in row.values["labels"]:
                ids = next(encoded)
                if not ids:
                    raise DataError(f"{row.place}: a step has no token to be judged at; leave it out")
                response.ids.extend(ids)
                response.ends.extend([False] * (len(ids) - 1) + [True])
                response.labels.extend([0.0] * (len(ids) - 1) + [float(label)])
            found.append(response)
        return found


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


def _whole(row: Row, response: _Steps) -> _Steps:
    """Return the response up to its last end of a step."""
    if True not in response.ends:
        raise DataError(
            f"{row.place}: not one of its steps ends within the limit, so nothing is left to learn; raise max_tokens, "
            f"or set long_rows='drop'"
        )
    return response.upto(len(response.ends) - response.ends[::-1].index(True))
