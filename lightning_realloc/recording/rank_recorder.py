"""Write what a rank does to its file: it collects the activities of its flight record, and ends iterations."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

from lightning_realloc.recording.iteration_record import CallWaits, IterationRecord, WeightMove
from lightning_realloc.recording.pieces import divide_into_pieces
from lightning_realloc.remote_output import UploadedText
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.flight_record import Activity, FlightRecord

log = logging.getLogger(__name__)

RECORD_FOLDER = "record"
"""Name of the folder below a run's log."""
EVENTS_FILE, METRICS_FILE = "events.jsonl", "metrics.jsonl"


MIN_BREAK_S = 1e-3
"""Seconds between the latest time of a session and the next one, at least, so that their times differ."""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.jsonl"


class JsonLines:
    """File with one JSON object a line, which a reader may follow: every line is written at once.

    A line that cannot be written, as on a full disk, ends the file with a warning, and no run. A file in an object
    store is written once a minute, see `UploadedText`.

    Args:
        path: The file; lines are appended to an existing one.
    """

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._file: TextIO | UploadedText | None
        if isinstance(path, RemotePath):
            self._file = UploadedText(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, content: Mapping[str, Any]) -> None:
        """Append an object. Numbers that are not finite become NaN or Infinity, as Python reads them."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n")
            retried(self._file.flush, self._path)  # which goes on after the bytes that are written
        except OSError as error:
            log.warning("%s cannot be written (%s); this part of the record ends here", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # of content that could not be written
                self._file.close()
            self._file = None


class RecordClock:
    """Time of day of a record's first rank, which goes on from the latest time in it.

    A run may resume on a host whose clock is behind that of the one before. Readers tell sessions apart by time.

    Args:
        folder: Folder of the record.
        clock: Returns the time of day, in seconds since 1970.
    """

    def __init__(self, folder: AnyPath, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        latest = max(_latest_unix_s(folder / name) for name in (EVENTS_FILE, METRICS_FILE))
        self._ahead_s = max(0.0, latest + MIN_BREAK_S - clock())

    def now(self) -> float:
        """Return the time of day."""
        return self._clock() + self._ahead_s


def _latest_unix_s(path: AnyPath) -> float:
    """Return the latest time in a file of a record; minus infinity without one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except Exception:  # stores raise errors of any class; `UploadedText` reports it
        return -math.inf
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # broken lines, and events without a time
            return float(json.loads(line)["unix_s"])
    return -math.inf


class _BeforeValidation(NamedTuple):
    """State of an iteration when a validation begins."""

    moment: float
    num_activities: int
    moves: dict[str, WeightMove]
    peaks: dict[str, int]


class RankRecorder:
    """Collects the activities of a rank, and writes a line for every iteration.

    Args:
        path: File of the rank.
        record: The rank's flight record, whose activities are collected from now on.
        zero: Moment of `time.monotonic` that is 0 on the record's clock, the same on all ranks.
    """

    def __init__(self, path: AnyPath, record: FlightRecord, zero: float) -> None:
        self._lines, self._record, self._zero = JsonLines(path), record, zero
        self._activities: list[Activity] = []
        self._moves: dict[str, WeightMove] = {}
        self._peaks: dict[str, int] = {}
        self._before: _BeforeValidation | None = None
        """None outside of a validation."""
        self._began_at = time.monotonic()
        record.listener = self._activities.append

    def write_header(self, **fields: Any) -> None:
        """Write facts about the rank that hold from here on."""
        self._lines.write({"rank": fields})

    def record_move(self, call: str, move: WeightMove) -> None:
        """Record a move of weights that has just ended; its name in the pieces is that of a predicted move."""
        self._moves[call] = move
        self._record.insert(f"-> {call}", move.seconds, kind="move")

    def record_peak(self, call: str, peak_bytes: int) -> None:
        """Record the peak memory of a call."""
        self._peaks[call] = max(peak_bytes, self._peaks.get(call, 0))

    def begin_validation(self) -> None:
        """Leave what happens from now on out of the next iteration."""
        self._before = _BeforeValidation(time.monotonic(), len(self._activities), self._moves, self._peaks)
        self._moves, self._peaks = {}, {}

    def end_validation(self) -> float:
        """Continue the next iteration, and return the validation's seconds.

        What the iteration had before, such as a save, moves to the validation's end, so that its time has no gap.
        """
        before = self._before
        assert before is not None, "begin_validation comes first"
        seconds = time.monotonic() - before.moment
        kept = [replace(one, began_at=one.began_at + seconds) for one in self._activities[: before.num_activities]]
        self._activities[:] = kept
        self._moves, self._peaks, self._before = before.moves, before.peaks, None
        self._began_at += seconds
        return seconds

    def end_iteration(self, step: int, *, is_detailed: bool, energy_j: float | None = None) -> IterationRecord:
        """Write the line of an iteration, from the end of the one before until now, and return its record."""
        now = time.monotonic()
        pieces = divide_into_pieces(self._activities, self._began_at, now, zero=self._zero)
        record = IterationRecord.from_pieces(
            step,
            pieces,
            is_detailed=is_detailed,
            moves=self._moves,
            peak_bytes=self._peaks,
            energy_j=energy_j,
            waiting=tuple(self._waiting()) if is_detailed else (),
        )
        self._lines.write(record.to_json())
        self._began_at, self._moves, self._peaks = now, {}, {}
        self._activities.clear()
        return record

    def _waiting(self) -> Iterator[CallWaits]:
        for one in self._activities:
            if one.environment_waits is not None:
                yield CallWaits(one.name, one.environment_waits.shifted(one.began_at - self._zero).samples)

    def close(self) -> None:
        """Stop collecting."""
        self._record.listener = None
        self._lines.close()
