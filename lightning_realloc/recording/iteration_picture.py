"""Lanes of a recorded iteration for a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.recording.reader import Session
from lightning_realloc.tuning.timeline.drawing import Drawing
from lightning_realloc.tuning.timeline.picture import Bar, BarKind, Lane, lay_out

MAX_RANKS_OF_IMAGE = 64
"""Ranks that a picture in loggers shows, the first ones; the record has all. A larger number takes longer to draw."""
_KINDS: dict[str, BarKind] = {"call": "call", "move": "move", "wait": "wait", "environment": "environment"}


def detailed_steps(session: Session) -> list[int]:
    """Return the steps whose pieces every rank recorded, ascending."""
    by_rank = [{one.step for one in made if one.pieces is not None} for made in session.ranks.values()]
    return sorted(set.intersection(*by_rank)) if by_rank else []


def iteration_lanes(session: Session, step: int) -> list[Lane]:
    """Return the lanes of an iteration, from its first call on; code between calls is left out.

    Args:
        session: Session of the iteration.
        step: One of `detailed_steps`.
    """
    return rank_lanes(
        {
            rank: [piece for one in made if one.step == step for piece in one.pieces or ()]
            for rank, made in sorted(session.ranks.items())
        }
    )


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
