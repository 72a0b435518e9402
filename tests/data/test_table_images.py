"""Images of tables stay in their file: rows read them when they are opened, and hold no bytes meanwhile."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_realloc import PromptDataModule
from lightning_realloc.batch.samples import model_inputs
from lightning_realloc.data.rows import read_rows
from lightning_realloc.data.sources import TableImage
from tests.data.images.test_rows import drawn, prompts, table
from tests.vision_processors import tiny_processor

datasets = pytest.importorskip("datasets")


def of_images(column: str) -> Any:
    values = [drawn(0), None, drawn(2)] if column == "image" else [[drawn(0)], [], [drawn(1), drawn(2)]]
    kind = datasets.Image() if column == "image" else datasets.List(datasets.Image())
    features = datasets.Features({"prompt": datasets.Value("string"), column: kind})
    return datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], column: values}, features=features)


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("form", ["table", "parquet", "stream"])
def test_images_of_tables_are_those_of_rows(tmp_path: Path, column: str, form: str) -> None:
    source: Any = of_images(column)
    rows = [{"prompt": row["prompt"], column: row[column]} for row in source]
    if form == "parquet":
        source.to_parquet(tmp_path / "rows.parquet")
        source = tmp_path / "rows.parquet"
    expected = model_inputs(prompts(rows))
    settings = {"batch_size": 3, "tokenizer": tiny_processor("llava")}
    if form == "stream":
        module = PromptDataModule(source.to_iterable_dataset(), shuffle=False, **settings)
        module.setup("fit")
        found = model_inputs(next(iter(module._stream_loader(shuffle=False))))
    else:
        found = model_inputs(table(PromptDataModule(source, **settings)))

    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.extras.keys() == theirs.extras.keys()
        assert all(torch.equal(values, theirs.extras[name]) for name, values in ours.extras.items())


def test_rows_of_a_table_hold_no_bytes() -> None:
    rows = read_rows(of_images("images"))

    values = [value for row in rows for value in row.values["images"]]

    assert len(values) == 3
    assert all(isinstance(value["bytes"], TableImage) for value in values)
    assert values[0]["bytes"]() == pickle.loads(pickle.dumps(values[0]["bytes"]))()
