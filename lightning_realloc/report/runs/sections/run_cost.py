"""Section on cost: time, device-hours, money and energy so far and at the end, and under the fastest other plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from lightning_realloc.recording.events import RunEnded
from lightning_realloc.recording.reader import RunRecord, Session
from lightning_realloc.report.run_forecast import MIN_ITERATIONS, WARM_UP_ITERATIONS, Cost, Interval, forecast_cost
from lightning_realloc.report.runs.charts import TEXT, Json, column, section, table
from lightning_realloc.report.runs.plan_periods import plan_periods
from lightning_realloc.report.runs.rank_time import RankTime
from lightning_realloc.report.runs.run_folder import RunFolder

TITLE = "What will it cost"
_OTHER_CLUSTERS = (
    "For other clusters: lightning-realloc plan --sweep nodes=1,2,4 --price-per-gpu-hour PRICE, with the models and "
    "lengths of this run."
)


def cost_section(run: RunFolder, price: float | None = None) -> Json:
    """Return the section on cost.

    Args:
        run: The run.
        price: Price of a device-hour, in any currency; None: no money is shown.
    """
    if run.record is None or run.time is None:
        return section("cost", TITLE, missing="No record of time: train with callbacks=[Timeline()].")
    durations = iteration_seconds(run.record)
    remaining = _remaining(run.record)
    cost = forecast_cost(
        durations,
        remaining or 0,
        num_devices=len(run.record.last.started.devices),
        price_per_device_hour=price,
        joules=_joules(run.record),
    )
    if cost is None:
        least = WARM_UP_ITERATIONS + MIN_ITERATIONS
        return section("cost", TITLE, missing=f"A forecast needs {least} iterations; there are {len(durations)}.")
    sentences = [*_sentences(cost, remaining, price), *_other_plan(run.record, run.time, cost), _OTHER_CLUSTERS]
    return section("cost", TITLE, sentences=sentences, tables=[_cost_table(cost, is_over=remaining == 0)])


def iteration_seconds(record: RunRecord) -> list[float]:
    """Return the seconds of every iteration, with all that happened since the one before in its session."""
    found: list[float] = []
    for session in record.sessions:
        moments = {row.step: row.unix_s for row in reversed(session.metrics)}  # the first row of a step
        times = [session.started.unix_s, *(moments[step] for step in sorted(moments))]
        found += [max(0.0, after - before) for before, after in pairwise(times)]
    return found


def _remaining(record: RunRecord) -> int | None:
    """Return the number of iterations to come; 0 after the end, None if the run has no limit."""
    last = record.last
    if any(isinstance(event, RunEnded) for event in last.events):
        return 0
    if last.started.max_steps is None:
        return None
    return max(0, last.started.max_steps - _latest_step(last))


def _latest_step(session: Session) -> int:
    return max([session.started.step, *(row.step for row in session.metrics)])


def _joules(record: RunRecord) -> float | None:
    """Return the energy of all ranks so far; None if any iteration lacks it."""
    energies = [one.energy_j for session in record.sessions for made in session.ranks.values() for one in made]
    known = [energy for energy in energies if energy is not None]
    return sum(known) if known and len(known) == len(energies) else None


def _sentences(cost: Cost, remaining: int | None, price: float | None) -> Iterator[str]:
    begin = "The run took" if remaining == 0 else "So far the run took"
    yield f"{begin} {duration(cost.spent_s)}: {cost.spent_device_hours:,.2f} device-hours."
    if remaining is None:
        yield "It has no limit of iterations, so there is no forecast of its end: set max_steps."
    elif remaining:
        low, high = cost.seconds.low - cost.spent_s, cost.seconds.high - cost.spent_s
        expected = cost.seconds.expected - cost.spent_s
        yield (
            f"It ends in {duration(expected)} ({duration(low)} to {duration(high)} in nine of ten cases), after "
            f"{remaining:,} more iterations."
        )
    if price is None:
        yield "With --price-per-gpu-hour PRICE the report shows money, too."


def _other_plan(record: RunRecord, time: RankTime, cost: Cost) -> Iterator[str]:
    """Yield a sentence about the fastest plan that the run measured or predicted, if it is another than the latest."""
    seconds: dict[str, float] = {}
    latest = ""
    for period in plan_periods(record):
        measured = time.iteration_seconds(period.settled(time))
        if np.isfinite(measured):
            seconds[str(period.installed.plan)] = measured
            latest = str(period.installed.plan)
    if len(seconds) < 2:
        return
    best = min(seconds, key=seconds.__getitem__)
    if best == latest:
        yield "No plan that the run tried was faster than the latest one."
        return
    ratio = seconds[best] / seconds[latest]
    yield (
        f"An earlier plan took {ratio:.2f} times as long per iteration: the whole run would take about "
        f"{duration(ratio * cost.seconds.expected)} under it, {ratio * cost.device_hours.expected:,.2f} device-hours."
    )


def _cost_table(cost: Cost, *, is_over: bool) -> Json:
    """Return the cost so far and at the end; of a run that is over, the cost alone."""
    rows: list[list[str]] = [_row("wall time", duration(cost.spent_s), cost.seconds, duration)]
    hours = cost.device_hours
    rows.append(_row("device-hours", f"{cost.spent_device_hours:,.2f}", hours, "{:,.2f}".format))
    share = cost.spent_s / cost.seconds.expected
    if cost.price is not None:
        rows.append(_row("price", f"{share * cost.price.expected:,.2f}", cost.price, "{:,.2f}".format))
    if cost.energy_kwh is not None:
        rows.append(_row("energy, kWh", f"{share * cost.energy_kwh.expected:,.3g}", cost.energy_kwh, "{:,.3g}".format))
    if is_over:
        columns = [column(name, TEXT) for name in ("quantity", "in all")]
        return table("cost", "Cost of the run", columns, [row[:2] for row in rows])
    columns = [column(name, TEXT) for name in ("quantity", "so far", "at the end", "at least", "at most")]
    note = "The bounds hold in nine of ten cases if the rest of the run is like the part so far."
    return table("cost", "Cost of the run", columns, rows, note=note)


def _row(name: str, spent: str, interval: Interval, show: Callable[[float], str]) -> list[str]:
    return [name, spent, *map(show, (interval.expected, interval.low, interval.high))]


def duration(seconds: float) -> str:
    """Return seconds for people in at most two units, as in ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds) if seconds < 600 else 60 * round(seconds / 60)
    minutes, hours, days = (whole // size for size in (60, 3600, 86400))
    if days:
        parts = [(days, "d"), (hours % 24, "h")]
    elif hours:
        parts = [(hours, "h"), (minutes % 60, "min")]
    else:
        parts = [(minutes, "min"), (whole % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)
