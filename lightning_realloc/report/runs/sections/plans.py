"""Section on plans: those in use by iteration, the tuner's trials, and predicted and measured seconds of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from lightning_realloc.report.runs.charts import (
    TEXT,
    Json,
    cell,
    column,
    line_chart,
    line_of,
    quantity,
    section,
    table,
)
from lightning_realloc.report.runs.plan_periods import PlanPeriod, plan_periods
from lightning_realloc.report.runs.rank_time import RankTime
from lightning_realloc.report.runs.run_folder import RunFolder


def plans_section(run: RunFolder) -> Json:
    """Return the section on plans and the tuner."""
    title = "Plans and tuner"
    periods = [] if run.record is None else plan_periods(run.record)
    if run.time is None or not periods:
        return section("plans", title, missing="No record of plans: train with callbacks=[Timeline()].")
    charts = []
    tuner = [run.metrics[name] for name in ("tuner/trials", "tuner/drift") if name in run.metrics]
    for series in tuner:
        summary = f"{series.name} ends at {quantity(series.final_mean())}."
        charts.append(line_chart(series.name.replace("/", "-"), series.name, "", [line_of(series)], summary=summary))
    return section(
        "plans",
        title,
        sentences=_plan_sentences(periods, has_tuner=bool(tuner)),
        charts=charts,
        tables=[_plan_table(periods[-1].installed.plan), _periods_table(periods, run.time)],
    )


def _plan_sentences(periods: list[PlanPeriod], *, has_tuner: bool) -> Iterator[str]:
    changes = sum(one.installed.plan != after.installed.plan for one, after in pairwise(periods))
    number = len({str(one.installed.plan) for one in periods})
    times = "once" if changes == 1 else f"{changes} times"
    yield f"The run used {number} plans, and changed its plan {times}." if changes else "The run used one plan."
    if not has_tuner:
        yield "No tuner: callbacks=[AutoTuner()] looks for a faster plan while training."


def _plan_table(plan: Mapping[str, Any]) -> Json:
    """Return the calls of a plan with their layouts and options."""
    rows = [[call, *_layout_and_options(value)] for call, value in dict(plan.get("calls", {})).items()]
    options = {name: value for name, value in plan.items() if name != "calls"}
    note = "".join(f"{name}: {value}. " for name, value in options.items())
    columns = [column(name, TEXT) for name in ("call", "layout", "options")]
    return table("plan", "Latest plan", columns, rows, note=note.strip())


def _layout_and_options(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        options = ", ".join(f"{name}={one}" for name, one in value.items() if name != "layout")
        return [str(value.get("layout", "")), options]
    return [str(value), ""]


def _periods_table(periods: list[PlanPeriod], time: RankTime) -> Json:
    """Return predicted and measured seconds of the plans in use."""
    first: dict[str, int] = {}
    rows = []
    for period in periods:
        number = first.setdefault(str(period.installed.plan), len(first) + 1)
        part = period.iterations(time)
        steps = time.steps[part]
        measured = time.iteration_seconds(period.settled(time) if len(steps) > 1 else part)
        predicted = math.nan if period.predicted_seconds is None else period.predicted_seconds.seconds_per_iteration
        begin, end = period.installed.step + 1, int(steps[-1]) if len(steps) else None
        calls = dict(period.installed.plan.get("calls", {}))
        layouts = ", ".join(f"{call} {_layout_and_options(value)[0]}" for call, value in calls.items())
        ratio = measured / predicted if predicted else math.nan
        row = [number, begin, end, cell(predicted, "s"), cell(measured, "s"), cell(ratio, "x"), layouts]
        rows.append(row)
    names = ("plan", "from iteration", "to iteration", "predicted", "measured", "measured / predicted")
    columns = [*map(column, names), column("layouts", TEXT)]
    return table("plans", "Plans in use", columns, rows, note="Measured: median seconds of an iteration.")
