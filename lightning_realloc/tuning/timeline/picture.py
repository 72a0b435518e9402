"""Draw timelines: a lane for each rank, a bar for each call, move or wait. Pure.

The picture adapts to light and dark backgrounds. Calls have the same color in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_realloc.tuning.timeline.drawing import Box, Drawing, Label, Shape

BarKind = Literal["call", "move", "wait", "environment", "other"]
COLORS = ("#3b78b5", "#d98324", "#4c9a5b", "#a05fa8", "#b8513c", "#2f9aa0", "#8a7a3a", "#6b6fc4")
"""Fill colors of calls, in the order in which they first appear; distinct under all common color vision deficiencies
by hue and lightness. Further calls begin again."""
WIDTH, LEFT, RIGHT, LANE, GAP, AXIS, LINE = 960, 92, 12, 26, 8, 28, 22
"""Sizes in pixels: the picture's width, the margins beside the lanes, a lane's height, the gap between two, the axis
below them, and a line of the legend."""
MIN_LABEL_PIXELS = 7
"""Pixels of a character: a bar shows its name if that fits."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Time of a lane."""

    name: str
    """Name of a call, or description."""
    kind: BarKind
    start: float
    """Start in seconds from the picture's left edge."""
    end: float
    """End in seconds."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars of one rank."""

    name: str
    bars: tuple[Bar, ...]


def draw(lanes: Sequence[Lane], *, title: str = "") -> str:
    """Return the lanes as an SVG element with a title, a time axis in seconds, and a legend."""
    return lay_out(lanes, title=title).to_svg()


def lay_out(lanes: Sequence[Lane], *, title: str = "") -> Drawing:
    """Return the shapes of the lanes, with a title, a time axis in seconds, and a legend."""
    end = max((bar.end for lane in lanes for bar in lane.bars), default=0.0) or 1.0
    colors = call_colors(bar for lane in lanes for bar in lane.bars)
    top = LINE if title else 4
    bottom = top + len(lanes) * (LANE + GAP)
    legend = list(_legend(colors, lanes, bottom + AXIS))
    height = bottom + AXIS + LINE * (1 + max((line for line, _ in legend), default=-1)) + 4
    scale = (WIDTH - LEFT - RIGHT) / end
    shapes: list[Shape] = [Label(0, 15, title)] if title else []
    shapes += _grid(end, scale, top, bottom)
    for number, lane in enumerate(lanes):
        shapes += _lane(lane, top + number * (LANE + GAP), scale, colors)
    shapes += (shape for _, entry in legend for shape in entry)
    return Drawing(WIDTH, height, title or "Timeline of calls on ranks", tuple(shapes))


def call_colors(bars: Iterable[Bar]) -> dict[str, str]:
    """Return call -> color, in the order in which calls first appear."""
    names = dict.fromkeys(bar.name for bar in bars if bar.kind == "call")
    return {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}


def _lane(lane: Lane, y: int, scale: float, colors: dict[str, str]) -> Iterator[Shape]:
    yield Label(LEFT - 8, y + 17, lane.name, anchor="end")
    yield Box(LEFT, y, WIDTH - LEFT - RIGHT, LANE, "lane")
    for bar in lane.bars:
        x, width = LEFT + scale * bar.start, scale * (bar.end - bar.start)
        tip = f"{bar.name}: {bar.end - bar.start:.3f} s"
        yield Box(x, y, max(width, 0.5), LANE, colors.get(bar.name, bar.kind), tip)
        if bar.kind == "call" and width >= MIN_LABEL_PIXELS * len(bar.name):
            yield Label(x + width / 2, y + 17, bar.name, "on bar", "middle")


def _grid(end: float, scale: float, top: int, bottom: int) -> Iterator[Shape]:
    """Yield the axis: lines at round numbers of seconds, about eight of them."""
    step = 10 ** math.floor(math.log10(end / 8))
    step = next(step * factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 8)
    digits = max(0, -math.floor(math.log10(step)))
    for number in range(math.floor(end / step + 1e-9) + 1):
        x = LEFT + scale * number * step
        yield Box(x - 0.5, top, 1, bottom - top, "grid")
        yield Label(x, bottom + 14, f"{number * step:.{digits}f} s", "axis", "middle")


def _legend(colors: dict[str, str], lanes: Sequence[Lane], y: int) -> Iterator[tuple[int, tuple[Box, Label]]]:
    """Yield (line, entry) for every call and every other kind of bar."""
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    entries = list(colors.items())
    names = {"move": "moving weights", "wait": "waiting", "environment": "waiting for environments"}
    names |= {"other": "anything else"}
    entries += [(name, kind) for kind, name in names.items() if kind in kinds]
    x, line = LEFT, 0
    for name, color in entries:
        width = 24 + MIN_LABEL_PIXELS * len(name)
        if x + width > WIDTH and x > LEFT:
            x, line = LEFT, line + 1
        at = y + LINE * line
        yield line, (Box(x, at + 4, 12, 12, color), Label(x + 17, at + 15, name))
        x += width
