"""Read a run's folder for its report: the record of `Timeline`, Lightning's CSV files and the configuration.

Whatever cannot be read is named among the problems, and the rest is kept.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_realloc.errors import ConfigError, counted
from lightning_realloc.recording.evaluations import SCORES_FILE, EvaluationRecord
from lightning_realloc.recording.events import RunEnded
from lightning_realloc.recording.followed_file import FollowedFile
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, RECORD_FOLDER
from lightning_realloc.recording.reader import RecordError, RunReader, RunRecord
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.report.runs.conversations import CONVERSATIONS_FILE, read_conversations
from lightning_realloc.report.runs.rank_time import RankTime, RankTimeBuilder
from lightning_realloc.report.runs.series import Series, collect_series
from lightning_realloc.report.runs.thumbnails import IMAGES_COLUMN, IMAGES_FOLDER, read_thumbnails

METRICS_TABLE, ROLLOUTS_TABLE, CONFIG_FILE = "metrics.csv", "rollouts.csv", "config.yaml"
MAX_CELL_CHARACTERS = 2000
"""Longest cell of a rollout; longer ones are cut."""
MAX_ROLLOUTS = 2000
"""Samples of a report, the newest; more make a larger page."""
MAX_ROLLOUT_CHARACTERS = 3_000_000
"""Characters of all samples of a report; more make a larger page."""
MAX_EVALUATIONS = 50
"""Validations and tests on different loaders whose scores are shown; each takes a bootstrap."""
MAX_CONFIG_BYTES = 1 << 20
"""Largest configuration that is read; parsing YAML of this size takes seconds."""
BROKEN_CONTENT = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError)
"""Errors of code that meets values in the record of other types than they were written with."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples that `RolloutTable` wrote, the newest first."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    num_left_out: int = 0
    """Older samples that were left out."""
    thumbnails: Mapping[str, str] = field(default_factory=dict)
    """Name in a cell of the column with images -> address of data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Everything that a report shows of a run."""

    name: str
    """The folder as it was asked for."""
    log_folder: AnyPath
    """Folder of Lightning's logger, or of the record where there is none."""
    record: RunRecord | None
    """None if the run was not recorded."""
    time: RankTime | None = None
    """Times of its ranks; None if the run was not recorded."""
    metrics: Mapping[str, Series]
    """Name -> values over iterations."""
    evaluations: Mapping[str, EvaluationRecord] = field(default_factory=dict)
    """Beginning of metrics' names, such as ``val`` and ``test`` -> its latest evaluation."""
    rollouts: Rollouts = Rollouts()
    conversations: tuple[dict[str, Any], ...] = ()
    """Conversations of these samples, as `shown_conversation` returns them, the newest first."""
    config: Mapping[str, Any] | None = None
    """Settings of the run; None where it left none."""
    problems: tuple[str, ...] = field(default=())
    """Files and lines that could not be read, in words."""


def read_run_folder(folder: Path) -> RunFolder:
    """Return the newest run in a folder. Raises ConfigError as `RunFolderReader.read` does."""
    return RunFolderReader(folder).read()


def find_runs(folder: Path) -> dict[str, Path]:
    """Return name -> folder of all runs in a folder or below: of records, and of tables and scores without one.

    Names are paths from the folder that was asked for.

    Raises:
        ConfigError: if it is no folder, or holds no run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give one that holds the outputs of runs")
    found: list[Path] = []
    for name in (EVENTS_FILE, METRICS_TABLE, SCORES_FILE):
        for file in _newest_first(folder, name):
            if file.parent not in found and file.parent / RECORD_FOLDER not in found:
                found.append(file.parent)
    if not found:
        raise ConfigError(f"{folder} holds no run: no record, no {METRICS_TABLE} and no {SCORES_FILE} in it or below")
    places = [one.parent if one.name == RECORD_FOLDER and one != folder else one for one in found]
    return {
        folder.name if place == folder else str(place.relative_to(folder)): path
        for place, path in zip(places, found, strict=True)
    }


class RunFolderReader:
    """Reads the newest run in a folder or below it, and later its new iterations.

    Args:
        folder: Folder of the run.
        is_brief: Whether to leave out samples and what every rank did, which are most of a run's files.
    """

    def __init__(self, folder: Path, *, is_brief: bool = False) -> None:
        self._folder, self._is_brief = folder, is_brief
        self._reader = RunReader(folder, reads_ranks=not is_brief)
        self._scores: tuple[Path, FollowedFile[EvaluationRecord]] | None = None
        """Folder with scores, and the file."""
        self._times = RankTimeBuilder()

    def read(self) -> RunFolder:
        """Return the run as its files are now.

        Raises:
            ConfigError: if there is no record, no Lightning's ``metrics.csv`` and no scores.
        """
        record_folder, log_folder, scores_folder = _find_run(self._folder)
        problems: list[str] = []
        record = None if record_folder is None else self._read_record(record_folder, problems)
        metrics: Mapping[str, Series] = {}
        if record is not None:
            problems += record.problems
            rows = ((row.step, row.values) for session in record.sessions for row in session.metrics)
            metrics = collect_series(rows)
        if not metrics:
            metrics = collect_series(_metric_rows(log_folder / METRICS_TABLE, problems))
        return RunFolder(
            name=str(self._folder),
            log_folder=log_folder,
            record=record,
            time=None if record is None or self._is_brief else self._read_times(record, problems),
            metrics=metrics,
            evaluations=self._read_scores(scores_folder, record, problems),
            rollouts=Rollouts() if self._is_brief else _read_rollouts(log_folder / ROLLOUTS_TABLE, problems),
            conversations=() if self._is_brief else read_conversations(log_folder / CONVERSATIONS_FILE, problems),
            config=_read_config(log_folder / CONFIG_FILE, problems),
            problems=tuple(problems),
        )

    def _read_record(self, folder: Path, problems: list[str]) -> RunRecord | None:
        if folder != self._reader.folder:
            self._reader = RunReader(folder, reads_ranks=not self._is_brief)
        try:
            return self._reader.read()
        except (RecordError, RecursionError) as error:
            problems.append(str(error))
            return None

    def _read_scores(self, folder: Path, record: RunRecord | None, problems: list[str]) -> dict[str, EvaluationRecord]:
        """Return the latest evaluations, without those of an earlier run in the same folder."""
        if not (folder / SCORES_FILE).is_file():
            return {}
        if self._scores is None or self._scores[0] != folder:
            self._scores = folder, FollowedFile(folder / SCORES_FILE, EvaluationRecord.from_json)
        followed = self._scores[1]
        followed.update()
        is_open = record is not None and not any(isinstance(event, RunEnded) for event in record.last.events)
        problems += filter(None, [followed.problem, None if is_open else followed.cut])
        begin_s = -math.inf if record is None else record.sessions[0].started.unix_s
        found = {one.name: one for one in followed.items if one.unix_s >= begin_s}
        return dict(list(found.items())[:MAX_EVALUATIONS])

    def _read_times(self, record: RunRecord, problems: list[str]) -> RankTime | None:
        try:
            return self._times.update(record)
        except BROKEN_CONTENT as error:
            problems.append(f"the times of the record cannot be used: {type(error).__name__}: {error}")
            return None


def _find_run(folder: Path) -> tuple[Path | None, Path, Path]:
    """Return the folder of the newest record, None if there is none, and the folders of the log and of scores."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the --output of a run, or a folder of its log")
    if records := _newest_first(folder, EVENTS_FILE):
        record = records[0].parent
        places = (record.parent, record)
        return record, next((one for one in places if (one / METRICS_TABLE).is_file()), record), record
    if tables := _newest_first(folder, METRICS_TABLE):
        return None, tables[0].parent, tables[0].parent / RECORD_FOLDER
    if scores := _newest_first(folder, SCORES_FILE):  # of a validation or test without a logger
        return None, scores[0].parent, scores[0].parent
    raise ConfigError(
        f"{folder} has neither a record nor {METRICS_TABLE} in it or below; train with callbacks=[Timeline()], or name "
        f"the folder of a run that did"
    )


def _newest_first(folder: Path, name: str) -> list[Path]:
    return sorted((one for one in folder.rglob(name) if one.is_file()), key=lambda one: -one.stat().st_mtime)


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """Read cells longer than 128 KiB, at which the csv module stops."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, problems: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the header and the cells of each row; one with another number of cells is left out."""
    if not path.is_file():
        return
    num_broken = 0
    try:
        with _cells_of_any_length(), path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            for cells in lines:
                if len(cells) == len(header):
                    yield header, cells
                else:
                    num_broken += 1
    except (OSError, csv.Error) as error:
        problems.append(f"{path.name} cannot be read to its end: {error}")
    if num_broken:
        rows, left = counted(num_broken, "row"), "it is" if num_broken == 1 else "they are"
        problems.append(f"{path.name} has {rows} of another length than its header; {left} left out")


def _metric_rows(path: Path, problems: list[str]) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the step and the numbers of each row of Lightning's table."""
    for header, cells in _csv_rows(path, problems):
        values = {
            name: number for name, text in zip(header, cells, strict=True) if (number := as_number(text)) is not None
        }
        step = values.pop("step", None)
        values.pop("epoch", None)
        if step is not None and math.isfinite(step):
            yield step, values


def as_number(text: str) -> float | None:
    """Return the number that a cell holds, None for any other text."""
    try:
        return float(text)
    except ValueError:
        return None


def _read_rollouts(path: Path, problems: list[str]) -> Rollouts:
    rows: deque[tuple[str, ...]] = deque(maxlen=MAX_ROLLOUTS)
    columns: Sequence[str] = ()
    num_rows = 0
    for header, cells in _csv_rows(path, problems):
        columns = header
        rows.append(tuple(_cut(text) for text in cells))
        num_rows += 1
    kept: list[tuple[str, ...]] = []
    room = MAX_ROLLOUT_CHARACTERS
    for row in reversed(rows):
        room -= sum(map(len, row))
        if room < 0:
            break
        kept.append(row)
    at = columns.index(IMAGES_COLUMN) if IMAGES_COLUMN in columns else None
    of_images = [] if at is None else [row[at] for row in kept]
    thumbnails = read_thumbnails(path.parent / IMAGES_FOLDER, of_images, problems)
    return Rollouts(tuple(_cut(name) for name in columns), tuple(kept), num_rows - len(kept), thumbnails)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[:MAX_CELL_CHARACTERS]}… ({len(text):,} characters)"


def _read_config(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            problems.append(f"{path.name} is larger than {MAX_CONFIG_BYTES >> 20} MiB; it is left out")
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # they can multiply without end
            problems.append(f"{path.name} has aliases, which Lightning does not write; it is left out")
            return None
        content = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}")
        return None
    return content if isinstance(content, dict) else None
