"""Write tables and pictures to the Trainer's loggers, as each of them shows them best.

Metrics need nothing here: Lightning gives them to every logger.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lightning_realloc.callbacks.loggers.logged_table import Table, markdown
from lightning_realloc.remote_path import as_path
from lightning_realloc.tuning.timeline.drawing import LIGHT, TEXT_PIXELS, Drawing, Label, Shape

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

log = logging.getLogger(__name__)

PICTURE_BACKGROUND = "#ffffff"
"""Background of pictures: pages of loggers do not follow the theme of the reader's system."""

SCALE = 2
"""Pixels of the image for a pixel of the drawing, so that text is sharp on dense screens. A larger one costs time."""
MAX_SHARP_HEIGHT = 800
"""Height in pixels of the drawing, 20 ranks or so, above which the scale is 1: TensorBoard takes 90 ns for a pixel."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}

MAX_REASON_CHARACTERS = 300
"""Longest text of an error in a warning; some loggers put whole replies of a server into it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Picture of an iteration."""

    name: str
    """Name in loggers, and of files."""
    drawing: Drawing
    step: int
    """Step that loggers count the iteration's metrics with."""

    @property
    def svg(self) -> str:
        """The drawing as SVG."""
        return self.drawing.to_svg(background=PICTURE_BACKGROUND)


@dataclass(frozen=True, slots=True)
class LoggerWriter:
    """Functions that give one kind of logger a table and a picture; the first argument is the logger."""

    table: Callable[[Any, Table], None]
    picture: Callable[[Any, Picture], None] | None = None
    """None: the logger shows no pictures."""


def paint(drawing: Drawing) -> Image:
    """Return the drawing in pixels, `SCALE` times as large unless it is high. Tips are left out.

    Raises:
        ImportError: without Pillow, or with a build of it without FreeType.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("images of timelines need Pillow; pip install pillow") from error

    scale = SCALE if drawing.height <= MAX_SHARP_HEIGHT else 1
    image = Image.new("RGB", (scale * drawing.width, scale * drawing.height), PICTURE_BACKGROUND)
    brush = ImageDraw.Draw(image)
    font = cast("FreeTypeFont", ImageFont.load_default(scale * TEXT_PIXELS))
    for shape in drawing.shapes:
        _paint_shape(brush, font, shape, scale)
    return image


def _paint_shape(brush: ImageDraw, font: FreeTypeFont, shape: Shape, scale: int) -> None:
    if isinstance(shape, Label):
        place = scale * shape.x, scale * shape.y
        brush.text(place, shape.text, LIGHT[shape.tone], font, anchor=_ANCHORS[shape.anchor])
    else:
        color = LIGHT.get(shape.color, shape.color)
        x, y = scale * shape.x, scale * shape.y
        right, lower = (max(0.0, scale * size - 1) for size in (shape.width, shape.height))  # both ends are painted
        brush.rectangle((x, y, x + right, y + lower), color)


# ---- one function for each logger and kind of content
def _csv_table(logger: Any, table: Table) -> None:
    table.append_to(as_path(logger.log_dir) / f"{table.name}.csv")


def _tensorboard_table(logger: Any, table: Table) -> None:
    logger.experiment.add_text(table.name, markdown(table.rows), table.step)


def _tensorboard_picture(logger: Any, picture: Picture) -> None:
    import numpy as np

    pixels = np.asarray(paint(picture.drawing))
    logger.experiment.add_image(picture.name, pixels, picture.step, dataformats="HWC")


def _wandb_table(logger: Any, table: Table) -> None:
    logger.log_text(table.name, columns=table.columns, data=table.cells, step=table.step)


def _wandb_picture(logger: Any, picture: Picture) -> None:
    import wandb

    # A file object is content in all releases; a string may be taken for a path.
    logger.log_metrics({picture.name: wandb.Html(io.StringIO(picture.svg))}, step=picture.step)


def _mlflow_table(logger: Any, table: Table) -> None:
    # Not `log_table`: it reads the earlier rows back through pandas, which turns an answer "007" into the number 7.
    path = f"{table.name}/step_{table.step:07}.csv"
    logger.experiment.log_text(logger.run_id, table.to_csv(), path)


def _mlflow_picture(logger: Any, picture: Picture) -> None:
    path = f"{picture.name}/step_{picture.step:07}.svg"
    logger.experiment.log_text(logger.run_id, picture.svg, path)


def _trackio_table(logger: Any, table: Table) -> None:
    import trackio

    content = trackio.Table(columns=table.columns, data=table.cells)
    logger.experiment.log({table.name: content}, step=table.step)


def _trackio_picture(logger: Any, picture: Picture) -> None:
    import trackio

    logger.experiment.log({picture.name: trackio.Html(picture.svg)}, step=picture.step)


WRITERS: Mapping[str, LoggerWriter] = {
    "CSVLogger": LoggerWriter(_csv_table),
    "TensorBoardLogger": LoggerWriter(_tensorboard_table, _tensorboard_picture),
    "WandbLogger": LoggerWriter(_wandb_table, _wandb_picture),
    "MLFlowLogger": LoggerWriter(_mlflow_table, _mlflow_picture),
    "TrackioLogger": LoggerWriter(_trackio_table, _trackio_picture),
}
"""Name of a logger's class -> its functions. Subclasses inherit them; a name needs no import of the class."""


def logger_writer(logger: object) -> LoggerWriter | None:
    """Return the functions for a logger, by its class or the nearest base class; None for an unknown one."""
    names = (kind.__name__ for kind in type(logger).__mro__)
    return next((WRITERS[name] for name in names if name in WRITERS), None)


def shows_pictures(loggers: Iterable[object]) -> bool:
    """Return whether any of the loggers shows pictures."""
    writers = map(logger_writer, loggers)
    return any(writer is not None and writer.picture is not None for writer in writers)


class LoggerOutput:
    """Writes to all loggers. One that fails gets a warning, once for each kind of error, and the run goes on."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str, type[Exception]]] = set()

    def write_table(self, loggers: Iterable[object], table: Table) -> None:
        """Write a table to every logger that shows tables."""
        for logger in loggers:
            writer = logger_writer(logger)
            if writer is not None:
                self.attempt(type(logger).__name__, table.name, writer.table, logger, table)

    def write_picture(self, loggers: Iterable[object], picture: Picture) -> None:
        """Write a picture to every logger that shows pictures."""
        for logger in loggers:
            writer = logger_writer(logger)
            if writer is not None and writer.picture is not None:
                self.attempt(type(logger).__name__, picture.name, writer.picture, logger, picture)

    def attempt(self, place: str, content: str, write: Callable[..., None], *args: object) -> None:
        """Call ``write(*args)``; an error becomes a warning that ``place`` lacks the ``content``."""
        try:
            write(*args)
        except Exception as error:  # packages of loggers have no common base of their errors
            if (place, content, type(error)) not in self._warned:
                self._warned.add((place, content, type(error)))
                reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
                log.warning("%s gets no %s (%s: %s); training goes on", place, content, type(error).__name__, reason)
