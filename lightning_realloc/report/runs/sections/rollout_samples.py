"""Sections on samples: rollouts as a table, and how speculation, rebalancing and the cache treated them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np

from lightning_realloc.environments.transcript import message_text
from lightning_realloc.report.runs.charts import (
    NUMBER,
    PICTURES,
    TEXT,
    Json,
    column,
    describe_series,
    line,
    line_chart,
    lines_of,
    picture_cell,
    quantity,
    section,
    table,
)
from lightning_realloc.report.runs.run_folder import MAX_CELL_CHARACTERS, RunFolder, as_number
from lightning_realloc.report.runs.series import Series
from lightning_realloc.report.runs.thumbnails import IMAGES_COLUMN, thumbnail_names

_GENERATION = (
    ("tokens_per_step", "Tokens per decoding step", "tokens", "speculation=Speculation()"),
    ("moved_samples", "Samples that changed their rank", "samples", "GenerationOptions(sample_reallocation=True)"),
    ("preemptions", "Preempted samples", "samples", "GenerationOptions(max_cache_bytes=...)"),
    ("waiting_share", "Share of the call spent waiting for environments", "share", "environment or tools"),
    ("given_bytes", "Bytes of weights given to vLLM", "bytes", "engine='vllm'"),
    ("hidden_s", "Seconds of inference during generation", "s", "generation_chunks"),
)
"""Prefix of a metric, title, unit, and the setting with which it is logged."""
_FIRST = ("step", "reward")
"""Columns of samples on the left; other numbers follow them, then texts."""
LITTLE_SAVED = 0.05
"""Share of saved decoding steps below which drafts cost about as much as they save."""


def generation_section(run: RunFolder) -> Json:
    """Return the section on speculation, rebalancing, preemption and chunks."""
    charts, sentences, unused = [], list(_saved_steps(run)), []
    for prefix, title, unit, setting in _GENERATION:
        found = [series for name, series in sorted(run.metrics.items()) if name.startswith(f"{prefix}/")]
        if not found:
            unused.append(setting)
            continue
        summary = " ".join(describe_series(series, unit) for series in found)
        sentences.append(summary)
        lines = [one for series in found if not series.is_constant for one in _lines_of_call(series)]
        if lines:
            charts.append(line_chart(prefix.replace("_", "-"), title, unit, lines, summary=summary))
    missing = f"Not in use, or not logged: {', '.join(unused)}." if unused else None
    return section("generation", "Speculation and rebalancing", sentences=sentences, charts=charts, missing=missing)


def _lines_of_call(series: Series) -> list[Json]:
    return lines_of(series, series.name.partition("/")[2])


def _saved_steps(run: RunFolder) -> Iterator[str]:
    """Yield a sentence for each call with drafts: the share of decoding steps that they save."""
    for name, series in sorted(run.metrics.items()):
        if not name.startswith("tokens_per_step/") or not len(series.part(0.9, 1.0)):
            continue
        call, saved = name.partition("/")[2], 1.0 - 1.0 / max(1.0, series.final_mean())
        advice = "" if saved >= LITTLE_SAVED else ": leave speculation out, or try another drafter"
        yield f"Drafts save {quantity(saved, 'share')} of the decoding steps of {call} in the last tenth{advice}."


def rollouts_section(run: RunFolder) -> Json:
    """Return the section with sampled prompts, responses and rewards, the newest first."""
    rollouts = run.rollouts
    if not rollouts.rows:
        missing = (
            "No samples: callbacks=[RolloutTable()] with a CSVLogger writes rollouts.csv in the first and every 50th "
            "iteration, and the commands in every 10th."
        )
        return section("rollouts", "Rollouts", missing=missing)
    numeric = [
        all(not row[at] or as_number(row[at]) is not None for row in rollouts.rows)
        for at in range(len(rollouts.columns))
    ]
    order = sorted(range(len(numeric)), key=lambda at: (rollouts.columns[at] not in _FIRST, not numeric[at]))
    kinds = [NUMBER if is_number else TEXT for is_number in numeric]
    if rollouts.thumbnails:
        kinds[rollouts.columns.index(IMAGES_COLUMN)] = PICTURES
    columns = [column(rollouts.columns[at], kinds[at]) for at in order]
    rows = [[_cell(row[at], kinds[at]) for at in order] for row in rollouts.rows]
    left_out = f"{rollouts.num_left_out:,} older samples are left out. " if rollouts.num_left_out else ""
    note = f"{left_out}Cells are cut at {MAX_CELL_CHARACTERS:,} characters."
    title, shown = "Samples, the newest first", rollouts.thumbnails
    tables = [table("rollouts", title, columns, rows, searchable=True, note=note, pictures=shown)]
    charts = [chart for chart in [_rewards_chart(run)] if chart is not None]
    return section("rollouts", "Rollouts", charts=charts, tables=tables, conversations=run.conversations)


def _cell(text: str, kind: str) -> str | Json | None:
    return picture_cell(thumbnail_names(text)) if kind == PICTURES else _conversation(text)


def _conversation(text: str) -> str:
    """Return messages that a cell holds as JSON as lines that begin with their role; any other text as it is."""
    try:
        messages = json.loads(text) if text.startswith("[{") else None
        return (
            text
            if messages is None
            else "\n".join(f"{one['role']}: {message_text(one['content'])}" for one in messages)
        )
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError):  # other JSON, or JSON that was cut
        return text


def _rewards_chart(run: RunFolder) -> Json | None:
    """Return the rewards of the shown samples by iteration: their mean, with the envelope."""
    columns = run.rollouts.columns
    if "step" not in columns or "reward" not in columns:
        return None
    by_step: dict[float, list[float]] = {}
    for row in run.rollouts.rows:
        step, reward = (as_number(row[columns.index(name)]) for name in ("step", "reward"))
        if step is not None and reward is not None and math.isfinite(step) and math.isfinite(reward):
            by_step.setdefault(step, []).append(reward)
    if not by_step:
        return None
    steps = sorted(by_step)
    low, high, mean = ([float(reduce(by_step[step])) for step in steps] for reduce in (min, max, np.mean))
    shown = line("mean of the samples", steps, mean, low=low, high=high)
    summary = f"Rewards of {len(run.rollouts.rows)} samples in {len(steps)} iterations; the table has each."
    return line_chart("sample-rewards", "Rewards of these samples", "", [shown], summary=summary)
