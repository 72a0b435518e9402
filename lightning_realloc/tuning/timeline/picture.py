"""Draw timelines as SVG: a lane for each rank, a bar for each call, move or wait. Pure.

The picture adapts to light and dark backgrounds. Calls have the same color in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

BarKind = Literal["call", "move", "wait", "other"]
COLORS = ("#3b78b5", "#d98324", "#4c9a5b", "#a05fa8", "#b8513c", "#2f9aa0", "#8a7a3a", "#6b6fc4")
"""Fill colors of calls, in the order in which they first appear; distinct under all common color vision deficiencies
by hue and lightness. Further calls begin again."""
WIDTH, LEFT, RIGHT, LANE, GAP, AXIS, LINE = 960, 92, 12, 26, 8, 28, 22
"""Sizes in pixels: the picture's width, the margins beside the lanes, a lane's height, the gap between two, the axis
below them, and a line of the legend."""
MIN_LABEL_PIXELS = 7
"""Pixels of a character: a bar shows its name if that fits."""
_STYLE = """
.lr-t{font:12px system-ui,sans-serif;fill:#333}.lr-s{fill:#666}.lr-l{fill:#fff}
.lr-b{fill:#f4f4f4}.lr-w{fill:#d8d8d8}.lr-o{fill:#bbb}.lr-m{fill:#e0b400}.lr-g{stroke:#ddd}.lr-p{fill:none;stroke-width:1.5}
@media(prefers-color-scheme:dark){.lr-t{fill:#ddd}.lr-s{fill:#aaa}.lr-b{fill:#262626}.lr-w{fill:#444}.lr-o{fill:#666}
.lr-g{stroke:#3a3a3a}}
""".replace("\n", "")


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
    is_predicted: bool = False
    """Whether bars are outlined, as those of a prediction are."""


def draw(lanes: Sequence[Lane], *, title: str = "") -> str:
    """Return the lanes as an SVG element with a title, a time axis in seconds, and a legend."""
    end = max((bar.end for lane in lanes for bar in lane.bars), default=0.0) or 1.0
    colors = call_colors(bar for lane in lanes for bar in lane.bars)
    top = LINE if title else 4
    bottom = top + len(lanes) * (LANE + GAP)
    legend = list(_legend(colors, lanes, bottom + AXIS))
    height = bottom + AXIS + LINE * (1 + max((line for line, _ in legend), default=-1)) + 4
    scale = (WIDTH - LEFT - RIGHT) / end
    parts = [f'<text class="lr-t" x="0" y="15">{escape(title)}</text>'] if title else []
    parts += [line for _, line in _grid(end, scale, top, bottom)]
    for number, lane in enumerate(lanes):
        parts += _lane(lane, top + number * (LANE + GAP), scale, colors)
    parts += [line for _, line in legend]
    label = escape(title or "Timeline of calls on ranks", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'style="max-width:100%;height:auto"><style>{_STYLE}</style>{"".join(parts)}</svg>'
    )


def call_colors(bars: Iterable[Bar]) -> dict[str, str]:
    """Return call -> color, in the order in which calls first appear."""
    names = dict.fromkeys(bar.name for bar in bars if bar.kind == "call")
    return {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}


def _lane(lane: Lane, y: int, scale: float, colors: dict[str, str]) -> Iterator[str]:
    yield f'<text class="lr-t" x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(lane.name)}</text>'
    yield f'<rect class="lr-b" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}"/>'
    for bar in lane.bars:
        x, width = LEFT + scale * bar.start, scale * (bar.end - bar.start)
        place = f'x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{LANE}"'
        tip = f"<title>{escape(bar.name)}: {bar.end - bar.start:.3f} s</title>"
        yield f"<rect {_look(bar, lane, colors)} {place}>{tip}</rect>"
        if bar.kind == "call" and width >= MIN_LABEL_PIXELS * len(bar.name):
            look = "lr-t" if lane.is_predicted else "lr-t lr-l"
            center = f'x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle"'
            yield f'<text class="{look}" {center}>{escape(bar.name)}</text>'


def _look(bar: Bar, lane: Lane, colors: dict[str, str]) -> str:
    color = colors.get(bar.name)
    if lane.is_predicted:
        return f'class="lr-p" stroke="{color or "#e0b400"}"'
    return f'fill="{color}"' if color else f'class="lr-{bar.kind[0]}"'


def _grid(end: float, scale: float, top: int, bottom: int) -> Iterator[tuple[float, str]]:
    """Yield the axis: lines at round numbers of seconds, about eight of them."""
    step = 10 ** math.floor(math.log10(end / 8))
    step = next(step * factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 8)
    digits = max(0, -math.floor(math.log10(step)))
    for number in range(math.floor(end / step + 1e-9) + 1):
        x = LEFT + scale * number * step
        text = f"{number * step:.{digits}f} s"
        yield (
            x,
            (
                f'<line class="lr-g" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
                f'<text class="lr-t lr-s" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{text}</text>'
            ),
        )


def _legend(colors: dict[str, str], lanes: Sequence[Lane], y: int) -> Iterator[tuple[int, str]]:
    """Yield (line, entry) for every call and every other kind of bar."""
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    entries = [(f'fill="{color}"', name) for name, color in colors.items()]
    names = {"move": "moving weights", "wait": "waiting", "other": "anything else"}
    entries += [(f'class="lr-{kind[0]}"', name) for kind, name in names.items() if kind in kinds]
    if any(lane.is_predicted for lane in lanes):
        entries.append(('class="lr-p" stroke="#888"', "predicted"))
    x, line = LEFT, 0
    for look, name in entries:
        width = 24 + MIN_LABEL_PIXELS * len(name)
        if x + width > WIDTH and x > LEFT:
            x, line = LEFT, line + 1
        at = y + LINE * line
        yield (
            line,
            (
                f'<rect {look} x="{x}" y="{at + 4}" width="12" height="12"/>'
                f'<text class="lr-t" x="{x + 17}" y="{at + 15}">{escape(name)}</text>'
            ),
        )
        x += width
