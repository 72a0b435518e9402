"""Convert samples to rows for tables and files: text in place of tokens, words in place of codes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS, response_texts
from lightning_realloc.batch.samples import Samples

_NAMES = {"rewards": "reward", "scores": "score"}
"""Column of samples -> its name in a row."""
_HIDDEN = "data."
"""Prefix of a data column whose name a row needs otherwise."""


def sample_rows(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """Return one row per sample, in the samples' order.

    A row holds ``prompt`` as in the data, ``response`` (text, without special tokens) with ``num_response_tokens``,
    every column of one number per sample, such as ``reward``, and the data's other columns. ``finish_reason`` is a
    word; numbers that are not finite are None. A data column with the name of one of these is called ``data.<name>``.
    """
    given = dict(samples.data)
    prompts = {"prompt": given.pop("prompt")} if "prompt" in given else {}
    made: dict[str, Sequence[object]] = {}
    if "response_ids" in samples:
        made["response"] = response_texts(samples, tokenizer)
        made["num_response_tokens"] = samples.ragged("response_ids").lengths.tolist()
    for name, column in samples.columns.items():
        if isinstance(column, Tensor) and column.dim() == 1:
            made[_NAMES.get(name, name)] = _values(name, column)
    others = {f"{_HIDDEN}{name}" if name in made else name: column for name, column in given.items()}
    columns = {**prompts, **made, **others}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(name: str, column: Tensor) -> list[object]:
    values: list[float] = column.tolist()
    if name == "finish_reason":
        return [FINISH_REASONS[int(code)] for code in values]
    return [value if math.isfinite(value) else None for value in values]
