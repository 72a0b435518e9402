"""Lanes of a recorded iteration for a picture, with the predicted iteration below each rank's lane. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_realloc.recording.events import PlanPredicted
from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.recording.reader import Session
from lightning_realloc.tuning.timeline.call_timeline import CallTimeline
from lightning_realloc.tuning.timeline.drawing import Drawing
from lightning_realloc.tuning.timeline.picture import Bar, BarKind, Lane, lay_out

_KINDS: dict[str, BarKind] = {"call": "call", "move": "move", "wait": "wait"}


def detailed_steps(session: Session) -> list[int]:
    """Return the steps whose pieces every rank recorded, ascending."""
    by_rank = [{one.step for one in made if one.pieces is not None} for made in session.ranks.values()]
    return sorted(set.intersection(*by_rank)) if by_rank else []


def iteration_lanes(session: Session, step: int, *, with_prediction: bool = True) -> list[Lane]:
    """Return the lanes of an iteration, from its first call on; code between calls is left out.

    Args:
        session: Session of the iteration.
        step: One of `detailed_steps`.
        with_prediction: Whether the latest prediction before the iteration follows each rank's lane.
    """
    pieces = {
        rank: [piece for one in made if one.step == step for piece in one.pieces or ()]
        for rank, made in sorted(session.ranks.items())
    }
    predicted = {lane.name: lane for lane in _predicted(session, step)} if with_prediction else {}
    lanes = []
    for lane in rank_lanes(pieces):
        lanes += [lane, *([predicted[lane.name]] if lane.name in predicted else [])]
    return lanes


def rank_lanes(pieces: Mapping[int, Sequence[TimePiece]]) -> list[Lane]:
    """Return the lanes of an iteration's pieces by rank, from its first call on; code between calls is left out."""
    shown = {rank: [piece for piece in mine if piece.kind != "host"] for rank, mine in pieces.items()}
    begin = min((piece.start for mine in shown.values() for piece in mine), default=0.0)
    return [Lane(f"rank {rank}", tuple(_bars(mine, begin))) for rank, mine in shown.items()]


def draw_iteration(pieces: Mapping[int, Sequence[TimePiece]], *, num_ranks: int) -> Drawing:
    """Return the drawing of an iteration.

    Args:
        pieces: Rank -> pieces of the iteration, of all ranks or of some.
        num_ranks: Ranks of the run.
    """
    lanes = rank_lanes(pieces)
    seconds = max((bar.end for lane in lanes for bar in lane.bars), default=0.0)
    title = f"One iteration: {seconds:.3g} s on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    return lay_out(lanes, title=title + (f", the first {len(pieces)} are shown" if len(pieces) < num_ranks else ""))


def _bars(pieces: Sequence[TimePiece], begin: float) -> Iterator[Bar]:
    for piece in pieces:
        yield Bar(piece.name, _KINDS.get(piece.kind, "other"), piece.start - begin, piece.end - begin)


def _predicted(session: Session, step: int) -> list[Lane]:
    made = [event for event in session.events if isinstance(event, PlanPredicted) and event.step <= step]
    if not made:
        return []
    ranks = sorted({rank for entry in made[-1].entries for rank in entry.ranks})
    return CallTimeline(made[-1].entries, 1, tuple(ranks)).lanes(is_predicted=True)
