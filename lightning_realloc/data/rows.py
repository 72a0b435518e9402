"""Read and check the rows of JSONL and Parquet files and of data sets, before tokenization.

A row keeps its place (file and line, or position in a data set), so that later error messages can name it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeGuard, TypeVar, cast

from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.data.sources import (
    DatasetSource,
    data_suffix,
    has_image_columns,
    is_saved,
    left_in_table,
    matching_files,
    parquet_rows,
    undecoded,
)
from lightning_realloc.errors import DataError
from lightning_realloc.remote_path import expand_home

# Path comes last: jsonargparse dumps anything that is read as another type as the text of a path.
RowSource = str | Sequence[str | Path] | DatasetSource | Iterable[Mapping[str, Any]] | Path
"""A JSONL or Parquet file, a pattern (``data/*.jsonl.gz``) or a list of files, a folder written by ``save_to_disk`` of
``datasets``, a :class:`DatasetSource`, a list of dictionaries, or another iterable of dictionaries, such as a
``datasets.Dataset``."""
RowSources = str | Sequence[str | Path] | DatasetSource | Mapping[str, RowSource] | Iterable[Mapping[str, Any]] | Path
"""Such rows, or several data sets by name."""

Made = TypeVar("Made")
MAX_ROWS_NAMED = 5
"""Rows with errors that one message names. Raising it makes messages longer, and the search for such rows."""


class NoUsableRowsError(DataError):
    """None of the rows can be used."""


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a data set."""

    place: str
    """Location for error messages, such as ``prompts.jsonl, line 3``."""
    values: Mapping[str, Any]
    """Column name -> value; every row of a data set has the same columns."""


def read_rows(source: RowSource) -> tuple[Row, ...]:
    """Return all rows of a source.

    Raises:
        DataError: for a line that is not a JSON object, for rows with different columns, and for a data set without
            rows; the message names file and line.
    """
    if _are_files(source):
        name, rows = "the files", tuple(row for one in source for row in read_rows(one))
    else:
        name = str(source) if isinstance(source, str | Path | DatasetSource) else "the data set"
        rows = tuple(_open(source, name))
    if not rows:
        raise DataError(f"{name} holds no rows; it needs at least one")
    for row in rows[1:]:
        check_same_columns(row, rows[0])
    return rows


def first_rows(source: RowSource, count: int) -> tuple[Row, ...]:
    """Return up to ``count`` rows of a source. Of files, no further ones are read."""
    parts = source if _are_files(source) else [source]
    return tuple(islice(chain.from_iterable(_open(one, str(one)) for one in parts), count))


def _open(source: RowSource, name: str) -> Iterator[Row]:
    if isinstance(source, str | Path):
        return _read_path(expand_home(Path(source)))
    table = source.open() if isinstance(source, DatasetSource) else cast("Iterable[Mapping[str, Any]]", source)
    return table_rows(table, name)


def folder_of(source: RowSource) -> Path | None:
    """Return the folder of a file of rows, or of several files in one folder; None for other sources."""
    files = source if _are_files(source) else [source]
    folders = {expand_home(Path(one)).parent if isinstance(one, str | Path) else None for one in files}
    return folders.pop() if len(folders) == 1 else None


def is_named(source: object) -> TypeGuard[Mapping[str, RowSource]]:
    """Return whether a source is several data sets by name, not columns or the splits of a ``datasets.DatasetDict``."""
    return type(source) is dict and bool(source) and not source.keys() & {"prompt", "path"}


def lasting(source: Any) -> Any:
    """Return the rows of an iterator, which can be read only once, as a list; also in a dictionary of data sets."""
    if is_named(source):
        return {name: lasting(one) for name, one in source.items()}
    return list(source) if isinstance(source, Iterator) else source


def _are_files(source: object) -> TypeGuard[Sequence[str | Path]]:
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(one, str | Path) for one in source)


def table_rows(table: Iterable[Mapping[str, Any]], name: str, *, first: int = 0) -> Iterator[Row]:
    """Yield an iterable of dictionaries as rows that know their place in it, numbered from ``first``.

    Raises:
        DataError: for an item that is not a dictionary, and for something that cannot be iterated.
    """
    if not isinstance(table, Iterable):
        raise DataError(f"{name} must be rows, a path or a DatasetSource; it is {table!r}")
    table, images = undecoded(table)
    can_read_again = bool(images) and hasattr(table, "__len__")  # not a stream
    for number, values in enumerate(table, start=first):
        place = f"row {number} of {name}"
        if not isinstance(values, Mapping):
            raise DataError(
                f"{place} must be a mapping from column to value; it is a {type(values).__name__}{_way_out(table)}"
            )
        yield Row(place, left_in_table(values, table, number - first, images) if can_read_again else dict(values))


def _way_out(table: object) -> str:
    """Return advice for tables that iterate over their own column names."""
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # a pandas.DataFrame
        return f"; give a {type(table).__name__} as rows: data.to_dict('records')"
    if isinstance(table, Mapping) and any(isinstance(values, list | tuple) for values in table.values()):
        return "; give columns as rows: datasets.Dataset.from_dict(data)"
    if isinstance(table, Mapping):  # datasets.DatasetDict
        return f"; of several splits give one: data[{next(iter(table))!r}]"
    return ""


def split_by_hash(
    rows: Sequence[Row], column: str, *, fraction: float, seed: int
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the remaining rows and about ``fraction`` of the rows, chosen by a hash of ``column`` and ``seed``.

    Rows with equal values in the column stay together, so no held-out row is also trained on.
    """
    chosen: list[Row] = []
    rest: list[Row] = []
    for row in rows:
        text = json.dumps([seed, row.values[column]], sort_keys=True, default=str)
        place_in_unit = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        (chosen if place_in_unit < fraction else rest).append(row)
    return tuple(rest), tuple(chosen)


def use_good_rows(
    rows: tuple[Row, ...], use: Callable[[tuple[Row, ...]], Made], join: Callable[[Sequence[Made]], Made]
) -> Made:
    """Return ``use(rows)`` without the rows that it refuses, joined from the parts between them, and warn.

    Raises:
        NoUsableRowsError: if no row is left.
    """
    parts: list[Made] = []
    refused: list[_Refused] = []
    for part in _parts(rows, use):
        if isinstance(part, _Refused):
            refused.append(part)
        else:
            parts.append(part)
    bad = [part for part in refused if part.is_bad]
    if bad:
        rank_zero_warn(
            f"bad_rows='drop' left out {len(bad)} of {len(rows)} rows; the first error: {bad[0].error}{_others(bad)}"
        )
    if not parts:
        raise NoUsableRowsError(f"none of {len(rows)} rows can be used; the first error: {refused[0].error}")
    return parts[0] if len(parts) == 1 else join(parts)


def use_all_rows(rows: tuple[Row, ...], use: Callable[[tuple[Row, ...]], Made]) -> Made:
    """Return ``use(rows)``.

    Raises:
        DataError: for rows that it refuses. It names them, and how to leave them out if others can be used.
    """
    try:
        return use(rows)
    except NoUsableRowsError:
        raise
    except DataError as error:
        bad: list[_Refused] = []
        way_out = ""
        for part in _parts(rows, use):
            if not isinstance(part, _Refused):
                way_out = "; leave such rows out with bad_rows='drop'"
            elif part.is_bad:
                bad.append(part)
            if len(bad) > MAX_ROWS_NAMED:
                break
        if not bad:  # each row can be used without the others
            raise
        raise DataError(f"{bad[0].error}{way_out}{_others(bad)}") from error


@dataclass(frozen=True, slots=True)
class _Refused:
    """Rows that cannot be used."""

    rows: tuple[Row, ...]
    """One row with an error, or several that are left out because of another setting."""
    error: DataError

    @property
    def is_bad(self) -> bool:
        """Whether a row has an error."""
        return not isinstance(self.error, NoUsableRowsError)


def _parts(rows: tuple[Row, ...], use: Callable[[tuple[Row, ...]], Made]) -> Iterator[Made | _Refused]:
    """Yield ``use`` of the parts between the rows that it refuses, found by halving, and those rows."""
    try:
        made = use(rows)
    except DataError as error:
        if len(rows) == 1 or isinstance(error, NoUsableRowsError):
            yield _Refused(rows, error)
            return
    else:
        yield made
        return
    middle = len(rows) // 2
    yield from _parts(rows[:middle], use)
    yield from _parts(rows[middle:], use)


def _others(bad: Sequence[_Refused]) -> str:
    """Return a phrase that names the rows after the first one, as many as a message names; empty for one row."""
    places = [part.rows[0].place for part in bad[1:MAX_ROWS_NAMED]]
    more = " and others" if len(bad) > MAX_ROWS_NAMED else ""
    return f"; further rows with errors: {'; '.join(places)}{more}" if places else ""


def check_same_columns(row: Row, first: Row) -> None:
    """Raise DataError if a row lacks columns of the first row or adds some."""
    missing = sorted(map(repr, first.values.keys() - row.values.keys()))
    extra = sorted(map(repr, row.values.keys() - first.values.keys()))
    differences = [f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("adds", extra)) if names]
    if differences:
        raise DataError(
            f"{row.place} must have the same columns as {first.place}; it {' and '.join(differences)}, "
            f"write null where a row has no value"
        )


def _read_path(path: Path) -> Iterator[Row]:
    if os.path.isdir(path):  # False for a text that is too long for a name
        if not is_saved(path):
            raise DataError(
                f"{str(path)!r} is a folder that was not written by save_to_disk() of datasets; name one of its files, "
                f"or give DatasetSource({str(path)!r}, split='train') to let datasets read it"
            )
        return table_rows(DatasetSource(str(path)).open(), str(path))
    files = matching_files(path)
    if not files:
        raise DataError(
            f"no file at {str(path)!r}; give a JSONL file, one object a line, a Parquet file, rows as dictionaries, or "
            f"a data set of the Hugging Face hub as DatasetSource({str(path)!r}, split='train')"
        )
    return chain.from_iterable(map(_read_file, files))


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix != ".parquet":
        return _read_jsonl(path)
    # Tables of `datasets` leave images in the file.
    return table_rows(DatasetSource(str(path)).open() if has_image_columns(path) else parquet_rows(path), str(path))


def _read_jsonl(path: Path) -> Iterator[Row]:
    with _opened(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix("\ufeff")  # a byte order mark; in concatenated files it may begin any line
                if text.strip():
                    place = f"{path}, line {number}"
                    yield Row(place, _parsed(text, place, "" if number > 1 else _format_advice(path, text)))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} must be UTF-8 text, one JSON object a line; {error}") from error
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # of a compressed file
            raise DataError(f"{path} cannot be read: {error}; write it again") from error


def _opened(path: Path) -> IO[str]:
    """Open a file that may be compressed as text."""
    if path.suffix == ".zst":
        raise DataError(f"{path} is compressed with zstd; write it with gzip, or give DatasetSource({str(path)!r})")
    openers: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opened: IO[str] = openers.get(path.suffix, open)(path, mode="rt", encoding="utf-8")
    return opened


def _format_advice(path: Path, first_line: str) -> str:
    """Return advice for a file of another format that ``datasets`` reads."""
    suffix = data_suffix(path)
    is_array = suffix in (".json", ".jsonl") and first_line.lstrip().startswith("[")
    kind = "CSV" if suffix == ".csv" else "a JSON array" if is_array else None
    return "" if kind is None else f"; to read {kind}, give DatasetSource({str(path)!r})"


def _parsed(line: str, place: str, advice: str) -> Mapping[str, Any]:
    advice = advice or "; correct or remove the line, which bad_rows='drop' cannot leave out"
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is not JSON: {error.msg} at column {error.colno} of {_short(line)}{advice}"
        ) from error
    if not isinstance(values, dict):
        raise DataError(f'{place} must be a JSON object such as {{"prompt": "..."}}; it is {_short(line)}{advice}')
    return values


def _short(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
