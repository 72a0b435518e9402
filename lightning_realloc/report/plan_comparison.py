"""Tables for several priced plans: two plans side by side, and the best plans of growing clusters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.report.formats import gib, short_layout
from lightning_realloc.report.plan_report import setup_shortage
from lightning_realloc.tables import aligned
from lightning_realloc.tuning.search.plan_search import SearchResult
from lightning_realloc.tuning.search.pricing import PricedPlan

SECONDS_PER_HOUR = 3600.0
NUM_PRICED_ITERATIONS = 1000
"""Number of iterations for which hours and prices are shown; those of one iteration are too small to read."""


def compare_plans(first: PricedPlan, second: PricedPlan, names: tuple[str, str], price: float | None) -> str:
    """Return a table of two plans' seconds, per phase and in total, their bytes, and their layouts."""
    pair = (first, second)
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A")]
    rows += [_difference(phase, *(_seconds_of(plan, phase) for plan in pair)) for phase in _phases(pair)]
    rows.append(_difference("an iteration", first.seconds, second.seconds))
    if price is not None:
        rows.append(_difference(f"price of {NUM_PRICED_ITERATIONS}", *(money(plan, price) for plan in pair)))
    peaks = [plan.peak.parts.total / 2**30 for plan in pair]
    rows.append(_difference("fullest rank, GiB", *peaks))
    rows.append(("ranks are idle", *(f"{plan.timeline.mean_idle_share:.0%}" for plan in pair), ""))
    ratio = first.seconds / second.seconds
    winner = f"B is {ratio:.2f} times as fast as A" if ratio >= 1 else f"A is {1 / ratio:.2f} times as fast as B"
    lines = [f"A: {names[0]}", f"B: {names[1]}", "", "Seconds", aligned(rows), f"  {winner}, as estimated"]
    for letter, plan in zip("AB", pair, strict=True):
        if plan.missing_bytes:
            lines.append(
                f"  {letter} does not fit: rank {plan.peak.rank} lacks {gib(plan.missing_bytes)} in {plan.peak.phase}"
            )
        if not plan.can_start:
            lines.append(f"  {letter} cannot start: {setup_shortage(plan)}")
    return "\n".join([*lines, "", "Layouts", _layouts(pair)])


def _phases(pair: Sequence[PricedPlan]) -> list[str]:
    """Return the phases of both plans; the reallocation before a call comes before the call itself."""
    calls = [name for name, _ in pair[0].plan.calls]
    present = {entry.phase for plan in pair for entry in plan.timeline.entries}
    order = {entry.phase: at for plan in pair for at, entry in enumerate(plan.timeline.entries) if entry.phase in calls}
    return sorted(present, key=lambda phase: (order.get(phase.removeprefix("-> "), 0), phase in calls))


def _seconds_of(priced: PricedPlan, phase: str) -> float:
    """Return the mean seconds of a phase per iteration; not every iteration moves all weights."""
    timeline = priced.timeline
    return sum(entry.seconds for entry in timeline.entries if entry.phase == phase) / timeline.num_iterations


def _difference(name: str, first: float, second: float) -> tuple[str, str, str, str]:
    return name, f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}"


def _layouts(pair: Sequence[PricedPlan]) -> str:
    rows = [("", "A", "B")]
    for name, call in pair[0].plan.calls:
        other = pair[1].plan.layout(name)
        rows.append((name, short_layout(call.layout), "the same" if other == call.layout else short_layout(other)))
    return aligned(rows, left=(0, 1, 2))


# ---- cluster sizes
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEntry:
    """One cluster size of a sweep, with its best plan."""

    num_nodes: int
    """Number of nodes."""
    num_devices: int
    """Number of devices over all nodes."""
    best: PricedPlan | None
    """Best plan found; None if nothing fits."""
    found: SearchResult | None
    """Result of the search; None if nothing fits."""
    refusal: str = ""
    """Reason why nothing fits."""


def gpu_hours(priced: PricedPlan) -> float:
    """Return the device-hours of `NUM_PRICED_ITERATIONS` iterations."""
    devices = len({entry.rank for entry in priced.forecast.phases})
    return NUM_PRICED_ITERATIONS * devices * priced.seconds / SECONDS_PER_HOUR


def money(priced: PricedPlan, price: float) -> float:
    """Return the price of `NUM_PRICED_ITERATIONS` iterations, in the currency of a device-hour's ``price``."""
    return price * gpu_hours(priced)


def sweep_table(sizes: Sequence[SweepEntry], price: float | None) -> str:
    """Return a table of time and cost by cluster size; sizes where nothing fits state the reason."""
    head = [
        "nodes",
        "devices",
        "seconds",
        "speed-up",
        "GPU-hours",
        *(["price"] if price is not None else []),
        "fullest rank",
        "gap",
    ]
    first = next((size.best for size in sizes if size.best is not None), None)
    rows, refusals = [head], []
    for size in sizes:
        row = [str(size.num_nodes), str(size.num_devices)]
        if size.best is None or size.found is None or first is None:
            row += ["nothing fits", *[""] * (len(head) - 3)]
            refusals.append(f"  {size.num_nodes} nodes: {size.refusal}")
        else:
            row += [
                f"{size.best.seconds:.2f}",
                f"{first.seconds / size.best.seconds:.2f}x",
                f"{gpu_hours(size.best):,.1f}",
            ]
            row += [f"{money(size.best, price):,.2f}"] if price is not None else []
            row += [gib(size.best.peak.parts.total), f"{size.found.gap:.1%}" if size.found.lower_bound else "unknown"]
            if not size.best.can_start:
                refusals.append(f"  {size.num_nodes} nodes: the plan cannot start: {setup_shortage(size.best)}")
        rows.append(row)
    priced = "" if price is None else f", and their price at {price:g} a GPU-hour"
    hours = f"GPU-hours of {NUM_PRICED_ITERATIONS} iterations{priced}"
    note = f"  seconds of an iteration; {hours}; gap: maximum saving of another plan"
    return "\n".join([aligned(rows, left=()), note, *refusals])
