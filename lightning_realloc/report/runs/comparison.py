"""Comparison of runs: their metrics in the same charts, and final values with differences. Pure.

Runs that differ in nothing but their seed are a group, which is shown as its mean and its spread.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_realloc.errors import counted
from lightning_realloc.recording.events import PlanInstalled
from lightning_realloc.report.runs.charts import TEXT, Json, cell, column, line, line_chart, line_of, section, table
from lightning_realloc.report.runs.rank_time import RankTime
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.score_words import accuracy_sentences, compare_runs, compared_table
from lightning_realloc.report.runs.sections.learning import metric_title, trained_roles
from lightning_realloc.report.runs.series import Series, Values, largest_triangles, rounded
from lightning_realloc.rewards.texts import without_secrets
from lightning_realloc.scores.question_scores import HELD_OUT

_SEEDS = ("seed", "seed_everything")
"""Settings in which runs of a group may differ, as in `_OUTPUTS`."""
_OUTPUTS = ("default_root_dir", "save_dir", "dirpath", "path", "version", "ckpt_path")
"""Settings of the Trainer, its loggers and callbacks that name folders to write to."""
_NOT_COMPARED = (
    r"seconds/.*|capture_s/.*|environment_s|waiting_share/.*|tool_s/.*|reallocation_.*|response_length/(min|max)|"
    r"peak_memory_GiB|tuner/.*|lr-.*|.*@\d+/(low|high)(/.*)?|.*/accuracy/(low|high)(/.*)?|.*/num_questions(/.*)?"
)
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
    trainer = _without(run.config.get("trainer"), (*_SEEDS, *_OUTPUTS))
    others = {name: value for name, value in run.config.items() if name not in ("trainer", "ckpt_path")}
    plans = [] if run.record is None else [one.plan for one in run.record.last.events if isinstance(one, PlanInstalled)]
    return json.dumps([trainer, _without(others, _SEEDS), plans[:1]], sort_keys=True, default=str)


def _without(value: Any, names: Iterable[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def differences_section(runs: Sequence[RunFolder]) -> Json:
    """Return the section with the settings in which runs differ, of their configurations and of their records."""
    groups = group_runs(runs)
    settings = [[flat_settings(run) for run in group.runs] for group in groups]
    names = dict.fromkeys(name for group in settings for run in group for name in run)
    rows = (
        [name, *(", ".join(dict.fromkeys(run.get(name, "–") for run in group)) for group in settings)] for name in names
    )
    known = [place for place, group in enumerate(settings, 1) if any(group)]
    differing = [row for row in rows if len({row[place] for place in known}) > 1]
    title = "Differences of settings"
    if not differing:
        missing = "No setting that the runs left in config.yaml or in their records differs, but seeds and folders."
        if len(known) < len(groups):
            without = [group.label for group, has in zip(groups, map(any, settings), strict=True) if not has]
            missing = f"Without settings, in config.yaml or a record: {', '.join(without)}."
        return section("differences", title, missing=missing)
    columns = [column("setting", TEXT), *(column(group.label, TEXT) for group in groups)]
    note = "Of config.yaml, and of the record's beginning; folders of outputs are left out."
    tables = [table("differences", "Settings", columns, differing, searchable=len(differing) > 15, note=note)]
    return section("differences", title, tables=tables)


def flat_settings(run: RunFolder) -> dict[str, str]:
    """Return name -> value of a run's settings, such as ``model.learning_rate``; without secrets and output folders."""
    found: dict[str, str] = {}
    if run.record is not None:
        started = run.record.sessions[0].started
        plans = [one.plan for one in run.record.last.events if isinstance(one, PlanInstalled)][:1]
        found |= {"algorithm": started.algorithm, "precision": started.precision}
        found |= {"devices": ", ".join(f"{n} {name}" for name, n in Counter(started.devices).items())}
        found |= {f"weights of {role}": f"{number:,}" for role, number in started.roles.items()}
        found |= dict(_leaves("plan", _without(plans, ())))
    config = {name: value for name, value in (run.config or {}).items() if name != "ckpt_path"}
    if "trainer" in config:
        config["trainer"] = _without(config["trainer"], _OUTPUTS)
    return found | dict(_leaves("", without_secrets("", config)))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every value inside; ``init_args`` and the like are left out of names."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            inner = name if key in ("class_path", "init_args", "calls") else f"{name}.{key}".lstrip(".")
            yield from _leaves(inner, one)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(name if len(value) == 1 else f"{name}.{number}", one)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def comparison_section(runs: Sequence[RunFolder]) -> Json:
    """Return the section that compares runs with the first one."""
    groups = group_runs(runs)
    names = sorted({name for run in runs for name in run.metrics if not re.fullmatch(_NOT_COMPARED, name)})
    names.sort(key=lambda name: not (name in ("reward", "score") or name.startswith(HELD_OUT)))
    charts = [chart for name in names if (chart := _compared_chart(name, groups)) is not None]
    kept = charts[:MAX_COMPARED_CHARTS]
    num_more = len(charts) - len(kept)
    left_out = f" {counted(num_more, 'chart')} {'is' if num_more == 1 else 'are'} left out." if num_more else ""
    number = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    sentences = [f"{number}, whose runs differ in their seed alone.{left_out}"]
    if any(run.config is None for run in runs):
        sentences.append("Runs without config.yaml are not grouped: LightningCLI and the one-line commands write it.")
    compared = [one for other in runs[1:] for one in compare_runs(runs[0], other)]
    sentences += accuracy_sentences(compared)
    tables = [*compared_table(compared), _final_table(sorted(names), groups), _seconds_table(groups)]
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
    title = metric_title(
        name, trained_roles(metric for group in groups for run in group.runs for metric in run.metrics)
    )
    return line_chart(f"compared-{name}", f"{title} ({name})", "", lines, summary=summary)


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
