"""Chart of single iterations: a lane for every rank with its calls, moves and waits, and the predicted ones below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_realloc.recording.events import PlanPredicted
from lightning_realloc.recording.iteration_record import IterationRecord
from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.recording.reader import RunRecord, Session
from lightning_realloc.report.runs.charts import Json, quantity
from lightning_realloc.report.runs.plan_periods import PlanPeriod, plan_periods
from lightning_realloc.report.runs.series import rounded

MAX_FRAMES = 60
"""Iterations that can be chosen; more make a larger page."""
MAX_BARS = 40_000
"""Bars of all these iterations; more make a larger page."""
MAX_LANES = 64
"""Ranks that are drawn; more do not fit on a screen."""
MIN_SHARE = 0.0005
"""Shortest piece that is drawn, as a share of the iteration: less than a pixel."""


class _Frame(NamedTuple):
    """One iteration of all ranks that recorded its pieces."""

    session: Session
    step: int
    ranks: dict[int, IterationRecord]


def lanes_chart(record: RunRecord) -> Json | None:
    """Return the chart of the recorded iterations, spread over the run; None if no pieces were recorded."""
    frames = _spread(_frames(record.sessions))
    if not frames:
        return None
    periods = plan_periods(record)
    drawn = [_draw(frame, _period_of(frame, periods)) for frame in frames]
    last = drawn[-1]
    return {
        "id": "lanes",
        "title": "One iteration, by rank",
        "kind": "lanes",
        "unit": "s",
        "frames": drawn,
        "summary": f"Iteration {last['step']} takes {quantity(last['seconds'], 's')}; {len(drawn)} can be chosen. "
        f"The table of seconds has the same numbers.",
    }


def _frames(sessions: Sequence[Session]) -> list[_Frame]:
    frames = []
    for session in sessions:
        by_step: dict[int, dict[int, IterationRecord]] = {}
        for rank, iterations in sorted(session.ranks.items())[:MAX_LANES]:
            for one in iterations:
                if one.pieces:
                    by_step.setdefault(one.step, {})[rank] = one
        frames += [_Frame(session, step, ranks) for step, ranks in sorted(by_step.items())]
    return frames


def _spread(frames: list[_Frame]) -> list[_Frame]:
    """Return at most `MAX_FRAMES` frames with `MAX_BARS` bars, the last one included."""
    if not frames:
        return []
    bars = max(1, sum(_num_bars(one) for frame in frames for one in frame.ranks.values()) // len(frames))
    number = max(1, min(len(frames), MAX_FRAMES, MAX_BARS // bars))
    return [frames[len(frames) - 1 - at * len(frames) // number] for at in reversed(range(number))]


def _num_bars(iteration: IterationRecord) -> int:
    return len(iteration.pieces or ()) + sum(len(one.samples.means) for one in iteration.waiting)


def _period_of(frame: _Frame, periods: Sequence[PlanPeriod]) -> PlanPeriod | None:
    mine = (one for one in periods if one.session is frame.session)
    return next((one for one in mine if one.installed.step < frame.step <= one.end), None)


def _draw(frame: _Frame, period: PlanPeriod | None) -> Json:
    """Return a frame's bars; times count from its beginning on the earliest rank."""
    zero = min(one.start for one in frame.ranks.values())
    seconds = max(one.end for one in frame.ranks.values()) - zero
    bars = [
        [rank, piece.name, piece.kind, *rounded((piece.start - zero, piece.seconds), 6)]
        for rank, one in sorted(frame.ranks.items())
        for piece in one.pieces or ()
        if piece.seconds >= MIN_SHARE * seconds
    ]
    prediction = None if period is None else period.predicted_seconds
    predicted = list(_predicted_bars(frame, prediction, zero))
    return {
        "step": frame.step,
        "seconds": seconds,
        "ranks": sorted(frame.ranks),
        "bars": bars,
        "waiting": [
            [rank, *rounded((samples.begin - zero, samples.bin_s), 6), rounded(samples.means, 2)]
            for rank, one in sorted(frame.ranks.items())
            for _, samples in one.waiting
        ],
        "predicted": predicted,
        "predicted_from": prediction.source if prediction is not None and predicted else None,
    }


def _predicted_bars(frame: _Frame, prediction: PlanPredicted | None, zero: float) -> Iterator[list[object]]:
    """Yield the bars of the predicted iteration, which begins with the first call or move of any rank."""
    if prediction is None:
        return
    starts = [piece.start for one in frame.ranks.values() if (piece := _first_work(one)) is not None]
    begin = min(starts, default=zero) - zero
    for entry in prediction.entries:
        for rank in sorted(set(entry.ranks) & set(frame.ranks)):
            yield [rank, entry.phase, entry.kind, *rounded((begin + entry.start, entry.seconds), 6)]


def _first_work(iteration: IterationRecord) -> TimePiece | None:
    return next((piece for piece in iteration.pieces or () if piece.kind in ("call", "move")), None)
