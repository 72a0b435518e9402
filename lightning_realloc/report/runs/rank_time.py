"""Arrays over ranks and iterations from a run's record: seconds by purpose, moved bytes, peak memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_realloc.recording.events import PlanInstalled, PlanPredicted
from lightning_realloc.recording.iteration_record import IterationRecord
from lightning_realloc.recording.pieces import HOST, WAITING
from lightning_realloc.recording.reader import RunRecord, Session
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

    @classmethod
    def from_record(cls, record: RunRecord) -> RankTime:
        """Return the arrays of a record."""
        ranks = sorted({rank for session in record.sessions for rank in session.ranks})
        steps = sorted({one.step for _, one in _iterations(record.sessions)})
        place = {step: at for at, step in enumerate(steps)}
        row = {rank: at for at, rank in enumerate(ranks)}
        arrays = _Arrays(len(ranks), len(steps))
        for rank, iteration in _iterations(record.sessions):
            arrays.add(row[rank], place[iteration.step], iteration)
        return cls(
            ranks=tuple(ranks),
            steps=np.array(steps, dtype=np.float64),
            whole=arrays.whole,
            seconds=arrays.seconds,
            moves=arrays.moves,
            peak_bytes=arrays.peak_bytes,
        )

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


class _Arrays:
    """Arrays that are filled iteration by iteration."""

    def __init__(self, num_ranks: int, num_iterations: int) -> None:
        self._shape = (num_ranks, num_iterations)
        self.whole = np.full(self._shape, np.nan)
        self.seconds: dict[Purpose, Values] = {}
        self.moves: dict[str, Values] = {}
        self.peak_bytes: dict[str, Values] = {}

    def add(self, row: int, column: int, iteration: IterationRecord) -> None:
        """Add one iteration of one rank."""
        self.whole[row, column] = iteration.end - iteration.start
        for kind, named in iteration.seconds.items():
            for name, seconds in named.items():
                purpose = purpose_of(kind, name)
                if purpose not in self.seconds:
                    self.seconds[purpose] = np.zeros(self._shape)
                self.seconds[purpose][row, column] += seconds
        for call, move in iteration.moves.items():
            if call not in self.moves:
                self.moves[call] = np.full((3, self._shape[1]), np.nan)
            values = self.moves[call]
            values[:, column] = np.fmax(values[:, column], move)
        for call, size in iteration.peak_bytes.items():
            if call not in self.peak_bytes:
                self.peak_bytes[call] = np.full(self._shape[0], np.nan)
            peaks = self.peak_bytes[call]
            peaks[row] = np.fmax(peaks[row], size)


def purpose_of(kind: str, name: str) -> Purpose:
    """Return the purpose that a piece counts for: calls and moves by name, other kinds as a whole."""
    if kind in ("call", "move"):
        return kind, name
    return kind, {"wait": WAITING, "host": HOST}.get(kind, kind)


def _iterations(sessions: Sequence[Session]) -> Iterator[tuple[int, IterationRecord]]:
    for session in sessions:
        for rank, iterations in session.ranks.items():
            for iteration in iterations:
                yield rank, iteration


@dataclass(frozen=True, slots=True)
class PlanPeriod:
    """Iterations under one plan, in one session."""

    session: Session = field(repr=False)
    installed: PlanInstalled
    predicted: PlanPredicted | None
    """Prediction for this plan; None if there is none."""
    end: float
    """Last step under the plan."""


def plan_periods(record: RunRecord) -> list[PlanPeriod]:
    """Return the plans in use, in order."""
    periods = []
    ends = [*(session.started.step for session in record.sessions[1:]), float("inf")]
    for session, session_end in zip(record.sessions, ends, strict=True):
        installed = [event for event in session.events if isinstance(event, PlanInstalled)]
        predicted = [event for event in session.events if isinstance(event, PlanPredicted)]
        plan_ends = [*(float(event.step) for event in installed[1:]), session_end] if installed else []
        for event, end in zip(installed, plan_ends, strict=True):
            found = next((one for one in predicted if event.step < one.step <= end), None)
            periods.append(PlanPeriod(session, event, found, end))
    return periods
