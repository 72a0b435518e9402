"""Arrays over ranks and iterations from a run's record: seconds by purpose, moved bytes, peak memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.recording.iteration_record import IterationRecord
from lightning_realloc.recording.pieces import ENVIRONMENTS, HOST, WAITING
from lightning_realloc.recording.reader import RunRecord
from lightning_realloc.report.runs.series import Values

WARM_UP = 2
"""Iterations at the start of a run that means leave out: they compile, allocate and measure."""

Purpose = tuple[str, str]
"""Kind of a piece, and its name."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """Time of all ranks; in a run that continued from a checkpoint, of all its sessions."""

    ranks: tuple[int, ...]
    steps: Values
    """Shape [I]."""
    whole: Values = field(repr=False)
    """Seconds of an iteration; shape [R, I], NaN where a rank recorded none."""
    seconds: Mapping[Purpose, Values] = field(repr=False)
    """Purpose -> seconds; shape [R, I]."""
    moves: Mapping[str, Values] = field(repr=False)
    """Call -> seconds on the slowest rank, moved bytes and least bytes of its moves; shape [3, I], NaN without one."""
    peak_bytes: Mapping[str, Values] = field(repr=False)
    """Call -> largest peak of each rank; shape [R], NaN where it is unknown."""

    @property
    def settled(self) -> slice:
        """Iterations after the warm-up; all of a run of a few iterations."""
        return slice(WARM_UP if len(self.steps) > 2 * WARM_UP else 0, None)

    @property
    def waiting(self) -> Values:
        """Seconds of waiting; shape [R, I]."""
        return self.seconds.get(("wait", WAITING), np.zeros_like(self.whole))

    @property
    def idle_share(self) -> Values:
        """Fraction of each iteration in which a rank waits; shape [R, I], NaN where it recorded none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.whole > 0, self.waiting / self.whole, np.nan)

    def between(self, begin: float, end: float) -> slice:
        """Return the iterations with steps above ``begin`` and at most ``end``."""
        return slice(*(int(np.searchsorted(self.steps, limit, side="right")) for limit in (begin, end)))

    def slowest(self, purpose: Purpose, part: slice) -> float:
        """Return the median seconds on the slowest rank of the iterations with this purpose; NaN without any."""
        seconds = self.seconds[purpose][:, part]
        slowest = seconds.max(axis=0, initial=0.0)
        slowest = slowest[slowest > 0]
        return float(np.median(slowest)) if len(slowest) else float("nan")

    def iteration_seconds(self, part: slice) -> float:
        """Return the median seconds of an iteration, on its slowest rank; NaN without any."""
        whole = self.whole[:, part]
        known = whole[:, np.isfinite(whole).any(axis=0)]
        return float(np.median(np.nanmax(known, axis=0))) if known.size else float("nan")


class RankTimeBuilder:
    """Builds the arrays of a record that grows: an update adds only the iterations that are new.

    A record that does not continue the one before is added anew, such as that of a run that repeats iterations after a
    resume. Iterations count as added before if they are the same objects, as `RunReader` returns them.
    """

    def __init__(self) -> None:
        self._added: Mapping[tuple[int, int], Sequence[IterationRecord]] = {}
        """Number of a session and rank -> iterations that the arrays have."""
        self._arrays = _Arrays(())

    def update(self, record: RunRecord) -> RankTime:
        """Return the arrays of a record. Later updates do not change them."""
        found = {
            (number, rank): iterations
            for number, session in enumerate(record.sessions)
            for rank, iterations in session.ranks.items()
        }
        before, self._added = self._added, {}  # after an error, the next update begins anew
        if found.keys() != before.keys() or not all(_continues(before[key], found[key]) for key in found):
            before = dict.fromkeys(found, ())
            self._arrays = _Arrays(sorted({rank for _, rank in found}))
        for key, iterations in found.items():
            for iteration in iterations[len(before[key]) :]:
                self._arrays.add(key[1], iteration)
        self._added = found
        return self._arrays.in_order()


def _continues(before: Sequence[IterationRecord], after: Sequence[IterationRecord]) -> bool:
    """Return whether the iterations begin with those before."""
    return len(before) <= len(after) and (not before or after[len(before) - 1] is before[-1])


class _Arrays:
    """Arrays that are filled iteration by iteration, with the steps in the order in which they come."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._rows = {rank: row for row, rank in enumerate(ranks)}
        self._columns: dict[int, int] = {}
        """Step -> its column."""
        self._whole = _WideningArray(len(ranks), np.nan)
        self._seconds: dict[Purpose, _WideningArray] = {}
        self._moves: dict[str, _WideningArray] = {}
        self._peak_bytes: dict[str, Values] = {}

    def add(self, rank: int, iteration: IterationRecord) -> None:
        """Add one iteration of one rank."""
        row, column = self._rows[rank], self._columns.setdefault(iteration.step, len(self._columns))
        self._whole.up_to(column)[row, column] = iteration.end - iteration.start
        for kind, named in iteration.seconds.items():
            for name, seconds in named.items():
                purpose = purpose_of(kind, name)
                if purpose not in self._seconds:
                    self._seconds[purpose] = _WideningArray(len(self._rows), 0.0)
                self._seconds[purpose].up_to(column)[row, column] += seconds
        for call, move in iteration.moves.items():
            if call not in self._moves:
                self._moves[call] = _WideningArray(len(move), np.nan)
            values = self._moves[call].up_to(column)
            values[:, column] = np.fmax(values[:, column], move)
        for call, size in iteration.peak_bytes.items():
            if call not in self._peak_bytes:
                self._peak_bytes[call] = np.full(len(self._rows), np.nan)
            peaks = self._peak_bytes[call]
            peaks[row] = np.fmax(peaks[row], size)

    def in_order(self) -> RankTime:
        """Return copies of the arrays, with ascending steps."""
        steps = np.array(list(self._columns), dtype=np.float64)
        order = steps.argsort()
        return RankTime(
            ranks=tuple(self._rows),
            steps=steps[order],
            whole=self._whole.columns(order),
            seconds={purpose: array.columns(order) for purpose, array in self._seconds.items()},
            moves={call: array.columns(order) for call, array in self._moves.items()},
            peak_bytes={call: peaks.copy() for call, peaks in self._peak_bytes.items()},
        )


class _WideningArray:
    """Array that gets further columns, which hold one value at first."""

    def __init__(self, num_rows: int, fill: float) -> None:
        self._values = np.full((num_rows, 16), fill)
        self._fill = fill

    def up_to(self, column: int) -> Values:
        """Return the array with this column, to be changed in place; valid until the next call."""
        num_rows, num_columns = self._values.shape
        if column >= num_columns:
            added = max(num_columns, column + 1 - num_columns)  # twice as wide, so that few copies are made
            self._values = np.concatenate((self._values, np.full((num_rows, added), self._fill)), axis=1)
        return self._values

    def columns(self, order: NDArray[np.int64]) -> Values:
        """Return a copy of these columns."""
        return self.up_to(len(order) - 1)[:, order]


def purpose_of(kind: str, name: str) -> Purpose:
    """Return the purpose that a piece counts for: calls and moves by name, other kinds as a whole."""
    if kind in ("call", "move"):
        return kind, name
    return kind, {"wait": WAITING, "environment": ENVIRONMENTS, "host": HOST}.get(kind, kind)
