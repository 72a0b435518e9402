"""Rows from Parquet files and from ``datasets``, and the error for each kind of failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from jsonargparse import ArgumentParser

from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.rows import RowSource, read_rows
from lightning_realloc.data.sources import DatasetSource, _is_prepared
from lightning_realloc.errors import DataError

TABLE: list[dict[str, Any]] = [
    {"prompt": "a ü", "answer": 1, "turns": [{"role": "user", "content": "x"}]},
    {"prompt": "b", "answer": None, "turns": [{"role": "user", "content": "y"}]},
]


def values(source: RowSource) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(source)]


def test_parquet_files_hold_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list(TABLE).to_parquet(path)
    assert values(path) == values(str(path)) == TABLE
    assert read_rows(path)[1].place == f"row 1 of {path}"


def test_saved_folders_hold_the_same_rows(tmp_path: Path) -> None:
    Dataset.from_list(TABLE).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(TABLE), test=Dataset.from_list(TABLE[:1])).save_to_disk(tmp_path / "two")
    assert values(tmp_path / "one") == values(tmp_path / "two") == TABLE
    assert values(DatasetSource(str(tmp_path / "two"), split="test")) == TABLE[:1]
    with pytest.raises(DataError, match="holds the splits train, test; split='dev' is none of them"):
        read_rows(DatasetSource(str(tmp_path / "two"), split="dev"))


def test_datasets_reads_rows_of_a_folder_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    Dataset.from_list(TABLE).to_parquet(folder / "train.parquet")
    source = DatasetSource(str(folder), split="train[:1]")
    assert values(source) == TABLE[:1]
    assert read_rows(source)[0].place == f"row 0 of {folder} [train[:1]]"
    with pytest.raises(
        DataError, match=r"is a folder that was not written by save_to_disk.*; name one of its files, or give Data"
    ):
        read_rows(folder)
    files = [("rows.jsonl", Dataset.to_json), ("rows.parquet", Dataset.to_parquet)]
    for name, write in files:
        write(Dataset.from_list(TABLE), tmp_path / name)
        assert values(DatasetSource(str(tmp_path / name), split="train[1:]")) == TABLE[1:]


def test_unreadable_sources_are_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for streaming in (False, True):
        source = DatasetSource("no-such/data", streaming=streaming)
        with pytest.raises(DataError, match=r"no-such/data \[train\] cannot be loaded: .*Without a network, load it"):
            source.open()
    with pytest.raises(DataError, match=r"of the Hugging Face hub as DatasetSource.'no-such/data', split='train'"):
        read_rows("no-such/data")
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"text.parquet is not a readable Parquet file: "):
        read_rows(tmp_path / "text.parquet")
    Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty.parquet holds no rows"):
        read_rows(tmp_path / "empty.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"empty.parquet needs the package pyarrow; pip install .*, or give"):
        read_rows(tmp_path / "empty.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets; pip install 'lightning-realloc\[datasets\]'"):
        read_rows(DatasetSource("no-such/data"))


@pytest.mark.parametrize(("name", "folder"), [("org/MySet", "org___my_set"), ("MySet", "my_set"), ("gsm8k", "gsm8k")])
def test_tables_in_the_cache_of_datasets_need_no_hub(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert not _is_prepared(datasets, name)
    (tmp_path / folder).mkdir()
    assert _is_prepared(datasets, name)


def test_a_configuration_file_names_a_data_set() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(PromptDataModule, "data")
    chosen = parser.parse_object(
        {"data": {"data": {"path": "openai/gsm8k", "name": "main", "streaming": True}, "batch_size": 2}}
    )
    assert parser.instantiate_classes(chosen).data.data == DatasetSource("openai/gsm8k", name="main", streaming=True)
    assert parser.parse_object({"data": {"data": "a.jsonl", "batch_size": 2}}).data.data == "a.jsonl"
