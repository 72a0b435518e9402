"""Tables and pictures for any logger: what a run hands over, when, and what happens if a logger fails."""

from __future__ import annotations

import csv
import io
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import ImageColor

from lightning_realloc.callbacks import RolloutTable, Timeline
from lightning_realloc.callbacks.loggers.logged_table import Table
from lightning_realloc.callbacks.loggers.writers import (
    SCALE,
    WRITERS,
    LoggerOutput,
    LoggerWriter,
    Picture,
    logger_writer,
    paint,
    shows_pictures,
)
from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.iteration_picture import draw_iteration
from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.tuning.timeline.drawing import LIGHT, Box, Drawing, Label
from lightning_realloc.tuning.timeline.picture import Bar, Lane, lay_out
from tests.strategies import runs
from tests.workers import WorkerPool

APART = runs.calls(actor_train="dp1@0", actor_generate="dp1@1", reference_infer="dp1@1")
LANES = [
    Lane("rank 0", (Bar("generate", "call", 0.0, 2.0), Bar("odd", "other", 2.0, 2.4), Bar("to 1", "wait", 2.4, 4.0))),
    Lane("rank 1", (Bar("-> train", "move", 0.0, 1.0), Bar("train", "call", 1.0, 4.0))),
]


class Album(DummyLogger):
    """Keeps tables and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.pictures: list[Picture] = []

    def keep_table(self, table: Table) -> None:
        """Keep a table."""
        self.tables.append(table)

    def keep_picture(self, picture: Picture) -> None:
        """Keep a picture."""
        self.pictures.append(picture)


def labels(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Label)]


def keep(
    folder: str, every: int | None, iterations: int, options: Mapping[str, Any]
) -> tuple[list[Table], list[Picture]]:
    """Train with an album, and return its content."""
    WRITERS["Album"] = LoggerWriter(Album.keep_table, Album.keep_picture)
    try:
        album = Album()
        # Other ranks have no logger: the first rank decides for all of them.
        logger = album if os.environ.get("RANK", "0") == "0" else False
        callbacks = [Timeline(folder, image_every_n_steps=every), RolloutTable(path=f"{folder}/own.csv")]
        trainer = runs.trainer(
            runs.ReallocStrategy(**options),
            runs.world_size(),
            callbacks=callbacks,
            logger=logger,
            max_steps=iterations,
            max_epochs=-1,
        )
        trainer.fit(runs.grpo(), runs.Batches(2))
        return album.tables, album.pictures
    finally:
        del WRITERS["Album"]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"plan": APART, "overlap": "iterations", "max_staleness": 1}],
)
def test_a_picture_has_all_ranks_and_comes_when_times_have_settled_and_then_at_the_interval(
    workers: WorkerPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    (_, pictures), (_, none) = workers.run(keep, str(tmp_path), 5, 6, options, world_size=2, init_process_group=False)
    assert none == []
    assert [picture.step for picture in pictures] == [2, 4]  # the third iteration and the fifth; loggers count from 0
    for picture in pictures:
        texts = labels(picture.drawing)
        assert texts[0].startswith("One iteration: ") and texts[0].endswith(" s on 2 ranks")
        # Overlapped iterations train in pairs: these two only generate.
        calls = {"actor.generate"} if options else {"actor.generate", "actor.train", "reference.infer"}
        assert {"rank 0", "rank 1", *calls} <= set(texts)
        names = {shape.tip.split(":")[0] for shape in picture.drawing.shapes if isinstance(shape, Box) and shape.tip}
        assert calls <= names


def test_no_pictures_if_they_are_switched_off(workers: WorkerPool, tmp_path: Path) -> None:
    ((_, pictures),) = workers.run(keep, str(tmp_path), None, 4, {}, world_size=1, init_process_group=False)
    assert pictures == []
    with pytest.raises(ConfigError, match="image_every_n_steps=0 must be at least 1; None logs no pictures"):
        Timeline(image_every_n_steps=0)


def test_a_run_without_recorded_pieces_has_an_empty_picture() -> None:
    drawing = draw_iteration({0: (), 1: (TimePiece("between calls", "host", 3.0, 1.0),)}, num_ranks=2)
    assert labels(drawing)[:1] == ["One iteration: 0 s on 2 ranks"]
    assert paint(drawing).size == (SCALE * drawing.width, SCALE * drawing.height)


def test_a_picture_of_some_ranks_says_so() -> None:
    drawing = draw_iteration({0: (TimePiece("train", "call", 3.0, 1.5),)}, num_ranks=9)
    assert labels(drawing)[0] == "One iteration: 1.5 s on 9 ranks, the first 1 are shown"


def test_the_image_has_the_colors_of_the_drawing() -> None:
    drawing = lay_out(LANES, title="A title with ünïcödé 漢字 and 🙂")
    pixels = np.asarray(paint(drawing))
    assert pixels.shape == (SCALE * drawing.height, SCALE * drawing.width, 3)
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Box)]
    assert len(boxes) > 10
    for box in boxes:
        color = ImageColor.getrgb(LIGHT.get(box.color, box.color))
        # A few pixels inside of the lower left corner, where no label is; a lane is below its bars.
        x, y = round(SCALE * box.x) + 1, round(SCALE * (box.y + box.height)) - 2
        if box.color != "lane":
            assert tuple(pixels[y, x]) == color, box
    assert tuple(pixels[-1, -1]) == (255, 255, 255)


def test_an_image_of_many_ranks_has_few_pixels() -> None:
    drawing = lay_out([Lane(f"rank {rank}", LANES[0].bars) for rank in range(64)])
    assert paint(drawing).size == (drawing.width, drawing.height)


@given(cells=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4))
def test_a_table_as_csv_can_be_read_back(cells: list[tuple[str, str]]) -> None:
    table = Table("t", tuple({"prompt": prompt, "response": response} for prompt, response in cells), 0)
    header, *rows = csv.reader(io.StringIO(table.to_csv(), newline=""))
    assert header == ["prompt", "response"]
    assert [tuple(row) for row in rows] == cells


def test_files_continue_unless_the_run_begins(tmp_path: Path) -> None:
    path = tmp_path / "below" / "t.csv"
    first = Table("t", ({"step": 0, "response": "007"},), 0, begins_run=True)
    for table in (first, first, Table("t", ({"step": 1, "response": "a\nb", "new": 1.0},), 1)):
        table.append_to(path)
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{"step": "0", "response": "007"}, {"step": "1", "response": "a\nb"}]


def test_subclasses_of_a_logger_inherit_its_functions(tmp_path: Path) -> None:
    class Own(TensorBoardLogger):
        """A user's logger."""

    assert logger_writer(Own(tmp_path)) is WRITERS["TensorBoardLogger"]
    assert logger_writer(DummyLogger()) is None
    assert shows_pictures([DummyLogger(), Own(tmp_path)]) and not shows_pictures([DummyLogger()])


class Broken(DummyLogger):
    """Refuses tables."""

    num_calls = 0

    def refuse(self, table: Table) -> None:
        """Fail, with a message that differs each time."""
        self.num_calls += 1
        raise ConnectionError(f"no reply of the server\n  in attempt {self.num_calls}")


def test_a_logger_that_fails_is_named_once_and_the_others_get_their_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writers: Mapping[str, Any] = {"Album": LoggerWriter(Album.keep_table), "Broken": LoggerWriter(Broken.refuse)}
    for name, writer in writers.items():
        monkeypatch.setitem(WRITERS, name, writer)
    output, broken, album = LoggerOutput(), Broken(), Album()
    table = Table("rollouts", ({"step": 0},), 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            output.write_table([broken, album], table)
    assert caplog.messages == [
        "Broken gets no rollouts (ConnectionError: no reply of the server in attempt 1); training goes on"
    ]
    assert broken.num_calls == 3 and album.tables == [table] * 3


def test_a_missing_pillow_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    picture = Picture("timeline", lay_out(LANES), 0)
    with caplog.at_level(logging.WARNING):
        LoggerOutput().write_picture([TensorBoardLogger(tmp_path)], picture)
    assert caplog.messages == [
        "TensorBoardLogger gets no timeline (ImportError: images of timelines need Pillow; pip install pillow); "
        "training goes on"
    ]
