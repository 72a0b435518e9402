"""Columns of JSON values, one per sample, as sequences of bytes: they travel between ranks as other sequences do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from lightning_realloc.batch.ragged import Ragged


def json_column(values: Iterable[object]) -> Ragged:
    """Return B values as ragged uint8: the UTF-8 bytes of each one's JSON. Objects that JSON lacks become text."""
    texts = (json.dumps(value, ensure_ascii=False, default=str) for value in values)
    # A lone surrogate, which a tool may have read, is no UTF-8.
    rows = [torch.frombuffer(bytearray(text.encode(errors="replace")), dtype=torch.uint8) for text in texts]
    return Ragged.from_list(rows, dtype=torch.uint8)


def json_values(column: Ragged) -> list[Any]:
    """Return the values of a column of :func:`json_column`."""
    return [json.loads(bytes(row.cpu().numpy())) for row in column.split()]
