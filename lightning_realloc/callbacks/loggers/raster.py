"""Paint a drawing as an image in pixels, for loggers that show no SVG. Needs Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lightning_realloc.tuning.timeline.drawing import (
    LIGHT,
    OUTLINE_PIXELS,
    TEXT_PIXELS,
    Box,
    Drawing,
    GridLine,
    Label,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

SCALE = 2
"""Pixels of the image for a pixel of the drawing, so that text is sharp on dense screens. A larger one costs time."""
MAX_SHARP_HEIGHT = 800
"""Height in pixels of the drawing, 20 ranks or so, above which the scale is 1: TensorBoard takes 90 ns for a pixel."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def paint(drawing: Drawing, *, background: str = "#ffffff") -> Image:
    """Return the drawing on a background, `SCALE` times as large unless it is high. Tips are left out.

    Raises:
        ImportError: without Pillow, or with a build of it without FreeType.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("images of timelines need Pillow; pip install pillow") from error

    scale = SCALE if drawing.height <= MAX_SHARP_HEIGHT else 1
    image = Image.new("RGB", (scale * drawing.width, scale * drawing.height), background)
    brush = ImageDraw.Draw(image)
    font = cast("FreeTypeFont", ImageFont.load_default(scale * TEXT_PIXELS))
    for shape in drawing.shapes:
        _paint_shape(brush, font, shape, scale)
    return image


def _paint_shape(brush: ImageDraw, font: FreeTypeFont, shape: Box | Label | GridLine, scale: int) -> None:
    if isinstance(shape, Label):
        place = scale * shape.x, scale * shape.y
        brush.text(place, shape.text, LIGHT[shape.tone], font, anchor=_ANCHORS[shape.anchor])
    elif isinstance(shape, GridLine):
        ends = (scale * shape.x, scale * shape.top, scale * shape.x, scale * shape.bottom)
        brush.line(ends, LIGHT["grid"], width=scale)
    else:
        color = LIGHT.get(shape.color, shape.color)
        x, y = scale * shape.x, scale * shape.y
        corners = (x, y, x + max(0.0, scale * shape.width - 1), y + scale * shape.height - 1)  # both ends are painted
        if shape.is_outline:
            brush.rectangle(corners, outline=color, width=round(scale * OUTLINE_PIXELS))
        else:
            brush.rectangle(corners, color)
