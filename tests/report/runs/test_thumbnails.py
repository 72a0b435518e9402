"""Thumbnails of a run's samples in its report: their addresses, bounds, and files that are not shown."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

from lightning_realloc.callbacks.loggers.logged_table import Table, files_folder
from lightning_realloc.callbacks.loggers.sample_thumbnails import thumbnail
from lightning_realloc.report.runs import thumbnails
from lightning_realloc.report.runs.page import script_text
from lightning_realloc.report.runs.text import markdown_report
from lightning_realloc.report.runs.thumbnails import IMAGES_FOLDER, read_thumbnails, thumbnail_names
from tests.report.runs.folders import HOSTILE, content_of, table_of, write_run

images = pytest.importorskip("PIL.Image")
FIRST, SECOND = "0000000000000001-0.jpg", "0000000000000002-0.jpg"


def write_samples(folder: Path, *cells: object) -> Path:
    """Write samples with these cells of images, and two thumbnails; return the folder of the log."""
    log = write_run(folder) / "log" / "version_0"
    files = {
        name: thumbnail(images.new("RGB", (200, 100), color)) for name, color in ((FIRST, "red"), (SECOND, "blue"))
    }
    rows = tuple({"step": 1, "prompt": f"question {at}", "images": cell} for at, cell in enumerate(cells))
    Table("rollouts", rows, 1, begins_run=True, files=files).append_to(log / "rollouts.csv")
    assert files_folder(log / "rollouts.csv") == log / IMAGES_FOLDER
    return log


def test_samples_show_the_images_that_the_table_names(tmp_path: Path) -> None:
    log = write_samples(tmp_path, (FIRST,), (FIRST, SECOND), ())
    data = content_of(tmp_path)
    shown = table_of(data, "rollouts", "rollouts")
    at = [column["kind"] for column in shown["columns"]].index("pictures")
    assert shown["columns"][at]["name"] == "images" and data["problems"] == []
    assert [row[at] and row[at]["pictures"] for row in shown["rows"]] == [None, [FIRST, SECOND], [FIRST]]
    assert set(shown["pictures"]) == {FIRST, SECOND}, "each once"
    kind, _, content = shown["pictures"][FIRST].partition(",")
    assert kind == "data:image/jpeg;base64"
    assert base64.b64decode(content) == (log / IMAGES_FOLDER / FIRST).read_bytes()
    assert images.open(io.BytesIO(base64.b64decode(content))).size == (160, 80)
    assert FIRST in markdown_report(data) and "base64" not in markdown_report(data)


def test_only_small_jpegs_of_the_runs_own_folder_are_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(b"\xff\xd8\xff secret")
    log = write_samples(tmp_path, (FIRST, SECOND), ("0000000000000003-0.jpg",), ("../../../secret.jpg",), (HOSTILE,))
    (log / IMAGES_FOLDER / FIRST).unlink()
    (log / IMAGES_FOLDER / FIRST).symlink_to(secret)
    (log / IMAGES_FOLDER / SECOND).write_bytes(b"\xff\xd8\xff" + bytes(20_000))
    (log / IMAGES_FOLDER / "0000000000000003-0.jpg").write_text("<svg onload=alert(1)>")
    data = content_of(tmp_path)
    assert table_of(data, "rollouts", "rollouts")["pictures"] == {}
    assert data["problems"] == [
        "3 images of the samples are missing in rollouts_images, or are no JPEG files of at most 16,000 bytes"
    ]
    assert "<" not in script_text(data)


@pytest.mark.parametrize(
    "cell", ["", "a cat.png", "3", "[3]", '["../x.jpg"]', '["0000000000000001-0.jpg', "[" * 99_999]
)
def test_cells_that_hold_something_else_name_no_files(cell: str) -> None:
    assert thumbnail_names(cell) == ()


def test_the_newest_images_are_shown_within_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:016x}-0.jpg" for number in range(9)]
    for name in names:
        (tmp_path / name).write_bytes(b"\xff\xd8\xff" + bytes(297))
    cells = [json.dumps([name]) for name in names]
    monkeypatch.setattr(thumbnails, "MAX_THUMBNAILS", 4)
    assert list(read_thumbnails(tmp_path, cells, [])) == names[:4]
    monkeypatch.setattr(thumbnails, "MAX_THUMBNAIL_CHARACTERS", 1300)  # an address has 23 + 400 characters
    assert list(read_thumbnails(tmp_path, cells, [])) == names[:3]
