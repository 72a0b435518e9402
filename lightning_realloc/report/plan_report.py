"""What is said about one priced plan: its calls, timeline, memory, seconds, and how far to trust these. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.report.tables import aligned, gib, short_layout, short_ranks
from lightning_realloc.tuning.memory.forecast import SET_UP
from lightning_realloc.tuning.memory.parts import MemoryParts
from lightning_realloc.tuning.search.plan_search import SearchResult
from lightning_realloc.tuning.search.pricing import PricedPlan
from lightning_realloc.tuning.timeline.simulator import TimelineEntry

ONE_LAYOUT, SEVERAL_LAYOUTS = (0.95, 1.13), (0.95, 1.31)
"""Least and most that iterations took beside their estimates, on machines that nobody measured for it: plans of one
layout, and any plan. Source: docs/benchmarks/real_figures.md."""
ROOFLINE = "Worked out from data sheets; nothing was measured."
MOST_PEAKS = 4
"""Groups of ranks whose peaks are told."""
MOST_STATIC = 3
"""Static plans that are told."""
NARROW_SHARE = 0.92
"""Of a device's memory: a forecast beyond it may be too close."""
BAR = 32
"""Letters of the timeline's bars."""


def title(priced: PricedPlan, asked: str) -> str:
    """Return the first line, and where a run cannot start a second one that says why."""
    if priced.can_start:
        return f"Best plan found: {asked}"
    return f"The best plan found cannot start on such devices: {asked}\n  {set_up_need(priced)}"


def set_up_need(priced: PricedPlan) -> str:
    """Return what building models needs of a device."""
    return (
        f"before the first iteration a rank needs {gib(priced.set_up_bytes)} of {gib(priced.memory_budget)}, since a "
        f"model is whole on every rank before it is divided"
    )


def plan_table(plan: ExecutionPlan) -> str:
    """Return every call's layout and options."""
    rows = []
    for name, call in plan.calls:
        entry = call.to_entry()
        options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "layout"}
        told = (key if value is True else f"{key} {value}" for key, value in options.items())
        rows.append((name, short_layout(call.layout), ", ".join(told)))
    if plan.offload:
        rows.append(("offload", ", ".join(plan.offload), ""))
    return aligned(rows, left=(0, 1, 2))


def seconds_with_error(priced: PricedPlan, *, unmeasured: str | None) -> str:
    """Return an iteration's seconds, the range they may lie in, and where that comes from.

    ``unmeasured`` is what is in the plan and was never compared with measured times, None for nothing.
    """
    text = f"{priced.seconds:.2f} s an iteration"
    if unmeasured is not None:
        return f"{text}; no error is known: estimates for {unmeasured} were compared with nothing"
    least, most = ONE_LAYOUT if len(priced.plan.layouts) == 1 else SEVERAL_LAYOUTS
    return (
        f"{text}; {least * priced.seconds:.1f} to {most * priced.seconds:.1f} s if it errs as it did for published "
        f"iteration times ({least - 1:+.0%} to {most - 1:+.0%}: docs/benchmarks/real_figures.md)"
    )


def gap_sentence(found: SearchResult) -> str:
    """Return how much better another plan can be."""
    if not found.lower_bound:
        return "how much less another plan can take is not known: pricing all options takes more --seconds"
    if found.gap < 5e-4:
        return "no plan takes less, as estimated"
    return f"no plan takes less than {found.lower_bound:.2f} s, as estimated: at most {found.gap:.1%} can be saved"


def timeline_table(priced: PricedPlan) -> str:
    """Return one iteration: when every call, and every move of weights, begins, how long it takes, and a bar."""
    timeline = priced.timeline
    entries = [entry for entry in timeline.entries if entry.iteration == timeline.num_iterations - 1]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    begin, end = min(entry.start for entry in entries), max(entry.end for entry in entries)
    rows = [("", "start", "seconds", "ranks", "")]
    for entry in entries:
        bar = _bar(entry, begin, max(end - begin, 1e-9))
        times = (f"{entry.start - begin:.2f}", f"{entry.seconds:.2f}")
        rows.append((entry.phase, *times, short_ranks(sorted(entry.ranks)), bar))
    return aligned(rows, left=(0, 3, 4)) + f"\n  ranks are idle {timeline.mean_idle_share:.0%} of the time"


def _bar(entry: TimelineEntry, begin: float, length: float) -> str:
    first = round(BAR * (entry.start - begin) / length)
    last = max(first + 1, round(BAR * (entry.end - begin) / length))
    return "." * min(first, BAR - 1) + "#" * (min(last, BAR) - min(first, BAR - 1)) + "." * (BAR - last)


def memory_table(priced: PricedPlan) -> str:
    """Return for every phase the bytes of the fullest ranks, for the fullest ranks their peaks, and what is left."""
    entries = priced.forecast.phases
    rows = [("", "GiB", "ranks", "of that")]
    for phase in dict.fromkeys(entry.phase for entry in entries if entry.phase != SET_UP):
        inside = [entry for entry in entries if entry.phase == phase]
        most = max(inside, key=lambda entry: entry.parts.total).parts
        ranks = [entry.rank for entry in inside if entry.parts.total == most.total]
        rows.append((phase, f"{most.total / 2**30:.1f}", short_ranks(ranks), _largest(most)))
    return "\n".join(
        [aligned(rows, left=(0, 2, 3)), *(f"  {line}" for line in _peaks(priced)), *_narrow(priced), *_set_up(priced)]
    )


def _largest(parts: MemoryParts) -> str:
    sizes = sorted(((getattr(parts, item.name), item.name) for item in fields(parts)), reverse=True)
    told = [f"{name.replace('_', ' ')} {size / 2**30:.1f}" for size, name in sizes[:4] if size >= 2**30 / 20]
    return ", ".join(told)


def _peaks(priced: PricedPlan) -> Iterator[str]:
    """Yield the fullest ranks' peaks; ranks whose peaks differ by less than they are told with count together."""
    peaks: dict[int, tuple[int, str]] = {}
    for entry in priced.forecast.phases:
        if entry.phase != SET_UP and entry.parts.total > peaks.get(entry.rank, (-1, ""))[0]:
            peaks[entry.rank] = (entry.parts.total, entry.phase)
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (size, phase) in sorted(peaks.items(), key=lambda item: (-item[1][0], item[0])):
        groups.setdefault((gib(size), phase), []).append(rank)
    for (total, phase), ranks in list(groups.items())[:MOST_PEAKS]:
        room = gib(priced.memory_budget)
        who = f"rank{'s' if len(ranks) > 1 else ''} {short_ranks(sorted(ranks))}"
        yield f"{who}: at most {total} of {room}{_headroom(priced)}, in {phase}"
    if len(groups) > MOST_PEAKS:
        yield f"the other ranks: less, down to {list(groups)[-1][0]}"


def _headroom(priced: PricedPlan) -> str:
    share = 1 - priced.usable_bytes / priced.memory_budget
    return f" ({share:.0%} head-room kept)" if share > 1e-3 else ""


def _narrow(priced: PricedPlan) -> Iterator[str]:
    if priced.peak.parts.total > NARROW_SHARE * priced.memory_budget:
        yield (
            "  little is left for what is not forecast: fragments, libraries, errors of up to 9 % (docs/memory.md); "
            "--headroom 0.1 finds a plan that needs less"
        )


def _set_up(priced: PricedPlan) -> Iterator[str]:
    if not priced.can_start:
        yield f"  {set_up_need(priced)}: a run of this plan cannot start on such devices"


def comparison_table(best: PricedPlan, heuristic: PricedPlan, static: Sequence[PricedPlan]) -> str:
    """Return the seconds and bytes of a plan beside those that one would take without a search."""
    fitting = [priced for priced in static if not priced.missing_bytes]
    told = [("this plan", best), ("heuristic", heuristic)]
    told += [(f"static, {priced.plan.layouts[0].dims}", priced) for priced in fitting[:MOST_STATIC]]
    rows = [("", "seconds", "beside this", "fullest rank")]
    for name, priced in told:
        if priced.missing_bytes:
            rows.append((name, "-", "-", f"does not fit: lacks {gib(priced.missing_bytes)}"))
        else:
            ratio = f"{priced.seconds / best.seconds:.2f}x"
            rows.append((name, f"{priced.seconds:.2f}", ratio, gib(priced.peak.parts.total)))
    return f"{aligned(rows)}\n  {_of_static(static, fitting)}"


def _of_static(static: Sequence[PricedPlan], fitting: Sequence[PricedPlan]) -> str:
    if not static:
        return "no layout suits all calls: there is no static plan"
    misfits = len(static) - len(fitting)
    counts = f"{len(fitting)} fit, {misfits} do not"
    if not fitting:
        counts = f"none of {misfits} fits, the smallest lacks {gib(static[0].missing_bytes)}"
    return (
        f"static layouts, one for all calls: {counts}; micro-batches, checkpointing and slots of heuristic and static "
        f"plans are the best that fit"
    )
