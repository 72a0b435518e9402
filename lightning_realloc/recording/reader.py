"""Read the record of a run, also while it is written: broken lines and files are named, and the rest is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from lightning_realloc.errors import ReallocError
from lightning_realloc.recording.events import Event, RunStarted, event_from_json
from lightning_realloc.recording.iteration_record import FORMAT, IterationRecord
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, METRICS_FILE, rank_file

T = TypeVar("T")
MAX_LINE_BYTES = 4 << 20
"""Longest line that is read; a longer one is counted as broken."""


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics that were logged in an iteration."""

    step: int
    """Iterations of the run, this one included."""
    unix_s: float
    """Time of day, in seconds since 1970."""
    values: Mapping[str, float]
    """Name -> value; those of held-out samples begin with ``val/``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One fit of a run: the first, or one that continued from a checkpoint."""

    started: RunStarted
    events: tuple[Event, ...] = ()
    """Events after the start, in order."""
    metrics: tuple[MetricsRow, ...] = ()
    ranks: Mapping[int, tuple[IterationRecord, ...]] = field(default_factory=dict, repr=False)
    """Rank -> its iterations."""
    baseline_bytes: Mapping[int, int] = field(default_factory=dict)
    """Rank -> memory before the models were built, where it is known: predictions leave it out."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a run."""

    folder: Path
    sessions: tuple[Session, ...]
    """In order, the first from step 0 if that is recorded; iterations that a later one repeated are left out."""
    problems: tuple[str, ...] = ()
    """Lines and files that could not be read, in words."""

    @property
    def last(self) -> Session:
        """The latest session."""
        return self.sessions[-1]


class RecordError(ReallocError):
    """A folder has no record that can be read."""


def read_run(folder: Path) -> RunRecord:
    """Return the record in a folder.

    Raises:
        RecordError: if there is none, or it has another version.
    """
    problems: list[str] = []
    if not (folder / EVENTS_FILE).is_file():
        raise RecordError(
            f"{folder} has no record of a run: {EVENTS_FILE} is missing; train with callbacks=[Timeline()], or name "
            f"the folder of a run that did"
        )
    fits: list[tuple[RunStarted, list[Event]]] = []
    for event in _parsed(folder / EVENTS_FILE, event_from_json, problems):
        if isinstance(event, RunStarted):
            fits = [*(fits if event.step else ()), (event, [])]  # a run from the start replaces an earlier one
        elif event is not None and fits:
            fits[-1][1].append(event)
    if not fits:
        raise RecordError(f"{folder / EVENTS_FILE} tells of no start of a run; {'; '.join(problems) or 'it is empty'}")
    newest = max(started.format for started, _ in fits)
    if newest > FORMAT:
        raise RecordError(
            f"{folder} was written in version {newest} of the record, and this release reads versions up to {FORMAT}; "
            f"install a newer lightning-realloc"
        )
    return RunRecord(folder, tuple(_sessions(folder, fits, problems)), tuple(problems))


def _sessions(folder: Path, fits: Sequence[tuple[RunStarted, list[Event]]], problems: list[str]) -> Iterator[Session]:
    """Yield the sessions, without iterations that the next one repeats."""
    metrics = list(_parsed(folder / METRICS_FILE, _metrics_row, problems))
    num_ranks = max(len(started.devices) for started, _ in fits)
    files = {rank: _rank_sessions(folder, rank, problems) for rank in range(num_ranks)}
    for (started, events), after in zip(fits, [*(start for start, _ in fits[1:]), None], strict=True):
        last_step, end_s = (math.inf, math.inf) if after is None else (after.step, after.unix_s)
        mine = {rank: found[started.unix_s] for rank, found in files.items() if started.unix_s in found}
        yield Session(
            started=started,
            events=tuple(events),
            metrics=tuple(row for row in metrics if started.unix_s <= row.unix_s < end_s and row.step <= last_step),
            ranks={
                rank: tuple(one for one in one_rank.iterations if one.step <= last_step)
                for rank, one_rank in mine.items()
            },
            baseline_bytes={rank: one.baseline_bytes for rank, one in mine.items() if one.baseline_bytes is not None},
        )


class _RankSession(NamedTuple):
    """What a rank recorded in a session."""

    baseline_bytes: int | None
    iterations: list[IterationRecord]


def _rank_sessions(folder: Path, rank: int, problems: list[str]) -> dict[float, _RankSession]:
    """Return the sessions of a rank's file, by the time of day at which they began."""
    found: dict[float, _RankSession] = {}
    current = _RankSession(None, [])
    for line in _parsed(folder / rank_file(rank), _rank_line, problems):
        if isinstance(line, IterationRecord):
            current.iterations.append(line)
        else:
            unix_s, baseline_bytes = line
            current = found[unix_s] = _RankSession(baseline_bytes, [])
    return found


def _metrics_row(content: Mapping[str, Any]) -> MetricsRow:
    values = {str(name): float(value) for name, value in content["metrics"].items()}
    return MetricsRow(int(content["step"]), float(content["unix_s"]), values)


def _rank_line(content: Mapping[str, Any]) -> IterationRecord | tuple[float, int | None]:
    """Return an iteration, or the beginning of a session with the rank's memory before its models."""
    if "rank" not in content:
        return IterationRecord.from_json(content)
    header = content["rank"]
    return float(header["unix_s"]), header.get("baseline_bytes")


def _parsed(path: Path, parse: Callable[[Mapping[str, Any]], T], problems: list[str]) -> Iterator[T]:
    """Yield the content of a file's lines."""
    try:
        with path.open("rb") as file:
            broken: list[int] = []
            for number, line in enumerate(_complete_lines(file), 1):
                try:
                    yield parse(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                    broken.append(number)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return
    if broken:
        problems.append(f"{path.name} has {len(broken)} broken lines, the first is line {broken[0]}; they are left out")


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines; one that is too long is empty, and one without an end is still being written."""
    is_long = False
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield b"" if is_long else line
        is_long = not line.endswith(b"\n")
