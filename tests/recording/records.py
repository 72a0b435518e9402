"""Write records of runs for tests, without training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_realloc.recording.events import MEASURED_PASSES, Event, PlanPredicted, RunStarted, event_to_json
from lightning_realloc.recording.iteration_record import FORMAT, CallWaits, IterationRecord, WeightMove
from lightning_realloc.recording.pieces import HOST, TimePiece
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, METRICS_FILE, JsonLines, rank_file
from lightning_realloc.runtime.messages.environment_waits import WaitingOverTime
from lightning_realloc.tuning.timeline.call_timeline import TimelineEntry

PREDICTION = PlanPredicted(
    step=2,
    source=MEASURED_PASSES,
    seconds_per_iteration=0.8,
    entries=(TimelineEntry("-> actor.generate", 0, (0, 1), 0.0, 0.1), TimelineEntry("actor.train", 0, (1,), 0.2, 0.8)),
    peak_bytes={"actor.train": (100, 200)},
    memory_budget=1000,
)


def started(*, unix_s: float = 1000.0, step: int = 0, ranks: int = 2, version: int = FORMAT) -> RunStarted:
    """Return the start of a fit of ten iterations."""
    return RunStarted(
        format=version, unix_s=unix_s, step=step, max_steps=10, algorithm="GRPO", devices=("cpu",) * ranks,
        hosts=("here",) * ranks, precision="32-true", roles={"actor": 1000},
    )  # fmt: skip


def iteration(step: int, start: float, *, is_detailed: bool = True) -> IterationRecord:
    """Return an iteration of one second, in which two samples wait for environments from 0.25 s on, then one."""
    pieces = (
        TimePiece("waiting for data of rank 1", "wait", start, 0.1),
        TimePiece("-> actor.generate", "move", start + 0.1, 0.1),
        TimePiece("actor.generate", "call", start + 0.2, 0.3),
        TimePiece("actor.train", "call", start + 0.5, 0.4),
        TimePiece(HOST, "host", start + 0.9, 0.1),
    )
    return IterationRecord.from_pieces(
        step, pieces, is_detailed=is_detailed, moves={"actor.generate": WeightMove(0.1, 2000, 1000)},
        peak_bytes={"actor.generate": 300, "actor.train": 400},
        waiting=(CallWaits("actor.generate", WaitingOverTime(start + 0.25, 0.05, (2.0, 2.0, 1.0, 0.0))),),
    )  # fmt: skip


def write_events(folder: Path, events: Iterable[Event]) -> None:
    """Append events."""
    lines = JsonLines(folder / EVENTS_FILE)
    for event in events:
        lines.write(event_to_json(event))
    lines.close()


def write_session(folder: Path, start: RunStarted, events: Sequence[Event] = (), *, steps: int = 3) -> None:
    """Append a session in which every rank makes some iterations of a second each."""
    write_events(folder, [start, *events])
    metrics = JsonLines(folder / METRICS_FILE)
    for step in range(start.step + 1, start.step + steps + 1):
        metrics.write({"step": step, "unix_s": start.unix_s + step - start.step, "metrics": {"reward": step / 10}})
    metrics.close()
    for rank in range(len(start.devices)):
        lines = JsonLines(folder / rank_file(rank))
        lines.write({"rank": {"step": start.step, "unix_s": start.unix_s, "baseline_bytes": 50}})
        for number in range(steps):
            lines.write(iteration(start.step + number + 1, float(number)).to_json())
        lines.close()
