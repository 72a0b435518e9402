"""Read the record of a run, also while it is written: broken lines and files are named, and the rest is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_realloc.errors import ReallocError
from lightning_realloc.recording.events import Event, RunEnded, RunStarted, event_from_json
from lightning_realloc.recording.followed_file import FollowedFile
from lightning_realloc.recording.iteration_record import FORMAT, IterationRecord
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, METRICS_FILE, rank_file


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics that were logged in an iteration."""

    step: int
    """Iterations of the run, this one included."""
    unix_s: float
    """Time of day, in seconds since 1970."""
    values: Mapping[str, float]
    """Name -> value; those of held-out samples begin with ``val/`` or ``eval/``."""


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
    """Return the record in a folder. Raises RecordError as `RunReader.read` does."""
    return RunReader(folder).read()


class RunReader:
    """Reads the record in a folder, and later what has been added.

    Args:
        folder: Folder of the record.
        reads_ranks: Whether to read what every rank did, which is most of a record.
    """

    def __init__(self, folder: Path, *, reads_ranks: bool = True) -> None:
        self.folder = folder
        """Folder of the record."""
        self._reads_ranks = reads_ranks
        self._events = FollowedFile(folder / EVENTS_FILE, event_from_json)
        self._metrics = FollowedFile(folder / METRICS_FILE, _metrics_row)
        self._ranks: dict[int, FollowedFile[IterationRecord | RankHeader]] = {}

    def read(self) -> RunRecord:
        """Return the record as it is now.

        Raises:
            RecordError: if there is none, or it has another version.
        """
        if not (self.folder / EVENTS_FILE).is_file():
            raise RecordError(
                f"{self.folder} has no record of a run: {EVENTS_FILE} is missing; train with callbacks=[Timeline()], "
                f"or name the folder of a run that did"
            )
        self._events.update()
        fits = self._fits()
        self._metrics.update()
        for rank in range(max(len(started.devices) for started, _ in fits) if self._reads_ranks else 0):
            followed = self._ranks.setdefault(rank, FollowedFile(self.folder / rank_file(rank), _rank_line))
            followed.update()
        files: tuple[FollowedFile[Any], ...] = (self._events, self._metrics, *self._ranks.values())
        problems = [file.problem for file in files]
        if any(isinstance(event, RunEnded) for event in fits[-1][1]):  # else the last line may still be written
            problems += [file.cut for file in files]
        return RunRecord(self.folder, tuple(self._sessions(fits)), tuple(filter(None, problems)))

    def _fits(self) -> list[tuple[RunStarted, list[Event]]]:
        """Return the start and the other events of every fit, from the latest one that began at step 0."""
        fits: list[tuple[RunStarted, list[Event]]] = []
        for event in self._events.items:
            if isinstance(event, RunStarted):
                fits = [*(fits if event.step else ()), (event, [])]  # a run from the start replaces an earlier one
            elif event is not None and fits:
                fits[-1][1].append(event)
        if not fits:
            problem = self._events.problem or self._events.cut or "it is empty"
            raise RecordError(f"{self.folder / EVENTS_FILE} tells of no start of a run; {problem}")
        newest = max(started.format for started, _ in fits)
        if newest > FORMAT:
            raise RecordError(
                f"{self.folder} was written in version {newest} of the record, and this release reads versions up to "
                f"{FORMAT}; install a newer lightning-realloc"
            )
        return fits

    def _sessions(self, fits: Sequence[tuple[RunStarted, list[Event]]]) -> Iterator[Session]:
        """Yield the sessions, without iterations that the next one repeats."""
        files = {rank: _rank_sessions(file.items) for rank, file in self._ranks.items()}
        for (started, events), after in zip(fits, [*(start for start, _ in fits[1:]), None], strict=True):
            last_step, end_s = (math.inf, math.inf) if after is None else (after.step, after.unix_s)
            mine = {rank: found[started.unix_s] for rank, found in files.items() if started.unix_s in found}
            rows = (row for row in self._metrics.items if started.unix_s <= row.unix_s < end_s)
            yield Session(
                started=started,
                events=tuple(events),
                metrics=tuple(row for row in rows if row.step <= last_step),
                ranks={
                    rank: tuple(one for one in iterations if one.step <= last_step)
                    for rank, (_, iterations) in mine.items()
                },
                baseline_bytes={rank: size for rank, (size, _) in mine.items() if size is not None},
            )


class RankHeader(NamedTuple):
    """Beginning of a session in a rank's file."""

    unix_s: float
    """Time of day at which the session began, on rank 0."""
    baseline_bytes: int | None
    """Memory of the rank before its models; None where it is unknown."""


def _rank_sessions(
    lines: Sequence[IterationRecord | RankHeader],
) -> dict[float, tuple[int | None, list[IterationRecord]]]:
    """Return the baseline bytes and the iterations of a rank's sessions, by the time of day at which they began."""
    found: dict[float, tuple[int | None, list[IterationRecord]]] = {}
    current: list[IterationRecord] = []
    for line in lines:
        if isinstance(line, IterationRecord):
            current.append(line)
        else:
            current = []
            found[line.unix_s] = line.baseline_bytes, current
    return found


def _metrics_row(content: Mapping[str, Any]) -> MetricsRow:
    values = {str(name): float(value) for name, value in content["metrics"].items()}
    return MetricsRow(int(content["step"]), float(content["unix_s"]), values)


def _rank_line(content: Mapping[str, Any]) -> IterationRecord | RankHeader:
    """Return an iteration, or the beginning of a session."""
    if "rank" not in content:
        return IterationRecord.from_json(content)
    header = content["rank"]
    baseline_bytes = header.get("baseline_bytes")
    return RankHeader(float(header["unix_s"]), None if baseline_bytes is None else int(baseline_bytes))
