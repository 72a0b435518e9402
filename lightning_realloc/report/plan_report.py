"""Tables and sentences for one priced plan: calls, timeline, memory, seconds and their accuracy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.report.formats import gib, short_layout, short_ranks
from lightning_realloc.tables import aligned
from lightning_realloc.tuning.memory.parts import MemoryParts
from lightning_realloc.tuning.search.plan_search import SearchResult
from lightning_realloc.tuning.search.pricing import PricedPlan
from lightning_realloc.tuning.timeline.call_timeline import CallTimeline, TimelineEntry

ONE_LAYOUT_ERROR_RANGE, ANY_PLAN_ERROR_RANGE = (0.90, 1.14), (0.86, 1.31)
"""Smallest and largest ratio of measured to estimated iteration time on machines without a profile, for plans with one
layout and for any plan. Source: docs/benchmarks/real_figures.md."""
MIXTURE_ERROR_RANGE = (0.91, 2.01)
"""The same for mixtures of experts, from published steps."""
MAX_SPEEDUP_ERROR = 1.29
"""Largest ratio of an estimated speed-up over a plan with one layout to the measured one. Source: as above."""
MUCH_IDLE = 0.25
"""Share of idle time from which its reason is named."""
ROOFLINE_NOTE = "Estimated from data sheets; nothing was measured."
MAX_PEAK_GROUPS = 4
"""Maximum number of groups of ranks whose peaks are shown."""
MAX_STATIC_PLANS = 3
"""Maximum number of static plans shown."""
TIGHT_MEMORY_FRACTION = 0.92
"""Fraction of a device's memory above which a forecast may be too tight."""
BAR_WIDTH = 32
"""Width of the timeline's bars, in characters."""


def report_title(priced: PricedPlan, subject: str) -> str:
    """Return the first line, and a second line with the reason if a run cannot start."""
    if priced.can_start:
        return f"Best plan found: {subject}"
    return f"The best plan found cannot start on such devices: {subject}\n  {setup_shortage(priced)}"


def setup_shortage(priced: PricedPlan) -> str:
    """Return the memory that building models needs on a device."""
    return (
        f"before the first iteration a rank needs {gib(priced.set_up_bytes)} of {gib(priced.memory_budget)}, to build "
        f"the models that it divides"
    )


def plan_table(plan: ExecutionPlan) -> str:
    """Return a table of every call's layout and options."""
    rows = []
    for name, call in plan.calls:
        entry = call.to_entry()
        options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "layout"}
        shown = (key if value is True else f"{key} {value}" for key, value in options.items())
        rows.append((name, short_layout(call.layout), ", ".join(shown)))
    if plan.offload:
        rows.append(("offload", ", ".join(plan.offload), ""))
    return aligned(rows, left=(0, 1, 2))


def seconds_with_error(priced: PricedPlan, *, has_mixtures: bool, unmeasured: str | None) -> str:
    """Return an iteration's seconds, their error range, and its source.

    Args:
        has_mixtures: Whether a model is a mixture of experts.
        unmeasured: Part of the plan whose estimates were never compared with measurements; None without one.
    """
    text = f"{priced.seconds:.2f} s an iteration"
    if unmeasured is not None:
        return f"{text}; the error is unknown: estimates for {unmeasured} were never compared with measurements"
    least, most = ONE_LAYOUT_ERROR_RANGE if len(priced.plan.layouts) == 1 else ANY_PLAN_ERROR_RANGE
    if has_mixtures:
        least, most = MIXTURE_ERROR_RANGE
    return (
        f"{text}; {least * priced.seconds:.1f} to {most * priced.seconds:.1f} s if it errs as it did for published "
        f"iteration times ({least - 1:+.0%} to {most - 1:+.0%}: docs/benchmarks/real_figures.md)"
    )


def gap_sentence(found: SearchResult) -> str:
    """Return the maximum saving of any other plan."""
    if not found.lower_bound:
        return "the possible saving of other plans is unknown: pricing all options takes more --seconds"
    if found.gap < 5e-4:
        return "no plan takes less, as estimated"
    return f"no plan takes less than {found.lower_bound:.2f} s, as estimated: at most {found.gap:.1%} can be saved"


def timeline_table(timeline: CallTimeline, *, num_devices: int) -> str:
    """Return a table of one iteration: start, duration, ranks and a bar of every call and reallocation."""
    entries = [entry for entry in timeline.entries if entry.iteration == timeline.num_iterations - 1]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    begin, end = min(entry.start for entry in entries), max(entry.end for entry in entries)
    rows = [("", "start", "seconds", "ranks", "")]
    for entry in entries:
        bar = _bar(entry, begin, max(end - begin, 1e-9))
        times = (f"{entry.start - begin:.2f}", f"{entry.seconds:.2f}")
        rows.append((entry.phase, *times, short_ranks(sorted(entry.ranks)), bar))
    return f"{aligned(rows, left=(0, 3, 4))}\n  {_idle_sentence(timeline, entries, num_devices)}"


def _idle_sentence(timeline: CallTimeline, entries: Sequence[TimelineEntry], num_devices: int) -> str:
    """Return the share of time in which ranks are idle, and the reason if it is large."""
    unused = sorted(set(range(num_devices)) - set(timeline.ranks))
    idle = {rank: timeline.idle_share(rank) for rank in timeline.ranks} | dict.fromkeys(unused, 1.0)
    share = sum(idle.values()) / len(idle)
    text = f"ranks are idle {share:.0%} of the time"
    if unused:
        return (
            f"{text}; ranks {short_ranks(unused)} have no call: the search found no faster plan with them, since moves "
            f"and messages among more ranks cost more than they save"
        )
    idlest = {rank for rank in idle if idle[rank] > max(idle.values()) - 0.05}
    others = [entry for entry in entries if not idlest & set(entry.ranks)]
    if share < MUCH_IDLE or not others:
        return text
    longest = max(others, key=lambda entry: entry.seconds)
    return (
        f"{text}, {short_ranks(sorted(idlest))} most: {longest.phase} takes {longest.seconds:.2f} s on ranks "
        f"{short_ranks(sorted(longest.ranks))} alone, and the search found no faster layout for it"
    )


def _bar(entry: TimelineEntry, begin: float, length: float) -> str:
    first = round(BAR_WIDTH * (entry.start - begin) / length)
    last = max(first + 1, round(BAR_WIDTH * (entry.end - begin) / length))
    first, last = min(first, BAR_WIDTH - 1), min(last, BAR_WIDTH)
    return "." * first + "#" * (last - first) + "." * (BAR_WIDTH - last)


def memory_table(priced: PricedPlan) -> str:
    """Return the bytes of every phase on its fullest ranks, the peaks of the fullest ranks, and warnings."""
    entries = priced.forecast.iteration_phases
    rows = [("", "GiB", "ranks", "of that")]
    for phase in dict.fromkeys(entry.phase for entry in entries):
        inside = [entry for entry in entries if entry.phase == phase]
        most = max(inside, key=lambda entry: entry.parts.total).parts
        ranks = [entry.rank for entry in inside if entry.parts.total == most.total]
        rows.append((phase, f"{most.total / 2**30:.1f}", short_ranks(ranks), _largest(most)))
    peaks = (f"  {line}" for line in _peaks(priced))
    lines = [aligned(rows, left=(0, 2, 3)), *peaks, *_tight_warning(priced), *_setup_warning(priced)]
    return "\n".join(lines)


def _largest(parts: MemoryParts) -> str:
    return ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.by_size() if size >= 2**30 / 20)


def _peaks(priced: PricedPlan) -> Iterator[str]:
    """Yield the peaks of the fullest ranks; ranks whose peaks look equal when printed form one group."""
    peaks: dict[int, tuple[int, str]] = {}
    for entry in priced.forecast.iteration_phases:
        if entry.parts.total > peaks.get(entry.rank, (-1, ""))[0]:
            peaks[entry.rank] = (entry.parts.total, entry.phase)
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (size, phase) in sorted(peaks.items(), key=lambda item: (-item[1][0], item[0])):
        groups.setdefault((gib(size), phase), []).append(rank)
    for (total, phase), ranks in list(groups.items())[:MAX_PEAK_GROUPS]:
        room = gib(priced.memory_budget)
        group = f"rank{'s' if len(ranks) > 1 else ''} {short_ranks(sorted(ranks))}"
        yield f"{group}: at most {total} of {room}{_headroom(priced)}, in {phase}"
    if len(groups) > MAX_PEAK_GROUPS:
        yield f"the other ranks: less, down to {list(groups)[-1][0]}"


def _headroom(priced: PricedPlan) -> str:
    share = 1 - priced.usable_bytes / priced.memory_budget
    return f" ({share:.0%} head-room kept)" if share > 1e-3 else ""


def _tight_warning(priced: PricedPlan) -> Iterator[str]:
    if priced.peak.parts.total > TIGHT_MEMORY_FRACTION * priced.memory_budget:
        yield (
            "  little is left for what is not forecast: fragments, libraries, errors of up to 9 % (docs/memory.md); "
            "--headroom 0.1 finds a plan that needs less"
        )


def _setup_warning(priced: PricedPlan) -> Iterator[str]:
    if not priced.can_start:
        yield f"  {setup_shortage(priced)}: a run of this plan cannot start on such devices"


def alternatives_table(
    best: PricedPlan, heuristic: Sequence[PricedPlan], static: Sequence[PricedPlan], *, num_tried: int
) -> str:
    """Return a table of seconds and bytes of the plan, of the default of runs, and of static plans.

    Args:
        heuristic: What `PlanPricer.heuristic` returns.
        static: What `PlanPricer.static` returns.
        num_tried: Number of static plans of which these are the fastest.
    """
    fitting = [priced for priced in static if not priced.missing_bytes]
    plans = [("this plan", best), *zip(("heuristic", "default instead of it"), heuristic, strict=False)]
    plans += [(f"static, {priced.plan.layouts[0].dims}", priced) for priced in fitting]
    rows = [("", "seconds", "relative", "fullest rank")]
    for name, priced in plans:
        if priced.missing_bytes:
            rows.append((name, "-", "-", f"does not fit: lacks {gib(priced.missing_bytes)}"))
        else:
            ratio = f"{priced.seconds / best.seconds:.2f}x"
            rows.append((name, f"{priced.seconds:.2f}", ratio, gib(priced.peak.parts.total)))
    doubt = f"published speed-ups were up to {MAX_SPEEDUP_ERROR} times smaller than estimated ones"
    return f"{aligned(rows)}\n  {doubt}\n  {_static_summary(static, num_tried)}"


def _static_summary(static: Sequence[PricedPlan], num_tried: int) -> str:
    if not static:
        return "no layout suits all calls: there is no static plan"
    found = f"the fastest of {num_tried}"
    if static[0].missing_bytes:
        found = f"none of {num_tried} fits, the smallest lacks {gib(static[0].missing_bytes)}"
    return (
        f"static layouts, one for all calls: {found}; their micro-batches, checkpointing and slots are the best that "
        f"fit"
    )
