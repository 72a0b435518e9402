"""Sources that other packages read: Parquet files with ``pyarrow``, other data sets with ``datasets``.

Neither package is required; the first source that needs one imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_realloc.errors import DataError
from lightning_realloc.remote_path import expand_home, is_remote, require_files

_ROWS_PER_BATCH = 1000
"""Rows of a Parquet file held in memory at a time."""
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""File suffix -> name of the builder in ``datasets``."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, after that of their format."""


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A data set of the Hugging Face hub or of a folder, read by the package ``datasets``.

    Example:
        >>> str(DatasetSource("openai/gsm8k", split="train[:1000]", name="main"))
        'openai/gsm8k [train[:1000]]'
    """

    path: str
    """Name such as ``openai/gsm8k``, a file or a pattern of files (``data/*.jsonl``), a folder of files, or a folder
    written by ``save_to_disk``."""
    split: str = "train"
    """Split or part of a split, such as ``train[:1000]``. A folder saved from a single split has no other one."""
    name: str | None = None
    """Configuration, such as ``main``; None for data sets with only one."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None for the default branch."""
    streaming: bool = False
    """Whether to read rows as they are needed, instead of all of them before the first step."""

    def __str__(self) -> str:
        return f"{self.path} [{self.split}]"

    def open(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows; a stream is not read yet.

        Raises:
            DataError: if the package, the data set or the split is missing, or a row cannot be read.
        """
        datasets = _package("datasets", f"reading {self}")
        try:
            path = expand_home(Path(self.path))
            return self._saved(datasets, path) if is_saved(path) else self._loaded(datasets, path)
        except DataError:
            raise
        except datasets.exceptions.DatasetGenerationError as error:  # the cause says which line
            cause = error.__cause__ or error
            raise DataError(f"{self} cannot be read: {_first_line(cause)}; correct the data") from cause
        except Exception as error:  # from any package that fetches the data
            raise DataError(
                f"{self} cannot be loaded: {_first_line(error)}; check its path, name and split. Without a network, "
                f"load it once where there is one, save_to_disk() it, and give the folder as path"
            ) from error

    def _loaded(self, datasets: Any, path: Path) -> Iterable[Mapping[str, Any]]:
        settings: dict[str, Any] = {"split": self.split, "revision": self.revision, "streaming": self.streaming}
        files, builder = matching_files(path), _BUILDERS.get(data_suffix(path))
        table: Iterable[Mapping[str, Any]]
        if files and builder is not None:
            table = datasets.load_dataset(builder, data_files=[str(file) for file in files], **settings)
        else:
            if not is_remote(self.path) and not _is_prepared(datasets, self.path):
                require_files(path if builder is not None else expand_home(self.path), kind="dataset")
            table = datasets.load_dataset(str(path) if path.exists() else self.path, self.name, **settings)
        return table

    def _saved(self, datasets: Any, path: Path) -> Iterable[Mapping[str, Any]]:
        table: Any = datasets.load_from_disk(str(path))
        if isinstance(table, Mapping):
            if self.split not in table:
                raise DataError(
                    f"{self.path} holds the splits {', '.join(table)}; split={self.split!r} is none of them"
                )
            table = table[self.split]
        rows: Iterable[Mapping[str, Any]] = table.to_iterable_dataset() if self.streaming else table
        return rows


def _is_prepared(datasets: Any, name: str) -> bool:
    """Return whether the cache of ``datasets`` holds tables of a data set on the hub, which need no connection."""
    *namespace, own = name.split("/")
    folder = "___".join([*namespace, datasets.naming.camelcase_to_snakecase(own)])
    return Path(datasets.config.HF_DATASETS_CACHE, folder).is_dir()


def is_stream(source: object) -> bool:
    """Return whether a source's rows are read as they are needed, or one of several by name is so; opens nothing."""
    if type(source) is dict:
        return any(map(is_stream, source.values()))
    if isinstance(source, DatasetSource):
        return source.streaming
    datasets: Any = sys.modules.get("datasets")  # imported if the caller holds one of its objects
    return datasets is not None and isinstance(source, datasets.IterableDataset)


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def matching_files(path: Path) -> list[Path]:
    """Return the file of this name, or else the files that match it as a pattern, in the order of their names."""
    names = [str(path)] if os.path.isfile(path) else sorted(glob(str(path), recursive=True))
    return [Path(name) for name in names if os.path.isfile(name)]


def data_suffix(path: Path) -> str:
    """Return the suffix that names a file's format: ``.jsonl`` of ``rows.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: if the package is missing, or for a file that is not Parquet.
    """
    parquet = _package("pyarrow.parquet", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise DataError(f"{path} is not a readable Parquet file: {_first_line(error)}") from error


def has_image_columns(path: Path) -> bool:
    """Return whether `datasets` wrote a Parquet file with columns of images."""
    parquet = _package("pyarrow.parquet", f"reading {path}")
    try:
        about = (parquet.read_schema(path).metadata or {}).get(b"huggingface", b"")
    except (OSError, ValueError):
        return False  # `parquet_rows` says why
    return b'"Image"' in about


# ---- images in tables
@dataclass(frozen=True, slots=True)
class TableImage:
    """Encoded bytes of an image in a table, read at each call."""

    table: Any
    """A ``datasets.Dataset`` that does not decode images."""
    row: int
    column: str
    place: int | None
    """Place in the row's list of images; None for a column of single images."""

    def __call__(self) -> bytes:
        """Return the bytes."""
        found = self.table[self.row][self.column]
        content: bytes = (found if self.place is None else found[self.place])["bytes"]
        return content


def undecoded(table: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a table that does not decode images, and the columns that hold some."""
    features = getattr(table, "features", None)
    if not isinstance(features, Mapping):
        return table, ()
    datasets: Any = import_module("datasets")
    plain = datasets.Image(decode=False)
    kinds = {
        name: plain if isinstance(feature, datasets.Image) else type(feature)(plain)
        for name, feature in features.items()
        if isinstance(feature, datasets.Image) or isinstance(getattr(feature, "feature", None), datasets.Image)
    }
    for name, kind in kinds.items():
        table = table.cast_column(name, kind)
    return table, tuple(kinds)


def left_in_table(values: Mapping[str, Any], table: Any, row: int, columns: Sequence[str]) -> dict[str, Any]:
    """Return a row whose images are read from the table when they are needed; those in files keep their paths."""

    def cell(value: Any, column: str, place: int | None) -> Any:
        if not isinstance(value, Mapping) or value.get("bytes") is None:
            return value
        return {**value, "bytes": TableImage(table, row, column, place)}

    made = dict(values)
    for column in columns:
        found = values[column]
        if isinstance(found, list):
            made[column] = [cell(value, column, place) for place, value in enumerate(found)]
        else:
            made[column] = cell(found, column, None)
    return made


def _package(name: str, purpose: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs the package {name.partition('.')[0]}; pip install 'lightning-realloc[datasets]', or give "
            f"the rows as JSONL"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
