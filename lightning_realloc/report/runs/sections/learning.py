"""Section on learning: rewards, divergence, entropy, lengths, losses and held-out scores over iterations."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lightning_realloc.report.runs.charts import (
    TEXT,
    Json,
    cell,
    column,
    describe_series,
    line,
    line_chart,
    lines_of,
    section,
    table,
)
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.score_words import scores_table
from lightning_realloc.report.runs.sections.findings import MIN_POINTS, find_unusual, num_if_short
from lightning_realloc.report.runs.series import Series, largest_triangles, rounded
from lightning_realloc.scores.question_scores import EVALUATION, interval_names

MAX_FURTHER_CHARTS = 24
"""Charts of metrics that no other chart shows; more make the page long."""
MAX_LINES = 12
"""Lines of a chart; more look alike."""


_HELD_OUT = rf"(val/|{EVALUATION}[^/]+/)"
"""Beginning of the names of metrics of held-out samples."""


class _Chart(NamedTuple):
    """A chart, and the names of the metrics that it shows."""

    key: str
    title: str
    unit: str
    names: str
    """Regular expression of whole names."""


_CHARTS = (
    _Chart("reward", "Reward", "", r"reward(/[^/]+)?|score|rewards/chosen|rewards/rejected"),
    _Chart("held-out", "Held-out score", "", rf"{_HELD_OUT}(reward(/.*)?|score|accuracy.*|(pass|maj)@.*|loss.*)"),
    _Chart("kl", "KL divergence", "nats", r".*/kl|kl|kl_k[123]|.*/behaviour_kl"),
    _Chart("entropy", "Entropy", "nats per token", r"(.*/)?entropy"),
    _Chart("length", "Response length", "tokens", rf"{_HELD_OUT}?response_length"),
    _Chart("stopped", "What ended the responses", "share", rf"{_HELD_OUT}?stopped/.*"),
    _Chart("equal-rewards", "Groups with equal rewards", "share", r"(val/)?frac_reward_zero_std"),
    _Chart("reward-std", "Standard deviation of rewards", "", r"(val/)?(reward|score)_std"),
    _Chart("failed-rewards", "Samples without a reward", "share", rf"{_HELD_OUT}?reward_failures/.*"),
    _Chart("clip", "Clipped tokens", "share", r".*/clip_fraction"),
    _Chart("loss", "Loss", "", r"(?!val/)(.*/)?loss"),
    _Chart("grad-norm", "Gradient norm", "", r"(.*/)?grad_norm"),
    _Chart("skipped", "Skipped optimizer steps", "steps", r".*/skipped_steps"),
    _Chart("learning-rate", "Learning rate", "", r"lr-.*|(.*/)?(lr|learning_rate)"),
)
_ELSEWHERE = (
    r"(seconds|capture_s|reallocation_s|reallocation_GB_per_s|hidden_s|preemptions|tokens_per_step|moved_samples"
    r"|waiting_share|given_bytes|given_bytes_minimum|given_s)/.*"
    rf"|idle_share|tokens_per_s|peak_memory_GiB|tuner/.*|{_HELD_OUT}?response_length/(min|max)"
    rf"|{_HELD_OUT}(accuracy|(pass|maj)@\d+)/(low|high)(/.*)?|{_HELD_OUT}num_questions(/.*)?"
)
"""Names of metrics that other sections show."""


def learning_section(run: RunFolder) -> Json:
    """Return the section on learning."""
    metrics = run.metrics
    score_tables = scores_table(run)
    if not metrics and not score_tables:
        return section(
            "learning",
            "Learning",
            missing="No metrics: train with callbacks=[Timeline()], or with logger=CSVLogger(...) and "
            "log_every_n_steps=1.",
        )
    charts = [chart for one in _CHARTS if (chart := _chart(one, metrics)) is not None]
    charts += _further_charts(metrics)
    findings = find_unusual(run)
    sentences = []
    if (number := num_if_short(metrics)) is not None:
        iterations = "1 iteration" if number == 1 else f"{number} iterations"
        sentences.append(
            f"Too short to judge: most warnings need {MIN_POINTS} iterations, and this run has {iterations}."
        )
    elif not findings:
        sentences.append("Nothing unusual: no warning applies to these metrics.")
    tables = [*score_tables, _final_values(metrics)]
    return section("learning", "Learning", sentences=sentences, findings=findings, charts=charts, tables=tables)


def _chart(chart: _Chart, metrics: Mapping[str, Series]) -> Json | None:
    names = [name for name in metrics if re.fullmatch(chart.names, name) and not re.fullmatch(_ELSEWHERE, name)]
    return _draw(chart, [metrics[name] for name in sorted(names)][:MAX_LINES], metrics)


def _draw(chart: _Chart, shown: Iterable[Series], metrics: Mapping[str, Series]) -> Json | None:
    known = [series for series in shown if not series.is_constant]
    if not known:
        return None
    lines = [one for series in known for one in (_line_with_interval(series, metrics) or lines_of(series))]
    if chart.key == "length":
        lines += list(_shortest_and_longest(metrics))
    summary = " ".join(describe_series(series, chart.unit) for series in known)
    return line_chart(chart.key, chart.title, chart.unit, lines, summary=summary)


def _line_with_interval(series: Series, metrics: Mapping[str, Series]) -> list[Json]:
    """Return the line of a score with its interval as a band; none of a metric without one."""
    ends = [metrics[name] for name in interval_names(series.name) if name in metrics]
    if len(ends) < 2 or any(not np.array_equal(one.steps, series.steps) for one in ends):
        return []
    kept = np.isfinite([series.values, *(one.values for one in ends)]).all(axis=0)
    steps, values, low, high = (one[kept] for one in (series.steps, series.values, *(one.values for one in ends)))
    chosen = largest_triangles(steps, values)
    return [line(series.name, steps[chosen], values[chosen], low=rounded(low[chosen]), high=rounded(high[chosen]))]


def _shortest_and_longest(metrics: Mapping[str, Series]) -> Iterator[Json]:
    """Yield the envelope of the response lengths of each iteration."""
    low, high = (metrics.get(f"response_length/{end}") for end in ("min", "max"))
    if low is None or high is None or len(low.steps) != len(high.steps):
        return
    chosen = largest_triangles(high.steps, high.values)
    for name, series in (("shortest", low), ("longest", high)):
        yield line(name, series.steps[chosen], series.values[chosen], pale=True)


def _constant_metrics(metrics: Mapping[str, Series]) -> str:
    """Return a sentence with the metrics that no chart shows."""
    constant = {name: series.finite().values for name, series in sorted(metrics.items()) if series.is_constant}
    named = [f"{name} {values[0]:.4g}" for name, values in constant.items() if len(values)]
    return f"Constant, and in no chart: {', '.join(named)}." if named else ""


def _further_charts(metrics: Mapping[str, Series]) -> list[Json]:
    """Return charts of the remaining metrics; those of all roles, of all calls and of validation are together."""
    shown = "|".join([*(chart.names for chart in _CHARTS), _ELSEWHERE])
    groups: dict[str, list[Series]] = {}
    for name in sorted(metrics):
        if not re.fullmatch(shown, name):
            groups.setdefault(metric_title(name, trained_roles(metrics)), []).append(metrics[name])
    charts = (
        _draw(_Chart(f"further-{number}", title, "", ""), group[:MAX_LINES], metrics)
        for number, (title, group) in enumerate(groups.items())
    )
    return [chart | {"further": True} for chart in charts if chart is not None][:MAX_FURTHER_CHARTS]


def trained_roles(metrics: Iterable[str]) -> set[str]:
    """Return the roles whose losses are among the metrics."""
    return {name.removesuffix("/loss") for name in metrics if name.endswith("/loss")}


def metric_title(name: str, roles: Container[str]) -> str:
    """Return the title of a metric's chart, without the name of a role or a call.

    >>> metric_title("val/response_length/max", {"actor"}), metric_title("actor/ratio_max", {"actor"})
    ('Response length, max', 'Ratio max')
    """
    for chart in _CHARTS:
        if re.fullmatch(chart.names, name):
            return chart.title
    first, slash, rest = re.sub(f"^{_HELD_OUT}", "", name).partition("/")
    kept = rest if slash and first in roles else first if "." in rest else f"{first}{slash}{rest}"
    words = kept.replace("/", ", ").replace("_", " ")
    return words[:1].upper() + words[1:]


def _final_values(metrics: Mapping[str, Series]) -> Json:
    """Return the table of all metrics but those of single calls."""
    rows = []
    for name, series in sorted(metrics.items()):
        first, last = series.part(0.0, 0.1), series.part(0.9, 1.0)
        if len(first) and not re.fullmatch(_ELSEWHERE, name):
            known = series.finite().values
            rows.append([name, *(cell(value, "") for value in (first.mean(), last.mean(), known.min(), known.max()))])
    columns = [column("metric", TEXT), *map(column, ("first tenth", "last tenth", "smallest", "largest"))]
    return table("final-values", "Metrics", columns, rows, searchable=len(rows) > 15, note=_constant_metrics(metrics))
