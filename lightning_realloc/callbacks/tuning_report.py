"""Texts about a tuning: a summary line, and a table of predicted and measured seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.dims import format_ranks
from lightning_realloc.tables import aligned
from lightning_realloc.tuning.tuner import Tuner


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one plan."""

    calls: Mapping[str, float] = field(default_factory=dict)
    """Call -> seconds of the slowest participating rank, without waiting."""
    peak_bytes: tuple[int, ...] = ()
    """Peak bytes of every rank; empty if they cannot be read for free."""


_COST_NAMES = {"search": "measuring and search", "switch": "changes of plans", "slower": "slower iterations"}
"""Name of a cost in the tuner -> its name in messages."""


def describe_outcome(tuner: Tuner) -> str:
    """Return a line with the chosen plan, its speed-up, and the cost of the tuning."""
    best, start = tuner.best, tuner.start
    if not tuner.spent_s and not tuner.num_tried:
        return f"AutoTuner does not tune this run: {tuner.stopped}"
    tried = f"{tuner.num_tried} other plan{'' if tuner.num_tried == 1 else 's'} tried"
    parts = ", ".join(f"{_COST_NAMES[name]} {seconds:.2f} s" for name, seconds in tuner.costs.items())
    cost = f"{tried}; tuning has cost {tuner.spent_s:.2f} s: {parts}"
    stopped = f"; {tuner.stopped}" if tuner.stopped else ""
    if best is start:
        seconds = f" of {start.score:.3g} s an iteration" if start.scores else ""
        return f"AutoTuner keeps the plan{seconds}: {cost}{stopped}"
    return (
        f"AutoTuner commits a plan of {best.score:.3g} s an iteration, {start.score / best.score:.2f} times as fast as "
        f"the one of {start.score:.3g} s it began with ({cost}{stopped}): {describe_changes(start.plan, best.plan)}"
    )


def describe_changes(before: ExecutionPlan, after: ExecutionPlan) -> str:
    """Return the differences between two plans of the same calls."""
    pairs = ((name, before.call(name), plan) for name, plan in after.calls)
    texts = [f"{name} {old.to_text()} -> {new.to_text()}" for name, old, new in pairs if old != new]
    if before.offload != after.offload:
        texts.append(f"offload {', '.join(before.offload) or 'nothing'} -> {', '.join(after.offload) or 'nothing'}")
    return ", ".join(texts)


def comparison_table(
    plan: ExecutionPlan,
    measured: Measured,
    *,
    seconds: float,
    predicted_s: float,
    predicted_calls: Mapping[str, float],
    predicted_bytes: Mapping[tuple[int, ...], int],
) -> str:
    """Return a table of predicted and measured seconds of calls and iteration, and peak bytes of ranks."""
    rows = [("", "layout", "predicted", "measured")]
    for name, predicted in predicted_calls.items():
        found = measured.calls.get(name)
        rows.append((name, plan.call(name).to_text(), f"{predicted:.3f} s", "" if found is None else f"{found:.3f} s"))
    rows.append(("an iteration", "", f"{predicted_s:.3f} s", f"{seconds:.3f} s"))
    for ranks, size in predicted_bytes.items():
        found_size = ""
        if measured.peak_bytes:
            found_size = f"{max(measured.peak_bytes[rank] for rank in ranks) / 2**20:.0f} MiB"
        rows.append((f"peak of rank {format_ranks(ranks)}", "", f"{size / 2**20:.0f} MiB", found_size))
    return aligned(rows, left=(0, 1), indent="")
