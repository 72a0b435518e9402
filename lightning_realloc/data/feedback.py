"""Data module of binary feedback: single responses with a desirable or undesirable label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.assistant_spans import ResponseText, encoded, response_text
from lightning_realloc.data.preferences import with_prompt
from lightning_realloc.data.responses import ResponseDataModule
from lightning_realloc.data.rows import Row
from lightning_realloc.errors import DataError


class BinaryFeedbackDataModule(ResponseDataModule):
    """Batches of labelled responses, the same on every rank.

    Columns: ``prompt`` and ``completion``, each text or messages for the chat template, and ``label``: true or 1 for a
    desirable completion, false or 0 for an undesirable one. If only one of prompt and completion is text, it becomes a
    user or assistant message. Columns ``tools`` and ``chat_template_kwargs`` are passed to the chat template.

    Preference pairs, as in :class:`PreferenceDataModule`, become two rows: the chosen response is desirable, the
    rejected one is not.

    A batch is :class:`Samples` with ``prompt_ids``, ``response_ids``, ``label`` (B,) bool, and every other column of
    the data as Python objects. Arguments are those of :class:`ResponseDataModule`.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 2 =", "completion": " 4", "label": True}]
        >>> data = BinaryFeedbackDataModule(rows, batch_size=1, tokenizer="gpt2")
    """

    def shaped(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return the rows; each preference pair becomes two."""
        if "completion" in rows[0].values or not {"chosen", "rejected"} <= set(rows[0].values):
            return rows
        return tuple(judged for row in rows for judged in _both_sides(with_prompt(row)))

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return the rows that fit."""
        self.require(rows, "prompt", "completion", "label")
        texts = [_text(tokenizer, row, self.template_of(row)) for row in rows]
        return self.table_of(rows, list(encoded(tokenizer, texts)), [_label(row) for row in rows])


def _both_sides(pair: Row) -> tuple[Row, Row]:
    """Return the two responses of a pair as labelled rows."""
    kept = {name: value for name, value in pair.values.items() if name not in ("chosen", "rejected")}
    chosen, rejected = pair.values["chosen"], pair.values["rejected"]
    return (
        Row(pair.place, {**kept, "completion": chosen, "label": True}),
        Row(pair.place, {**kept, "completion": rejected, "label": False}),
    )


def _label(row: Row) -> bool:
    label = row.values["label"]
    if not isinstance(label, int | float) or label not in (0, 1):
        raise DataError(f"{row.place}: 'label' must be true or 1, or false or 0; got {label!r}")
    return bool(label)


def _text(tokenizer: PreTrainedTokenizerBase, row: Row, template: Mapping[str, Any]) -> ResponseText:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if completion in ("", []):
        raise DataError(f"{row.place}: the completion is empty; give it text or remove the row")
    text = response_text(tokenizer, prompt, completion, row.place, template=template)
    if text is None:
        kinds = {"prompt": type(prompt).__name__, "completion": type(completion).__name__}
        raise DataError(
            f"{row.place}: prompt and completion must be text or lists of messages, each with role, and content or "
            f"tool_calls; got {kinds}"
        )
    return text
