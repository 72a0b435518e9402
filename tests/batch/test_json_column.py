"""JSON values as columns of bytes."""

from __future__ import annotations

import torch

from lightning_realloc.batch.json_column import json_column, json_values


def test_values_come_back_in_any_selection() -> None:
    values = [{"text": "größer 🙂", "calls": [1, 2.5, None]}, [], "", {"messages": []}]
    column = json_column(values)
    assert column.values.dtype is torch.uint8
    assert json_values(column) == values
    assert json_values(column.select([3, 0])) == [values[3], values[0]]
    assert json_values(json_column([])) == []


def test_other_objects_and_broken_text_become_text() -> None:
    assert json_values(json_column([{1}, "\ud800"])) == ["{1}", "?"]
