"""Drawings of boxes and labels at positions in pixels, and their SVG. Pure.

A painter of another format reads the shapes, and the colors of `LIGHT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Literal

Tone = Literal["text", "axis", "on bar", "lane", "wait", "environment", "other", "move", "grid"]
Anchor = Literal["start", "middle", "end"]
LIGHT: Mapping[str, str] = {
    "text": "#333333",
    "axis": "#666666",
    "on bar": "#ffffff",
    "lane": "#f4f4f4",
    "wait": "#d8d8d8",
    "environment": "#e3b8d6",
    "other": "#bbbbbb",
    "move": "#e0b400",
    "grid": "#dddddd",
}
"""Tone -> color on a light background."""
DARK: Mapping[str, str] = {
    "text": "#dddddd",
    "axis": "#aaaaaa",
    "lane": "#262626",
    "wait": "#444444",
    "environment": "#7a4468",
    "other": "#666666",
    "grid": "#3a3a3a",
}
"""Tone -> color on a dark background, where it differs."""
TEXT_PIXELS = 12
"""Height of the font."""
_CLASSES: Mapping[str, str] = {tone: f"lr-{tone.replace(' ', '-')}" for tone in LIGHT}


@dataclass(frozen=True, slots=True)
class Box:
    """Filled rectangle."""

    x: float
    """Left edge in pixels."""
    y: float
    """Upper edge in pixels."""
    width: float
    height: float
    color: str
    """``#rrggbb``, or a tone."""
    tip: str | None = None
    """Text that appears under the mouse; None for none."""


@dataclass(frozen=True, slots=True)
class Label:
    """Line of text."""

    x: float
    """Position in pixels that ``anchor`` describes."""
    y: float
    """Baseline in pixels."""
    text: str
    tone: Tone = "text"
    anchor: Anchor = "start"


Shape = Box | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes, the later ones above the earlier ones."""

    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    name: str
    """Name of the drawing for readers that cannot see it."""
    shapes: tuple[Shape, ...]

    def to_svg(self, *, background: str | None = None) -> str:
        """Return an SVG element.

        Args:
            background: Color below light shapes, for pages of any theme, in the drawing's own size; None: transparent
                and as wide as the page, with light or dark shapes as the reader's system prefers.
        """
        style = f".lr-label{{font:{TEXT_PIXELS}px system-ui,sans-serif}}{_style(LIGHT)}"
        size = below = ""
        if background is None:
            style += f"@media(prefers-color-scheme:dark){{{_style(DARK)}}}"
        else:
            size = f'width="{self.width}" height="{self.height}" '
            below = f'<rect width="100%" height="100%" fill="{background}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" {size}role="img" '
            f'aria-label="{escape(self.name, quote=True)}" style="max-width:100%;height:auto">'
            f"<style>{style}</style>{below}{''.join(map(_element, self.shapes))}</svg>"
        )


def _style(colors: Mapping[str, str]) -> str:
    return "".join(f".{_CLASSES[tone]}{{fill:{color}}}" for tone, color in colors.items())


def _element(shape: Shape) -> str:
    place = f'x="{_pixels(shape.x)}" y="{_pixels(shape.y)}"'
    if isinstance(shape, Label):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return f'<text class="lr-label {_CLASSES[shape.tone]}" {place}{anchor}>{escape(shape.text)}</text>'
    look = f'class="{_CLASSES[shape.color]}"' if shape.color in _CLASSES else f'fill="{shape.color}"'
    size = f'width="{_pixels(shape.width)}" height="{_pixels(shape.height)}"'
    tip = "" if shape.tip is None else f"<title>{escape(shape.tip)}</title>"
    return f"<rect {look} {place} {size}>{tip}</rect>"


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
