"""Write recorded and predicted iterations as a trace for https://ui.perfetto.dev and chrome://tracing.

Format: Chrome's "Trace Event Format", with complete events (``X``) in microseconds. A process of the trace is the
measured run or the prediction, and a thread is a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_realloc.output_files import write_text
from lightning_realloc.recording.events import PlanPredicted
from lightning_realloc.recording.iteration_record import CallWaits
from lightning_realloc.recording.reader import RunRecord, Session, read_run

_MEASURED, _PREDICTED = 1, 2
"""Numbers of the trace's processes."""
_COLORS = {
    "call": "thread_state_running",
    "move": "rail_animation",
    "offload": "rail_load",
    "wait": "white",
    "environment": "rail_idle",
}
"""Kind of a piece -> name of a color; other kinds are grey."""


def write_trace(folder: Path, path: Path) -> None:
    """Write the trace of the record in a folder.

    Raises:
        RecordError: if there is no record.
        OSError: if the file cannot be written.
    """
    events = list(trace_events(read_run(folder)))
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))


def trace_events(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: the latest session's recorded pieces, with its predictions from the same moments.

    Predictions from data sheets of other devices are left out.
    """
    session = run.last
    yield from _names(_MEASURED, "measured", sorted(session.ranks))
    for rank, iterations in session.ranks.items():
        for iteration in iterations:
            for piece in iteration.pieces or ():
                yield _slice(
                    _MEASURED, rank, piece.name, piece.kind, piece.start, piece.seconds, {"step": iteration.step}
                )
            yield from _memory(rank, iteration.end, iteration.peak_bytes)
            yield from _waiting(rank, iteration.waiting)
    predictions = [event for event in session.events if isinstance(event, PlanPredicted)]
    predictions = [one for one in predictions if one.has_seconds_of(session.started.devices)]
    if predictions:
        yield from _names(_PREDICTED, "predicted", sorted(session.ranks))
    for prediction in predictions:
        yield from _predicted(prediction, session)


def _predicted(prediction: PlanPredicted, session: Session) -> Iterator[dict[str, Any]]:
    """Yield a predicted iteration, next to the first recorded one after it."""
    begin = _first_call_after(prediction, session)
    if begin is None:
        return
    for entry in prediction.entries:
        for rank in entry.ranks:
            details = {"step": prediction.step, "source": prediction.source}
            yield _slice(_PREDICTED, rank, entry.phase, entry.kind, begin + entry.start, entry.seconds, details)


def _first_call_after(prediction: PlanPredicted, session: Session) -> float | None:
    """Return the start of the first call, on any rank, of the first recorded iteration after a prediction."""
    later = [one for made in session.ranks.values() for one in made if one.pieces and one.step > prediction.step]
    first_step = min((one.step for one in later), default=None)
    pieces = (piece for one in later if one.step == first_step for piece in one.pieces or ())
    return min((piece.start for piece in pieces if piece.kind in ("call", "move")), default=None)


def _slice(
    process: int, rank: int, name: str, kind: str, start: float, seconds: float, details: dict[str, Any]
) -> dict[str, Any]:
    event = _event("X", process, rank, name, details) | {"cat": kind, "ts": _microseconds(start)}
    return event | {"dur": _microseconds(seconds), "cname": _COLORS.get(kind, "grey")}


def _memory(rank: int, moment: float, peak_bytes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    if peak_bytes:
        peak = {"GiB": round(max(peak_bytes.values()) / 2**30, 3)}
        name = f"peak memory of rank {rank}, GiB"
        yield _event("C", _MEASURED, rank, name, peak) | {"ts": _microseconds(moment)}


def _waiting(rank: int, waiting: Sequence[CallWaits]) -> Iterator[dict[str, Any]]:
    """Yield the number of samples that wait for environments, where it changes."""
    for _, samples in waiting:
        last = 0.0
        for place, mean in enumerate((*samples.means, 0.0)):
            if mean != last:
                moment = samples.begin + place * samples.bin_s
                counter = _event("C", _MEASURED, rank, f"samples of rank {rank} that wait", {"samples": round(mean, 2)})
                yield counter | {"ts": _microseconds(moment)}
            last = mean


def _names(process: int, name: str, ranks: list[int]) -> Iterator[dict[str, Any]]:
    yield _event("M", process, 0, "process_name", {"name": name})
    for rank in ranks:
        yield _event("M", process, rank, "thread_name", {"name": f"rank {rank}"})


def _event(phase: str, process: int, rank: int, name: str, details: dict[str, Any]) -> dict[str, Any]:
    return {"ph": phase, "pid": process, "tid": rank, "name": name, "args": details}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
