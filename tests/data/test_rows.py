"""Reading rows: their values, and the error for each kind of broken file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from random import Random
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.data.rows import Row, read_rows, split_by_hash
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.errors import DataError


def _file(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_files_lists_and_datasets_give_the_same_rows(tmp_path: Path) -> None:
    table = [{"prompt": "a ü", "answer": 1}, {"prompt": "b", "answer": None}]
    path = _file(tmp_path, "\n".join(json.dumps(row) for row in table) + "\n\n")
    for source in (path, str(path), table, Dataset.from_list(table)):
        assert [row.values for row in read_rows(source)] == table
    assert [row.place for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 2"]
    assert read_rows(table)[1].place == "row 1 of the data set"


@pytest.mark.parametrize(("suffix", "opened"), [("gz", gzip.open), ("bz2", bz2.open), ("xz", lzma.open)])
def test_patterns_lists_and_compressed_files_are_read_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, opened: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    table = [{"prompt": "a ü", "answer": 1}, {"prompt": "b", "answer": None}]
    names = [f"part{number}.jsonl.{suffix}" for number in (0, 1)]
    for name, row in zip(names, table, strict=True):
        with opened(tmp_path / name, mode="wt", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    files = [f"~/{name}" for name in names]
    for source in (files, tuple(map(Path, files)), f"~/part*.{suffix}", DatasetSource(f"~/part*.jsonl.{suffix}")):
        assert [row.values for row in read_rows(source)] == table
    assert [row.place for row in read_rows(files)] == [f"{tmp_path / name}, line 1" for name in names]
    assert list(DatasetSource(files[1], streaming=True).open()) == table[1:]

    (tmp_path / names[0]).write_bytes((tmp_path / names[1]).read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{names[0]} cannot be read: .*; write it again"):
        read_rows(files)
    with pytest.raises(DataError, match=r"no file at '.*/none\*.jsonl'; give a JSONL file"):
        read_rows("~/none*.jsonl")


def test_byte_order_marks_are_removed(tmp_path: Path) -> None:
    marked = "\ufeff\n" + '\ufeff{"prompt": "a"}\n{"prompt": "\ufeffb"}\n'
    assert [row.values for row in read_rows(_file(tmp_path, marked))] == [{"prompt": "a"}, {"prompt": "\ufeffb"}]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', r"rows.jsonl, line 3 is not JSON: .* at column \d+ .*drop' cannot"),
        ('{"prompt": "a"}\n["b"]\n', "rows.jsonl, line 2 must be a JSON object"),
        (
            '{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n',
            r"line 2 must have the same columns as .* line 1; it lacks 'answer', write null where",
        ),
        (
            '{"prompt": "a"}\n{"prompt": "b", "answer": 1}\n',
            r"line 2 must have the same columns as .* line 1; it adds 'answer', write null where",
        ),
        (
            '{"prompt": "a", "answer": 1}\n{"promt": "b", "answer": 1}\n',
            r"line 2 must have the same columns as .* line 1; it lacks 'prompt' and adds 'promt', write null where",
        ),
        ("", "rows.jsonl holds no rows"),
    ],
)
def test_broken_files_are_refused_with_file_and_line(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        read_rows(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", "prompt,answer\na,b\n"),
        ("rows.json", '[{"prompt": "a", "answer": "b"}]'),
        ("rows.jsonl", '[\n  {"prompt": "a",\n   "answer": "b"}\n]\n'),
    ],
)
def test_the_error_of_another_format_names_a_source_that_reads_it(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=rf"line 1 .* give DatasetSource\('{path}'\)$"):
        read_rows(path)
    assert [row.values for row in read_rows(DatasetSource(str(path)))] == [{"prompt": "a", "answer": "b"}]


def test_a_broken_csv_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\na,b\nc,d,e\n")
    with pytest.raises(
        DataError, match=rf"^{path} \[train\] cannot be read: .*Expected 2 fields in line 3, saw 3; corr"
    ):
        read_rows(DatasetSource(str(path)))


def test_other_unreadable_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file at '.*missing.jsonl'"):
        read_rows(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="must be UTF-8 text"):
        read_rows(tmp_path / "binary.jsonl")
    with pytest.raises(DataError, match=r"row 1 of the data set must be a mapping .* str"):
        read_rows([{"prompt": "text"}, "text"])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"no file at 'texttext.*'; give a JSONL file, .* rows as dictionaries, or a"):
        read_rows(["text" * 999])  # a list of texts names files
    columns: Any = {"prompt": ["a", "b"]}
    splits: Any = {"train": Dataset.from_dict(columns)}
    for table, way_out in ((columns, "give columns as rows"), (splits, r"give one: data\['train'\]")):
        with pytest.raises(DataError, match=rf"row 0 of the data set must be a mapping .* str; .*{way_out}"):
            read_rows(table)
    with pytest.raises(DataError, match="the data set holds no rows"):
        read_rows([])


def test_held_out_rows_depend_on_their_text_and_the_seed_alone() -> None:
    rows = read_rows([{"prompt": f"prompt {number % 500}", "number": number} for number in range(1000)])
    rest, held_out = split_by_hash(rows, "prompt", fraction=0.2, seed=1)
    assert len(rest) + len(held_out) == 1000
    # 500 distinct prompts, each held out with probability 0.2: 100 expected, standard deviation sqrt(500 * 0.16) = 8.9
    assert 60 <= len({row.values["prompt"] for row in held_out}) <= 140
    assert not {row.values["prompt"] for row in rest} & {row.values["prompt"] for row in held_out}
    reversed_rest, reversed_held_out = split_by_hash(rows[::-1], "prompt", fraction=0.2, seed=1)
    assert (reversed_rest[::-1], reversed_held_out[::-1]) == (rest, held_out)
    assert split_by_hash(rows, "prompt", fraction=0.2, seed=2)[1] != held_out


MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3)}), max_size=2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text(max_size=3) | MESSAGES, max_size=30), st.integers(0, 3), st.floats(0, 1), st.floats(0, 1),
    st.randoms(),
)  # fmt: skip
def test_the_split_of_a_row_does_not_depend_on_other_rows(
    prompts: list[Any], seed: int, one: float, other: float, random: Random
) -> None:
    rows = [Row(f"row {place}", {"prompt": prompt, "place": place}) for place, prompt in enumerate(prompts)]
    smaller, larger = sorted((one, other))
    rest, held_out = split_by_hash(rows, "prompt", fraction=smaller, seed=seed)
    assert sorted((*rest, *held_out), key=rows.index) == rows
    # A larger fraction holds out the same rows and more; a subset in any order is split as it was among all rows.
    _, more = split_by_hash(rows, "prompt", fraction=larger, seed=seed)
    assert all(row in more for row in held_out)
    some = random.sample(rows, len(rows) // 2)
    assert split_by_hash(some, "prompt", fraction=smaller, seed=seed) == (
        tuple(row for row in some if row in rest), tuple(row for row in some if row in held_out),
    )  # fmt: skip


def test_the_split_is_the_same_in_every_version() -> None:
    rows = read_rows([{"prompt": f"prompt {number}"} for number in range(12)])
    _, held_out = split_by_hash(rows, "prompt", fraction=0.25, seed=0)
    # The SHA-256 hash of '[0, "prompt 0"]' starts with 0x0a67: 0.04 of the range.
    assert [rows.index(row) for row in held_out] == [0, 2, 4, 7, 8, 9, 10]


@pytest.mark.parametrize("source", [None, -1, 0.5, True])
def test_data_that_is_no_table_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match=f"the data set must be rows, a path or a DatasetSource; it is {source}"):
        read_rows(source)
