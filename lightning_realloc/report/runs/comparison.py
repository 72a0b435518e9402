"""Comparison of runs: their metrics in the same charts, and final values with differences. Pure.

Runs that differ in nothing but their seed are a group, which is shown as its mean and its spread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_realloc.recording.events import PlanInstalled
from lightning_realloc.report.runs.charts import TEXT, Json, cell, column, line, line_chart, line_of, section, table
from lightning_realloc.report.runs.rank_time import RankTime
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.series import Series, Values, largest_triangles, rounded

_SEEDS = ("seed", "seed_everything")
"""Settings in which runs of a group may differ, as in `_OUTPUTS`."""
_OUTPUTS = ("default_root_dir", "save_dir", "dirpath", "path", "version", "ckpt_path")
"""Settings of the Trainer, its loggers and callbacks that name folders to write to."""
_NOT_COMPARED = r"seconds/.*|capture_s/.*|reallocation_.*|response_length/(min|max)|peak_memory_GiB|tuner/.*|lr-.*"
MAX_COMPARED_CHARTS = 40
"""Charts of a comparison; more make the page long."""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """One run, or several that differ in their seed."""

    label: str
    runs: tuple[RunFolder, ...]

    def series(self, name: str) -> list[Series]:
        """Return a metric of the runs that have finite values of it."""
        found = (run.metrics[name].finite() for run in self.runs if name in run.metrics)
        return [series for series in found if len(series.steps)]


def group_runs(runs: Sequence[RunFolder]) -> list[RunGroup]:
    """Return the runs in order, those that differ in their seed alone together.

    A run without ``config.yaml`` stays alone: nothing tells in which settings it differs.
    """
    groups: dict[str, list[RunFolder]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(_settings_of(run) or f"run {number}", []).append(run)
    return [RunGroup(_label(group), tuple(group)) for group in groups.values()]


def _label(group: Sequence[RunFolder]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} with {len(group)} seeds"


def _settings_of(run: RunFolder) -> str | None:
    """Return the settings and the first plan of a run as a text, without seeds and folders of outputs."""
    if run.config is None:
        return None
    plans = [] if run.record is None else [one.plan for one in run.record.last.events if isinstance(one, PlanInstalled)]
    trainer = _without(run.config.get("trainer"), (*_SEEDS, *_OUTPUTS))
    others = {name: value for name, value in run.config.items() if name not in ("trainer", "ckpt_path")}
    return json.dumps([trainer, _without(others, _SEEDS), plans[:1]], sort_keys=True, default=str)


def _without(value: Any, names: Iterable[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def comparison_section(runs: Sequence[RunFolder]) -> Json:
    """Return the section that compares runs with the first one."""
    groups = group_runs(runs)
    names = sorted({name for run in runs for name in run.metrics if not re.fullmatch(_NOT_COMPARED, name)})
    charts = [chart for name in names if (chart := _compared_chart(name, groups)) is not None]
    charts.sort(key=lambda chart: not re.match(r"reward$|score$|val/", chart["title"]))
    kept = charts[:MAX_COMPARED_CHARTS]
    left_out = f" {len(charts) - len(kept)} charts are left out." if len(charts) > len(kept) else ""
    sentences = [f"{len(runs)} runs in {len(groups)} groups, whose runs differ in their seed alone.{left_out}"]
    if any(run.config is None for run in runs):
        sentences.append("Runs without config.yaml are not grouped: LightningCLI and the one-line commands write it.")
    tables = [_final_table(names, groups), _seconds_table(groups)]
    return section("comparison", "Comparison", sentences=sentences, charts=kept, tables=tables)


def _compared_chart(name: str, groups: Sequence[RunGroup]) -> Json | None:
    lines = [
        _mean_line(group.label, known) | {"place": place}
        for place, group in enumerate(groups)
        if (known := group.series(name))
    ]
    if len(lines) < 2 or all(len(set(one["y"])) < 2 for one in lines):
        return None
    summary = f"{name} of {len(lines)} runs or groups of seeds; the table has their final values."
    return line_chart(f"compared-{name}", name, "", lines, summary=summary)


def _mean_line(label: str, known: Sequence[Series]) -> Json:
    """Return one run's line, or the mean of several with the envelope, over the steps that all of them have."""
    if len(known) == 1:
        return line_of(known[0], label)
    steps = known[0].steps
    for series in known[1:]:
        steps = np.intersect1d(steps, series.steps)
    if not len(steps):
        return _mean_line(label, known[:1])
    values = np.stack([series.values[np.searchsorted(series.steps, steps)] for series in known])
    mean = values.mean(axis=0)
    chosen = largest_triangles(steps, mean)
    low, high = (rounded(ends[chosen]) for ends in (values.min(axis=0), values.max(axis=0)))
    return line(label, steps[chosen], mean[chosen], low=low, high=high)


def _final_table(names: Iterable[str], groups: Sequence[RunGroup]) -> Json:
    """Return final values: of groups their mean and spread, and the difference to the first group's mean."""
    rows = []
    for name in names:
        finals = [np.array([series.final_mean() for series in group.series(name)]) for group in groups]
        cells: list[Json | None] = [_mean_and_spread(finals[0])]
        for values in finals[1:]:
            both = len(values) and len(finals[0])
            cells += [_mean_and_spread(values), cell(values.mean() - finals[0].mean(), "") if both else None]
        rows.append([name, *cells])
    headers = [groups[0].label]
    for group in groups[1:]:
        headers += [group.label, "difference to the first"]
    note = "Means of the last tenth of each run; of groups, mean ± half of the range over seeds."
    columns = [column("metric", TEXT), *map(column, headers)]
    return table("compared", "Final values", columns, rows, searchable=len(rows) > 15, note=note)


def _mean_and_spread(values: Values) -> Json | None:
    if not len(values):
        return None
    shown = cell(values.mean(), "")
    if shown is not None and len(values) > 1:
        shown["text"] += f" ± {np.ptp(values) / 2:.2g}"
    return shown


def _seconds_table(groups: Sequence[RunGroup]) -> Json:
    """Return the median seconds of calls of the first run of each group."""
    times = [group.runs[0].time for group in groups]
    purposes = sorted({one for time in times if time is not None for one in time.seconds if one[0] in ("call", "move")})
    rows = [
        ["an iteration", *(None if one is None else cell(one.iteration_seconds(one.settled), "s") for one in times)]
    ]
    for purpose in purposes:
        rows.append([purpose[1], *_seconds_cells(purpose, times)])
    columns = [column("call or move", TEXT), *(column(group.runs[0].name) for group in groups)]
    note = "Medians on the slowest rank, without waiting; of groups, of the first run. Recorded by Timeline."
    return table("compared-seconds", "Seconds by call", columns, rows, note=note)


def _seconds_cells(purpose: tuple[str, str], times: Iterable[RankTime | None]) -> Iterator[Json | None]:
    for time in times:
        has_it = time is not None and purpose in time.seconds
        yield cell(time.slowest(purpose, time.settled), "s") if time is not None and has_it else None
