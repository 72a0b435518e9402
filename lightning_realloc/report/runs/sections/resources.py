"""Sections on moves of weights and on memory: bytes, rates and peaks, next to the least bytes and to predictions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_realloc.recording.events import PlanPredicted
from lightning_realloc.report.runs.charts import TEXT, Json, cell, column, line, line_chart, quantity, section, table
from lightning_realloc.report.runs.plan_periods import PlanPeriod, plan_periods
from lightning_realloc.report.runs.rank_time import RankTime
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.series import Values, bin_edges, bin_means

GIB = 2.0**30
MAX_BARS = 64
"""Ranks of a bar chart; of more, those with the largest peaks are shown."""
DRAWN_SHARE = 0.1
"""Share of a device's memory that the largest peak must reach for a chart to show the device's limit: peaks would be
flat below it otherwise."""
FULL_SHARE = 0.9
"""Share of a device's memory above which a sentence says how little is left."""


def moves_section(run: RunFolder) -> Json:
    """Return the section on moves of weights."""
    title, time = "Moves of weights", run.time
    if time is None:
        return section("moves", title, missing="No record of moves: train with callbacks=[Timeline()].")
    if not time.moves:
        return section("moves", title, missing="No call needed weights of another layout: nothing moved.")
    rows, num_moves, total = [], 0, 0.0
    for call, (seconds, moved, minimum) in sorted(time.moves.items()):
        all_moved, least = float(np.nansum(moved)), float(np.nansum(minimum))
        spent, number = float(np.nansum(seconds)), int(np.isfinite(seconds).sum())
        num_moves, total = num_moves + number, total + all_moved
        rate = cell(all_moved / spent, "bytes/s") if spent else None
        ratio = cell(all_moved / least, "x") if least else None
        rows.append([call, number, cell(np.nanmedian(seconds), "s"), cell(all_moved / number, "bytes"), rate, ratio])
    names = ("moves", "seconds of a move", "bytes of a move", "rate of all ranks", "bytes / least bytes")
    columns = [column("call", TEXT), *map(column, names)]
    sentence = f"Moves sent {quantity(total, 'bytes')} in {num_moves} moves."
    note = "Least bytes: those that ranks needed and did not hold. Seconds: medians on the slowest rank."
    tables = [table("moves", "Moves by call", columns, rows, note=note)]
    return section("moves", title, sentences=[sentence], charts=[_moves_chart(time)], tables=tables)


def _moves_chart(time: RankTime) -> Json:
    edges = bin_edges(len(time.steps))
    lines = []
    for call, values in sorted(time.moves.items()):
        means = bin_means(values[0], edges)
        known = np.isfinite(means)
        lines.append(line(call, time.steps[edges][known], means[known]))
    return line_chart("move-seconds", "Seconds of moves", "s", lines, summary="The table has the same moves by call.")


def memory_section(run: RunFolder) -> Json:
    """Return the section on peak memory of ranks and calls."""
    time = run.time
    if run.record is None or time is None:
        return section("memory", "Memory", missing="No record of memory: train with callbacks=[Timeline()].")
    if not time.peak_bytes:
        missing = "Peak memory of calls could not be measured on these devices."
        return section("memory", "Memory", missing=missing)
    baselines = run.record.last.baseline_bytes
    baseline = np.array([float(baselines.get(rank) or 0.0) for rank in time.ranks])
    peaks = {call: np.maximum(0.0, values - baseline) for call, values in time.peak_bytes.items()}
    period = next((one for one in reversed(plan_periods(run.record)) if one.predicted is not None), None)
    predicted = None if period is None else period.predicted
    return section(
        "memory",
        "Memory",
        sentences=_memory_sentences(peaks, baseline, predicted, time.ranks),
        charts=[_memory_chart(peaks, predicted, time.ranks)],
        tables=[_memory_table(peaks, predicted, time.ranks, period)],
    )


def _memory_sentences(
    peaks: dict[str, Values], baseline: Values, predicted: PlanPredicted | None, ranks: tuple[int, ...]
) -> Iterator[str]:
    call, values = max(peaks.items(), key=lambda one: _largest(one[1]))
    if not np.isfinite(values).any():
        return
    rank = ranks[int(np.nanargmax(values))]
    sentence = f"The largest peak is {quantity(_largest(values), 'bytes')}, in {call} on rank {rank}"
    if predicted is not None and predicted.memory_budget:
        share = _largest(values) / predicted.memory_budget
        sentence += f": {quantity(share, 'share')} of the {quantity(predicted.memory_budget, 'bytes')} of a device"
        if share > FULL_SHARE:
            sentence += "; longer responses may not fit, lightning-realloc plan finds layouts that need less"
    yield f"{sentence}."
    if baseline.any():
        size = quantity(baseline.max(), "bytes")
        yield f"Peaks leave out memory from before the models were built, up to {size}, as predictions do."


def _largest(values: Values) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else float("-inf")


def _memory_chart(peaks: dict[str, Values], predicted: PlanPredicted | None, ranks: tuple[int, ...]) -> Json:
    """Return bars of each rank's peak, of all calls together, next to the predicted one."""
    highest = np.fmax.reduce(list(peaks.values()))
    shown = np.sort(np.argsort(-np.nan_to_num(highest))[:MAX_BARS])
    series: list[Json] = [{"name": "measured peak", "group": "measured", "y": (highest[shown] / GIB).round(4).tolist()}]
    limits = []
    if predicted is not None:
        by_rank = [max((sizes[ranks[at]] for sizes in predicted.peak_bytes.values()), default=0) / GIB for at in shown]
        series.append({"name": "predicted peak", "group": "measured", "y": by_rank, "outlined": True})
        if _largest(highest) >= DRAWN_SHARE * predicted.memory_budget:
            limits = [{"name": "memory of a device", "value": predicted.memory_budget / GIB}]
    return {
        "id": "peaks",
        "title": "Peak memory by rank",
        "kind": "bars",
        "unit": "GiB",
        "categories": [f"rank {ranks[at]}" for at in shown],
        "series": series,
        "limits": limits,
        "wide": len(shown) > 8,
        "summary": f"The largest peak of a rank is {quantity(_largest(highest), 'bytes')}; the table has all calls.",
    }


def _memory_table(
    peaks: dict[str, Values], predicted: PlanPredicted | None, ranks: tuple[int, ...], period: PlanPeriod | None
) -> Json:
    rows = []
    for call, values in peaks.items():
        expected = () if predicted is None else predicted.peak_bytes.get(call, ())
        for at, rank in enumerate(ranks):
            forecast = float(expected[rank]) if rank < len(expected) else float("nan")
            ratio = values[at] / forecast if forecast else float("nan")
            rows.append([call, rank, cell(values[at], "bytes"), cell(forecast, "bytes"), cell(ratio, "x")])
    names = ("rank", "measured peak", "predicted peak", "measured / predicted")
    since = "" if period is None else f" Predicted for the plan of iteration {period.installed.step + 1} on."
    note = f"Largest peaks of the whole run.{since}"
    return table(
        "peaks",
        "Peaks by call and rank",
        [column("call", TEXT), *map(column, names)],
        rows,
        searchable=len(rows) > 15,
        note=note,
    )
