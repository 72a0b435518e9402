"""One iteration of one rank: seconds by purpose, moved bytes, peak memory, and its pieces; as a line of JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_realloc.recording.pieces import PieceKind, TimePiece, seconds_by_name, total_seconds
from lightning_realloc.runtime.messages.environment_waits import WaitingOverTime

FORMAT = 1
"""Version of the files of a record; a reader refuses larger ones."""
DETAILED_AT_START = 20
"""Iterations at the start of a run whose pieces are written."""
DETAIL_INTERVAL = 5
"""Later iterations up to the 100th whose pieces are written: every fifth; ten times as rarely in each further power of
ten, so that files of long runs stay small. The seconds by purpose are written for every iteration."""
_DIGITS = 6
"""Decimals of written seconds: microseconds."""


class WeightMove(NamedTuple):
    """A move of weights before a call."""

    seconds: float
    """Seconds on this rank."""
    bytes_moved: int
    """Transferred bytes over all ranks."""
    bytes_minimum: int
    """Bytes that ranks needed and did not hold, over all ranks."""


class CallWaits(NamedTuple):
    """Samples of a generating call that waited for their environments."""

    call: str
    samples: WaitingOverTime
    """Times on the clock of the run's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One iteration of one rank."""

    step: int
    """Iterations of the run so far, this one included."""
    start: float
    """Start in seconds, on the clock of the run's record: the end of the iteration or validation before."""
    end: float
    """End in seconds."""
    seconds: Mapping[PieceKind, Mapping[str, float]]
    """Kind -> name of a piece -> its seconds; they add up to the whole time."""
    moves: Mapping[str, WeightMove] = field(default_factory=dict)
    """Call -> move of its weights."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Call -> peak memory from its beginning to its end; empty where it cannot be measured."""
    energy_j: float | None = None
    """Energy of the rank's device in joules; None where it is unknown."""
    pieces: tuple[TimePiece, ...] | None = None
    """The pieces in order; None if only the seconds are kept."""
    waiting: tuple[CallWaits, ...] = ()
    """Samples of each generating call that waited for environments; empty without any, and without pieces."""

    @classmethod
    def from_pieces(
        cls, step: int, pieces: tuple[TimePiece, ...], *, is_detailed: bool, **others: Any
    ) -> IterationRecord:
        """Return the record of an iteration that consists of these pieces; ``others``: the remaining fields."""
        return cls(
            step=step,
            start=pieces[0].start,
            end=pieces[-1].end,
            seconds=seconds_by_name(pieces),
            pieces=pieces if is_detailed else None,
            **others,
        )

    @property
    def idle_share(self) -> float:
        """Fraction of the time in which the rank waited for others."""
        whole = total_seconds(self.seconds)
        return sum(self.seconds.get("wait", {}).values()) / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields, without those that are empty."""
        content: dict[str, Any] = {
            "step": self.step,
            "start": round(self.start, _DIGITS),
            "end": round(self.end, _DIGITS),
            "seconds": {
                kind: {name: round(value, _DIGITS) for name, value in named.items()}
                for kind, named in self.seconds.items()
            },
        }
        if self.moves:
            content["moves"] = {call: [round(move.seconds, _DIGITS), *move[1:]] for call, move in self.moves.items()}
        if self.peak_bytes:
            content["peak_bytes"] = dict(self.peak_bytes)
        if self.energy_j is not None:
            content["energy_j"] = round(self.energy_j, 3)
        if self.pieces is not None:
            content["pieces"] = [
                [one.name, one.kind, round(one.start, _DIGITS), round(one.seconds, _DIGITS)] for one in self.pieces
            ]
        if self.waiting:
            content["waiting"] = [
                [call, round(one.begin, _DIGITS), one.bin_s, [round(mean, 2) for mean in one.means]]
                for call, one in self.waiting
            ]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> IterationRecord:
        """Return the record of a line. Raises KeyError, TypeError or ValueError for any other content."""
        pieces = content.get("pieces")
        seconds = content["seconds"].items()
        return cls(
            step=int(content["step"]),
            start=float(content["start"]),
            end=float(content["end"]),
            seconds={kind: {name: float(value) for name, value in named.items()} for kind, named in seconds},
            moves={call: _move_from_json(*values) for call, values in content.get("moves", {}).items()},
            peak_bytes={call: int(size) for call, size in content.get("peak_bytes", {}).items()},
            energy_j=content.get("energy_j"),
            pieces=None if pieces is None else tuple(_piece_from_json(*values) for values in pieces),
            waiting=tuple(_waits_from_json(*values) for values in content.get("waiting", ())),
        )


def _move_from_json(seconds: float, bytes_moved: int, bytes_minimum: int) -> WeightMove:
    return WeightMove(float(seconds), int(bytes_moved), int(bytes_minimum))


def _piece_from_json(name: str, kind: PieceKind, start: float, seconds: float) -> TimePiece:
    return TimePiece(str(name), kind, float(start), float(seconds))


def _waits_from_json(call: str, begin: float, bin_s: float, means: Sequence[float]) -> CallWaits:
    return CallWaits(str(call), WaitingOverTime(float(begin), float(bin_s), tuple(map(float, means))))


def is_detailed(number: int) -> bool:
    """Return whether the pieces of an iteration are written, by its number from 0: ever fewer in a long run."""
    if number < DETAILED_AT_START:
        return True
    interval = DETAIL_INTERVAL
    while number >= 100 * interval // DETAIL_INTERVAL:
        interval *= 10
    return number % interval == 0
