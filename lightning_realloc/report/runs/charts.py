"""Values of JSON that a report consists of: sections with sentences, findings, charts and tables. Pure.

The page, the Markdown and the JSON of a report show the same values. Texts are plain: no HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lightning_realloc.report.formats import gib
from lightning_realloc.report.runs.series import Series, Values, largest_triangles, rounded, trailing_mean

Json = dict[str, Any]

SMOOTHED_FROM = 60
"""Points of a line from which a trailing mean is drawn over it."""
SMOOTHED_SHARE = 20
"""A trailing mean covers one of this many parts of the run."""
NUMBER, TEXT, PICTURES = "number", "text", "pictures"
"""Kinds of columns."""


def section(
    key: str,
    title: str,
    *,
    sentences: Iterable[str] = (),
    findings: Iterable[Json] = (),
    charts: Iterable[Json] = (),
    tables: Iterable[Json] = (),
    conversations: Iterable[Json] = (),
    missing: str | None = None,
) -> Json:
    """Return a section; ``missing``: the line for one without data, which names the callback or setting to add."""
    return {
        "id": key,
        "title": title,
        "sentences": list(sentences),
        "findings": list(findings),
        "charts": list(charts),
        "tables": list(tables),
        "conversations": list(conversations),
        "missing": missing,
    }


def finding(key: str, text: str, advice: str, *, level: str = "warning") -> Json:
    """Return an observation with its numbers, and the advice that follows; level ``warning`` or ``note``."""
    return {"id": key, "level": level, "text": text, "advice": advice}


def line_chart(key: str, title: str, unit: str, lines: Iterable[Json], *, summary: str, stacked: bool = False) -> Json:
    """Return a chart of lines over iterations; ``summary`` is its text alternative."""
    kind = "stack" if stacked else "lines"
    return {"id": key, "title": title, "kind": kind, "unit": unit, "series": list(lines), "summary": summary}


def line(name: str, x: Sequence[float] | Values, y: Iterable[float], **options: Any) -> Json:
    """Return a line; options: ``low`` and ``high`` for an envelope, ``pale`` for values that a trend is drawn over."""
    return {"name": name, "x": [int(step) for step in x], "y": rounded(y), **options}


def line_of(series: Series, label: str | None = None) -> Json:
    """Return the finite values of a metric as a line with fewer points."""
    known = series.finite()
    chosen = largest_triangles(known.steps, known.values)
    return line(series.name if label is None else label, known.steps[chosen], known.values[chosen])


def lines_of(series: Series, label: str | None = None) -> list[Json]:
    """Return a metric as a line with fewer points; a longer one is pale, with a trailing mean over it."""
    name = series.name if label is None else label
    known = series.finite()
    if len(known.steps) < SMOOTHED_FROM:
        return [line_of(known, name)]
    window = max(2, len(known.steps) // SMOOTHED_SHARE)
    smooth = trailing_mean(known.values, window)
    trend = replace(known, values=smooth)
    return [
        line_of(known, f"{name}, each iteration") | {"pale": True, "group": name},
        line_of(trend, f"{name}, mean of {window}") | {"group": name},
    ]


def describe_series(series: Series, unit: str) -> str:
    """Return a sentence about a metric's way from its first to its last tenth."""
    first, last = series.part(0.0, 0.1), series.part(0.9, 1.0)
    if not len(first):
        return f"{series.name} has no finite value."
    begin, end = quantity(first.mean(), unit), quantity(last.mean(), unit)
    if begin == end:
        return f"{series.name} begins and ends at {end}, over {len(series.steps)} points."
    return f"{series.name} goes from {begin} to {end} over {len(series.steps)} points."


def column(name: str, kind: str = NUMBER) -> Json:
    """Return a column of a table."""
    return {"name": name, "kind": kind}


def table(
    key: str,
    title: str,
    columns: Sequence[Json],
    rows: Iterable[Sequence[Any]],
    *,
    searchable: bool = False,
    note: str = "",
    pictures: Mapping[str, str] = MappingProxyType({}),
) -> Json:
    """Return a table. A cell is a text, a number, None, `cell` for a number that is shown with its unit, or
    `picture_cell`; ``pictures`` has the addresses of data of the pictures that cells name."""
    return {
        "id": key,
        "title": title,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "searchable": searchable,
        "note": note,
        "pictures": dict(pictures),
    }


def cell(value: float, unit: str) -> Json | None:
    """Return a number that tables sort by, with the text that they show; None if it is not finite."""
    value = float(value)
    return {"value": value, "text": quantity(value, unit)} if math.isfinite(value) else None


def picture_cell(names: Sequence[str]) -> Json | None:
    """Return a cell with the names of pictures, which text formats show; None without any."""
    return {"value": len(names), "text": ", ".join(names), "pictures": list(names)} if names else None


def quantity(value: float, unit: str = "") -> str:
    """Return a number for people; units: ``s``, ``bytes``, ``bytes/s``, ``share``, ``x``, others follow the number."""
    value = float(value)
    if not math.isfinite(value):
        return "not finite"
    if unit == "s":
        return f"{value:,.3g} s" if abs(value) >= 1 or value == 0 else f"{1e3 * value:.3g} ms"
    if unit == "bytes":
        return gib(value)
    if unit == "bytes/s":
        return f"{value / 1e9:,.3g} GB/s"
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "x":
        return f"{value:,.3g} x" if abs(value) < 1000 else f"{value:,.0f} x"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    is_single = number == "1" and unit.isalpha()
    return f"{number} {unit.removesuffix('s') if is_single else unit}".strip()
