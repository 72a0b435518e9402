"""Divide a rank's time into disjoint pieces, from activities that contain each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_realloc.runtime.messages.flight_record import Activity, ActivityKind

PieceKind = Literal["call", "move", "offload", "wait", "environment", "save", "other", "host"]
"""Kinds of activities, and ``host``: code between two activities, such as Lightning's loops, callbacks and loggers."""
HOST = "between calls"
"""Name of a piece outside of all activities."""
WAITING = "waiting"
"""Name of a piece in which a call waits for other ranks, where its activity tells no more."""
ENVIRONMENTS = "waiting for environments"
"""Name of a piece in which a call generates nothing because its samples wait for their environments."""
assert {*get_args(ActivityKind), "host"} == {*get_args(PieceKind)}


@dataclass(frozen=True, slots=True)
class TimePiece:
    """Time of one rank that is spent on one thing."""

    name: str
    """Name of a call, ``-> call`` for the move of its weights, or a description."""
    kind: PieceKind
    start: float
    """Start in seconds, on the clock of the run's record."""
    seconds: float

    @property
    def end(self) -> float:
        """End in seconds."""
        return self.start + self.seconds


def divide_into_pieces(
    activities: Iterable[Activity], begin: float, end: float, *, zero: float = 0.0
) -> tuple[TimePiece, ...]:
    """Return the pieces of the time from ``begin`` to ``end``, in order and without gaps.

    Time within an activity belongs to the innermost one. Seconds of waiting that an activity measured without an
    activity of their own are taken from its end: a rank that generates waits when it has no samples left.

    Args:
        activities: Activities that have ended, in any order. Those outside of the time are cut.
        begin: Start in seconds of `time.monotonic`.
        end: End in seconds of `time.monotonic`.
        zero: Moment of `time.monotonic` that the pieces' clock starts at.
    """
    together = [part for one in activities for part in (one, *_environment_waits(one))]
    ordered = sorted(together, key=lambda one: (one.began_at, one.depth))
    outer = Activity(HOST, begin, -1, seconds=end - begin)
    pieces = (piece for piece in _divide(outer, "host", ordered, begin, end) if piece.seconds > 0)
    return tuple(TimePiece(one.name, one.kind, one.start - zero, one.seconds) for one in _joined(pieces))


def _environment_waits(activity: Activity) -> Iterator[Activity]:
    """Yield the spans in which an activity waited for environments, as activities within it."""
    waits = activity.environment_waits
    for begin, seconds in () if waits is None else waits.idle:
        at = activity.began_at + begin
        yield Activity(ENVIRONMENTS, at, activity.depth + 1, seconds=seconds, kind="environment")


def _divide(
    outer: Activity, kind: PieceKind, inside: Sequence[Activity], begin: float, end: float
) -> Iterator[TimePiece]:
    """Yield the pieces of an activity, given all activities inside, the earliest and outermost first."""
    place = begin
    children = [one for one in inside if one.depth == outer.depth + 1]
    for number, child in enumerate(children):
        child_end = min(end, child.began_at + (child.seconds or 0.0))
        child_begin = max(place, child.began_at)
        if child_end <= child_begin:
            continue
        yield TimePiece(outer.name, kind, place, child_begin - place)
        following = children[number + 1].began_at if number + 1 < len(children) else end
        within = [one for one in inside if one.depth > child.depth and child.began_at <= one.began_at < following]
        yield from _divide(child, child.kind, within, child_begin, child_end)
        place = child_end
    waited = min(outer.waited_s, end - place)
    yield TimePiece(outer.name, kind, place, end - place - waited)
    yield TimePiece(WAITING, "wait", end - waited, waited)


def _joined(pieces: Iterable[TimePiece]) -> Iterator[TimePiece]:
    """Join neighbours of the same name and kind."""
    last: TimePiece | None = None
    for piece in pieces:
        if last is not None and (last.name, last.kind) == (piece.name, piece.kind):
            last = TimePiece(last.name, last.kind, last.start, piece.end - last.start)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def seconds_by_name(pieces: Iterable[TimePiece]) -> dict[PieceKind, dict[str, float]]:
    """Return kind -> name -> seconds; waiting has no names, since there are as many as pairs of ranks."""
    sums: dict[PieceKind, defaultdict[str, float]] = {}
    for piece in pieces:
        name = WAITING if piece.kind == "wait" else piece.name
        sums.setdefault(piece.kind, defaultdict(float))[name] += piece.seconds
    return {kind: dict(named) for kind, named in sums.items()}


def total_seconds(seconds: Mapping[PieceKind, Mapping[str, float]]) -> float:
    """Return the sum over all kinds and names."""
    return sum(sum(named.values()) for named in seconds.values())
