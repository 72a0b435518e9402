"""Thumbnails of rollouts' images: their sizes and modes, the files next to a table, and the table's cells."""

from __future__ import annotations

import csv
import io
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lightning_realloc.callbacks.loggers import logged_table
from lightning_realloc.callbacks.loggers.logged_table import Table, files_folder, plain_text
from lightning_realloc.callbacks.loggers.sample_thumbnails import MAX_THUMBNAIL_BYTES, row_images, thumbnail
from lightning_realloc.remote_path import as_path

images = pytest.importorskip("PIL.Image")


class Given(Sequence[object]):
    """Images of a sample as data gives them: made when they are read."""

    def __init__(self, key: int, *made: Callable[[], object]) -> None:
        self.key, self._made = key, made

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> object:  # type: ignore[override]
        return self._made[index]()


def drawn(size: tuple[int, int], color: object = (200, 30, 30), mode: str = "RGB") -> Callable[[], object]:
    return lambda: images.new(mode, size, color)


def broken() -> object:
    raise OSError("image file is truncated")


def opened(content: bytes) -> object:
    return images.open(io.BytesIO(content))


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGB", (200, 30, 30), (200, 30, 30)),
        ("L", 77, (77, 77, 77)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),  # transparent
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
        ("P", 0, (0, 0, 0)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_images_of_any_mode_become_small_jpegs_in_their_colors(
    mode: str, color: object, expected: tuple[int, int, int]
) -> None:
    image = images.new(mode, (400, 100), color)
    made = opened(thumbnail(image))
    assert (made.format, made.mode, made.size) == ("JPEG", "RGB", (160, 40))  # type: ignore[attr-defined]
    assert all(abs(a - b) <= 6 for a, b in zip(made.getpixel((80, 20)), expected, strict=True))  # type: ignore[attr-defined]
    assert (image.mode, image.size) == (mode, (400, 100)), "the image itself stays"


def test_images_of_16_bits_keep_their_contrast() -> None:
    image = images.new("I;16", (64, 64), 1000)
    image.paste(3000, (32, 0, 64, 64))
    made = opened(thumbnail(image))
    left, right = (made.getpixel((x, 32))[0] for x in (8, 56))  # type: ignore[attr-defined]
    assert left < 10 and right > 245


def test_thumbnails_are_bounded_in_bytes_and_are_not_enlarged() -> None:
    noise = images.frombytes("RGB", (500, 500), random.Random(0).randbytes(750_000))
    assert len(thumbnail(noise)) <= MAX_THUMBNAIL_BYTES
    assert len(thumbnail(noise, 2000)) <= MAX_THUMBNAIL_BYTES
    assert opened(thumbnail(images.new("RGB", (20, 10)))).size == (20, 10)  # type: ignore[attr-defined]
    assert opened(thumbnail(images.new("RGB", (9000, 2)))).size == (160, 1)  # type: ignore[attr-defined]


def test_samples_with_equal_images_share_files_and_broken_images_have_none() -> None:
    shared = Given(7, drawn((300, 300)), drawn((30, 60)))
    found = row_images([[shared], [shared], [Given(8)], [Given(9, broken)], [Given(255, *[drawn((8, 8))] * 9)]])
    assert found is not None
    pair = ("0000000000000007-0.jpg", "0000000000000007-1.jpg")
    assert found.names[:4] == (pair, pair, (), ("0000000000000009-0.jpg",))
    assert len(found.names[4]) == 4, "the first ones of many"
    assert sorted(found.files) == [*pair, *(f"00000000000000ff-{index}.jpg" for index in range(4))]
    assert row_images([["a.png"], ["b.png"]]) is None and row_images([]) is None


def test_a_table_names_the_files_next_to_it(tmp_path: Path) -> None:
    given = Given(7, drawn((300, 300)))
    found = row_images([[given], [Given(8)]])
    assert found is not None
    rows = tuple({"step": 0, "images": names, "raw": {"bytes": b"12345"}} for names in found.names)
    for begins in (True, False):
        Table("rollouts", rows, 0, begins_run=begins, files=found.files).append_to(tmp_path / "rollouts.csv")
    with (tmp_path / "rollouts.csv").open(newline="") as file:
        cells = [row["images"] for row in csv.DictReader(file)]
    assert cells == ['["0000000000000007-0.jpg"]', ""] * 2
    assert "12345" not in (tmp_path / "rollouts.csv").read_text(), "no bytes of images"
    folder = files_folder(tmp_path / "rollouts.csv")
    assert [(one.name, one.read_bytes()) for one in Path(str(folder)).iterdir()] == list(found.files.items())
    assert plain_text(given) == "1 images with the key 0000000000000007"


@pytest.mark.parametrize("address", ["", "memory://"])
def test_a_new_run_removes_thumbnails_of_an_earlier_one(tmp_path: Path, address: str) -> None:
    path = as_path(f"{address}{tmp_path}/rollouts.csv")

    def write(begins: bool, *numbers: int) -> list[str]:
        files = {f"{number:016x}-0.jpg": b"content" for number in numbers}
        row = {"step": 0, "images": tuple(files)}
        Table("rollouts", (row,), 0, begins_run=begins, files=files).append_to(path)
        return sorted(one.name for one in files_folder(path).iterdir())

    assert write(True, 1, 2) == ["0000000000000001-0.jpg", "0000000000000002-0.jpg"]
    (files_folder(path) / "notes.jpg").write_bytes(b"of the user")
    assert write(False, 255) == [*(f"{number:016x}-0.jpg" for number in (1, 2, 255)), "notes.jpg"]
    assert write(True, 3) == ["0000000000000003-0.jpg", "notes.jpg"]
    assert write(True) == ["notes.jpg"]


def test_the_newest_thumbnails_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_table, "MAX_THUMBNAILS", 3)
    path = tmp_path / "rollouts.csv"
    for number in (1, 2, 3, 1, 4):  # the first one is shown again
        files = {f"{number:016x}-0.jpg": b"content"}
        Table("rollouts", ({"images": tuple(files)},), 0, files=files).append_to(path)
        times = {one.name: one.stat().st_mtime_ns for one in files_folder(path).iterdir()}
        for name in times:  # as if a second had passed
            os.utime(tmp_path / "rollouts_images" / name, ns=(times[name] - 10**9, times[name] - 10**9))
    assert sorted(times) == [f"{number:016x}-0.jpg" for number in (1, 3, 4)]
