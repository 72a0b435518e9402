"""Section on time: one iteration by rank, seconds by purpose over iterations, idle time, speed and predictions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_realloc.recording.events import Validated
from lightning_realloc.recording.pieces import ENVIRONMENTS, HOST, WAITING
from lightning_realloc.recording.reader import RunRecord
from lightning_realloc.report.runs.charts import (
    TEXT,
    Json,
    cell,
    column,
    describe_series,
    line,
    line_chart,
    lines_of,
    quantity,
    section,
    table,
)
from lightning_realloc.report.runs.plan_periods import PlanPeriod, plan_periods
from lightning_realloc.report.runs.rank_time import Purpose, RankTime
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.sections.iteration_lanes import lanes_chart
from lightning_realloc.report.runs.series import Series, bin_edges, bin_means, rounded
from lightning_realloc.tuning.timeline.call_timeline import MOVE_PREFIX

RECORD_IT = "No record of time: train with callbacks=[Timeline()]."
CLOSE_SHARE = 0.9
"""Share of the costliest call's seconds from which another one is named, too."""
MUCH_WAITING = 0.2
"""Mean share of waiting from which advice is about environments, or the layouts."""
MIN_DRAFTED_WEIGHTS = 1_000_000
"""Weights of a model from which drafts are advised; a step of smaller ones costs hardly more than its drafts."""
MUCH_HOST, MUCH_MOVING = 0.15, 0.1
"""Shares of an iteration between calls, and in moves of weights, from which advice is about them."""


def time_section(run: RunFolder) -> Json:
    """Return the section on time."""
    time = run.time
    if run.record is None or time is None or not len(time.steps):
        return section("time", "Time", missing=RECORD_IT)
    charts = [
        lanes_chart(run.record),
        _seconds_chart(time),
        _idle_chart(time),
        _speed_chart(run.metrics.get("tokens_per_s")),
    ]
    return section(
        "time",
        "Time",
        sentences=[
            _costliest(time),
            _advice(run, time),
            *_validation(run.record, time),
            *_left_out_predictions(run.record),
        ],
        charts=[chart for chart in charts if chart is not None],
        tables=[_purposes_table(time), *_prediction_tables(run, time)],
    )


def _costliest(time: RankTime) -> str:
    """Return a sentence about the call that takes most of an iteration."""
    part = time.settled
    whole = time.iteration_seconds(part)
    calls = {purpose: time.slowest(purpose, part) for purpose in time.seconds if purpose[0] == "call"}
    calls = {purpose: seconds for purpose, seconds in calls.items() if np.isfinite(seconds)}
    if not calls or not whole > 0:
        return "The record has no call of more than 0 seconds."
    (_, name), seconds = max(calls.items(), key=lambda one: one[1])
    close = [other for (_, other), s in calls.items() if other != name and s > CLOSE_SHARE * seconds]
    beside = f", {' and '.join(close)} hardly less" if close else ""
    return (
        f"{name} costs most: {quantity(seconds, 's')} of {quantity(whole, 's')} an iteration "
        f"({quantity(seconds / whole, 'share')}; medians, on the slowest rank, without waiting){beside}."
    )


def _validation(record: RunRecord, time: RankTime) -> Iterator[str]:
    """Yield a sentence about the time of validations, if there were any."""
    validations = [event for session in record.sessions for event in session.events if isinstance(event, Validated)]
    if validations:
        spent = sum(one.seconds for one in validations)
        whole = spent + float(np.nansum(np.nanmean(time.whole, axis=0)))
        times = "Validation" if len(validations) == 1 else f"{len(validations)} validations"
        yield (
            f"{times} took {quantity(spent, 's')} between iterations, {quantity(spent / whole, 'share')} of the time; "
            f"no iteration includes it."
        )


def mean_shares(time: RankTime) -> dict[Purpose, float]:
    """Return the share of all ranks' time for each purpose."""
    part = time.settled
    whole = float(np.nansum(time.whole[:, part]))
    return (
        {purpose: float(seconds[:, part].sum()) / whole for purpose, seconds in time.seconds.items()} if whole else {}
    )


def _advice(run: RunFolder, time: RankTime) -> str:
    """Return a suggestion that follows from the shares."""
    shares = mean_shares(time)
    waiting, host = shares.get(("wait", WAITING), 0.0), shares.get(("host", HOST), 0.0)
    moving = sum(share for (kind, _), share in shares.items() if kind == "move")
    calls = {name: share for (kind, name), share in shares.items() if kind == "call"}
    most = max(calls, key=lambda name: calls[name], default="")
    spent = (
        f"Over all ranks, {most} takes {quantity(calls.get(most, 0.0), 'share')} of the time, and waiting "
        f"{quantity(waiting, 'share')}"
    )
    for_environments = shares.get(("environment", ENVIRONMENTS), 0.0)
    if for_environments > MUCH_WAITING:
        return (
            f"Ranks generate nothing for {quantity(for_environments, 'share')} of the time, because they wait for "
            f"environments: generate more samples at a time, or make the slowest tools faster (tool_s/<name>)."
        )
    if waiting > MUCH_WAITING:
        return _advice_on_waiting(run, time, waiting, most)
    if host > MUCH_HOST:
        return (
            f"Ranks spend {quantity(host, 'share')} between calls: look for slow callbacks, loggers and data loaders, "
            f"and log less often."
        )
    if moving > MUCH_MOVING:
        return (
            f"Moves of weights take {quantity(moving, 'share')}: give calls of one role the same layout, or let "
            f"lightning-realloc plan weigh moves against faster calls."
        )
    if most.endswith((".generate", ".train")):
        ways = list(_ways_to_speed_up(most, run))
        return f"{spent}: try {', or '.join(ways)}." if ways else f"{spent}."
    return "No single cause stands out; AutoTuner looks for a faster plan while training."


def _ways_to_speed_up(call: str, run: RunFolder) -> Iterator[str]:
    """Yield settings that make a call faster, of those that help on the run's devices and for its models."""
    assert run.record is not None, "the caller has checked it"
    started = run.record.last.started
    has_drafts = any(name.startswith("tokens_per_step/") for name in run.metrics)
    if call.endswith(".generate") and not has_drafts and max(started.roles.values(), default=0) >= MIN_DRAFTED_WEIGHTS:
        yield "speculation=Speculation()"
    if call.endswith(".train") and set(started.devices) != {"cpu"}:  # no gain was measured there
        yield 'TrainOptions(compile="inductor")'
    if len(started.devices) > 1 and not _has_tuner(run):
        yield f"AutoTuner for other layouts of {call}"


def _advice_on_waiting(run: RunFolder, time: RankTime, waiting: float, most: str) -> str:
    with np.errstate(invalid="ignore"):
        by_rank = np.nanmean(time.idle_share[:, time.settled], axis=1)
    idlest = int(np.nanargmax(by_rank))
    begin = (
        f"Ranks wait {quantity(waiting, 'share')} of the time, rank {time.ranks[idlest]} most "
        f"({quantity(by_rank[idlest], 'share')})"
    )
    has_rebalancing = any(name.startswith("moved_samples/") for name in run.metrics)
    if most.endswith(".generate") and not has_rebalancing and by_rank.max() < 2 * by_rank.min() + 0.05:
        moves = "GenerationOptions(sample_reallocation=True) moves samples to ranks that have none left"
        return f"{begin}: while {most} dominates, {moves}."
    if _has_tuner(run):
        return f"{begin}: no layouts that AutoTuner tried were faster; more samples an iteration give ranks more work."
    return f"{begin}: let AutoTuner or lightning-realloc plan choose layouts that give these ranks work."


def _has_tuner(run: RunFolder) -> bool:
    return any(name.startswith("tuner/") for name in run.metrics)


def _seconds_chart(time: RankTime) -> Json:
    """Return seconds by purpose of the rank that waits least in each iteration; they add up to the iteration."""
    edges = bin_edges(len(time.steps))
    waits = np.where(np.isfinite(time.whole), time.waiting, np.inf)
    rank = waits.argmin(axis=0)
    columns = np.arange(len(time.steps))
    lines = []
    for (kind, name), seconds in sorted(time.seconds.items(), key=lambda one: _order(one[0])):
        lines.append(line(name, time.steps[edges], bin_means(seconds[rank, columns], edges), purpose=kind))
    return line_chart(
        "seconds",
        "Seconds by purpose, on the rank that waits least",
        "s",
        lines,
        summary=f"{_costliest(time)} Means of up to {-(-len(time.steps) // len(edges))} iterations.",
        stacked=True,
    )


def _order(purpose: Purpose) -> tuple[int, str]:
    kinds = ("call", "environment", "move", "offload", "save", "other", "host", "wait")
    return kinds.index(purpose[0]) if purpose[0] in kinds else len(kinds), purpose[1]


def _idle_chart(time: RankTime) -> Json:
    """Return the mean idle share, with the envelope over ranks."""
    edges = bin_edges(len(time.steps))
    binned = bin_means(time.idle_share, edges)
    known = np.isfinite(binned).any(axis=0)
    steps, binned = time.steps[edges][known], binned[:, known]
    mean, low, high = (reduce(binned, axis=0) for reduce in (np.nanmean, np.nanmin, np.nanmax))
    average = float(np.nanmean(time.idle_share)) if known.any() else float("nan")
    one = line(f"mean of {len(time.ranks)} ranks", steps, mean, low=rounded(low), high=rounded(high))
    summary = f"Ranks wait {quantity(average, 'share')} of the time on average; the band spans all ranks."
    return line_chart("idle", "Idle share", "share", [one], summary=summary)


def _speed_chart(speed: Series | None) -> Json | None:
    if speed is None or not len(speed.finite().steps):
        return None
    lines, summary = lines_of(speed, "prompts and responses"), describe_series(speed, "tokens/s")
    return line_chart("speed", "Tokens per second", "tokens/s", lines, summary=summary)


def _purposes_table(time: RankTime) -> Json:
    shares = mean_shares(time)
    rows = [
        [name, kind, cell(time.slowest((kind, name), time.settled), "s"), cell(shares.get((kind, name), 0.0), "share")]
        for kind, name in sorted(time.seconds, key=_order)
    ]
    columns = [
        column("purpose", TEXT),
        column("kind", TEXT),
        column("seconds, slowest rank"),
        column("share, all ranks"),
    ]
    return table(
        "purposes", "Seconds by purpose", columns, rows, note="Medians over iterations, without the first two."
    )


def _prediction_tables(run: RunFolder, time: RankTime) -> Iterator[Json]:
    """Yield predicted and measured seconds of the latest plan with a prediction."""
    assert run.record is not None, "the caller has checked it"
    predicted = [one for one in plan_periods(run.record) if one.predicted_seconds is not None]
    if predicted:
        yield predicted_table(predicted[-1], time)


def _left_out_predictions(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if predictions are left out."""
    periods = plan_periods(record)
    if any(one.predicted for one in periods) and not any(one.predicted_seconds for one in periods):
        devices = " and ".join(sorted(set(record.last.started.devices)))
        yield (
            f"Predicted seconds are left out: nothing was measured, and no data sheet of {devices} is known. "
            f"callbacks=[AutoTuner()] measures passes on it."
        )


def predicted_table(period: PlanPeriod, time: RankTime) -> Json:
    """Return predicted and measured seconds of one plan, by call and move."""
    predicted = period.predicted_seconds
    assert predicted is not None, "a period without a prediction has nothing to compare"
    part = period.settled(time)
    by_phase: dict[str, dict[int, float]] = {}
    for entry in predicted.entries:
        for rank in entry.ranks:
            seconds = by_phase.setdefault(entry.phase, {})
            seconds[rank] = seconds.get(rank, 0.0) + entry.seconds
    rows = []
    for phase, seconds in by_phase.items():
        purpose = ("move" if phase.startswith(MOVE_PREFIX) else "call", phase)
        measured = time.slowest(purpose, part) if purpose in time.seconds else float("nan")
        rows.append(_compared(phase, max(seconds.values()), measured))
    rows.append(_compared("an iteration", predicted.seconds_per_iteration, time.iteration_seconds(part)))
    columns = [column("call or move", TEXT), *map(column, ("predicted", "measured", "measured / predicted"))]
    note = f"Predicted from {predicted.source}; measured: medians on the slowest rank, without waiting."
    return table("predicted-seconds", "Predicted and measured seconds", columns, rows, note=note)


def _compared(name: str, predicted: float, measured: float) -> list[object]:
    ratio = measured / predicted if predicted > 0 else float("nan")
    return [name, cell(predicted, "s"), cell(measured, "s"), cell(ratio, "x")]
