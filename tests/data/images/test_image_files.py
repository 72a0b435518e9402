"""Images are checked by their headers before a run, and every one that cannot be used is named with its row."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_realloc import PromptDataModule
from lightning_realloc.data.images import image_files
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.errors import DataError
from tests.models import byte_tokenizer
from tests.vision_processors import tiny_processor


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def noise(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def deep_png() -> bytes:
    """Return a file of 2 x 1 pixels with three channels of 16 bits."""
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(1 + 2 * 3 * 2)),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))
        for kind, held in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_an_image_is_upright_and_rgb_as_transformers_loads_it(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 6
    noise().save(tmp_path / "turned.jpg", exif=exif)
    for name, image in {"cmyk.jpg": noise().convert("CMYK"), "alpha.png": noise().convert("RGBA")}.items():
        image.save(tmp_path / name)
    noise().convert("P").save(tmp_path / "palette.png")

    for path in tmp_path.iterdir():
        found = ImageFile.read(str(path), "row 0")

        assert found.size == load_image(str(path)).size
        assert np.array_equal(np.asarray(found.open()), np.asarray(load_image(str(path)).convert("RGB"))), path.name


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"not an image", "row 3: its image is not an image that Pillow reads"),
        (encoded(noise(), "JPEG")[:-400], "row 3: its image is cut off: its JPEG data has no end"),
        (encoded(noise())[:-100], "row 3: its image is cut off: its PNG data has no end"),
        (
            encoded(noise(), "GIF", save_all=True, append_images=[noise(41)]),
            "row 3: its image has 2 frames or pages; give one",
        ),
        (encoded(noise(), "TIFF", save_all=True, append_images=[noise(41)]), "row 3: its image has 2 frames or pages"),
        (Image.new("I;16", (4, 4)), r"row 3: its image has pixels of more than eight bits .*'I;16'"),
        (deep_png(), r"row 3: its image has pixels of more than eight bits .*'RGB;16B'"),
        (
            "aB3+" * 30 + "==",
            r"there is no image '(aB3.){10}\.\.\.', of 122 characters; .* text as 'data:image/png;base64,",
        ),
        ("a/" * 3000, r"there is no image '(a/){20}\.\.\.', of 5,999 characters; .* text as 'data:image/png;base64,"),
        ("missing.png", "row 3: there is no image 'missing.png' in "),
        ("https://example.org/a.png", "row 3: the image https://example.org/a.png is on another machine.*download"),
        ("s3://bucket/a.png", "row 3: the image s3://bucket/a.png is on another machine"),
        ("data:image/png;base64,!", "row 3: the image's data: address is not base64"),
        ({"height": 3}, "row 3: an image that is a mapping needs 'bytes' or 'path'; it has height"),
        (7, "row 3: an image is a path, bytes, an image of Pillow or a mapping.* got int 7; correct it"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_its_row(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageFile.read(value, "row 3")


def test_a_folder_is_no_image_and_places_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").mkdir()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(DataError, match=rf"row 3: there is only a folder 'a.png' in {tmp_path}; correct the path"):
        ImageFile.read("a.png", "row 3", folder=tmp_path)


def test_a_decompression_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000

    with pytest.raises(DataError, match="row 3: its image has more than the 89,478,485 pixels that are read"):
        ImageFile.read(bomb, "row 3")
    monkeypatch.setattr(image_files, "MAX_PIXELS", 1000)
    with pytest.raises(DataError, match="row 3: its image has 40 x 30 pixels, and at most 1,000 are read"):
        ImageFile.read(encoded(noise()), "row 3")


def damaged() -> bytes:
    """Return a PNG whose header and end are whole, and whose pixels cannot be decoded."""
    content = bytearray(encoded(noise(400, 300)))
    content[60:2000] = bytes(1940)
    return bytes(content)


def test_damage_inside_a_file_is_named_when_the_image_is_opened() -> None:
    found = ImageFile.read(damaged(), "row 3")

    with pytest.raises(DataError, match=r"row 3: its image is damaged inside its pixels \(.*\); correct it$"):
        found.open()
    with pytest.raises(DataError, match=r"row 3: its image is damaged inside its pixels \("):
        ImageFile.copy_of(damaged(), "row 3")
    (images,) = prompts([{"prompt": "what?", "image": damaged()}]).tables["train"].objects("images")
    with pytest.raises(DataError, match=r"row 0 .*; correct it, or give check_pixels=True, .* with bad_rows='drop'"):
        images[0]


def test_damage_inside_a_file_is_found_at_the_start_if_pixels_are_checked() -> None:
    rows = [{"prompt": "what?", "image": noise()}, {"prompt": "what?", "image": damaged()}]

    advice = "correct it; leave such rows out with bad_rows='drop'"
    with pytest.raises(DataError, match=f"row 1 of the data set: its image is damaged inside its pixels .* {advice}$"):
        prompts(rows, check_pixels=True)
    with pytest.warns(UserWarning, match="left out 1 of 2 rows"):
        assert len(prompts(rows, check_pixels=True, bad_rows="drop").tables["train"]) == 1
    assert len(prompts(rows).tables["train"]) == 2


def test_pixels_of_good_images_are_checked_once_though_bad_rows_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[int] = Counter()
    open_image = ImageFile.open

    def counting(file: ImageFile) -> Any:
        opened[file.key] += 1
        return open_image(file)

    monkeypatch.setattr(ImageFile, "open", counting)
    rows = [{"prompt": "what?", "image": encoded(noise(8 + number, 8))} for number in range(9)]
    with pytest.raises(DataError, match="row 9 of the data set"):
        prompts([*rows, {"prompt": "what?", "image": damaged()}], check_pixels=True)
    assert sorted(opened.values())[:-1] == [1] * 9


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    noise().save(tmp_path / "a.png")
    found = ImageFile.read(tmp_path / "a.png", "row 3")
    noise(20).save(tmp_path / "a.png")

    with pytest.raises(DataError, match=r"row 3: .*a.png has 20 x 30 pixels, and had 40 x 30 when the data was read"):
        found.open()


# ---- rows
def prompts(rows: list[dict[str, Any]], **settings: Any) -> PromptDataModule:
    module = PromptDataModule(rows, batch_size=1, **{"tokenizer": tiny_processor("llava"), **settings})
    module.setup()
    return module


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT, SHOWN = {"type": "text", "text": "what?"}, {"type": "image"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": user(SHOWN, SHOWN, TEXT), "images": [noise()]}, "messages have 2 parts .* for 1 image;"),
        ({"prompt": user(SHOWN, TEXT), "images": [noise()] * 2}, "messages have 1 part .* for 2 images;"),
        ({"prompt": user(SHOWN, TEXT), "images": []}, "messages have 1 part .* for 0 images;"),
        ({"prompt": "what <image>?", "images": []}, "text holds placeholders of images besides those of its 0 images"),
        (
            {"prompt": user({"type": "text", "text": "<image>"}), "images": [noise()]},
            "holds '<image>' 2 times, for 1 image;",
        ),
        ({"prompt": user(TEXT, {"type": "audio"}), "images": [noise()]}, "role 'user' holds 'audio' beside images"),
        ({"prompt": [{"role": "system", "content": "a"}], "images": [noise()]}, "no message of the user that could"),
        ({"prompt": "what?", "images": [noise(0 + 1, 400)]}, None),
        ({"prompt": "what?", "image": noise(), "images": [noise()]}, "has images in both columns, image and images"),
    ],
)
def test_a_row_whose_images_do_not_fit_its_messages_is_named_or_left_out(
    row: dict[str, Any], message: str | None
) -> None:
    good = {name: noise() if name == "image" else [noise()] for name in row if name != "prompt"} | {"prompt": "what?"}
    good |= {"image": None} if "image" in row else {}
    if message is None:
        assert len(prompts([row]).tables["train"]) == 1
        return
    with pytest.raises(DataError, match=f"row 1 of the data set.*{message}"):
        prompts([good, row])

    with pytest.warns(UserWarning, match="left out 1 of 2 rows"):
        assert len(prompts([good, row], bad_rows="drop").tables["train"]) == 1


def test_all_rows_with_bad_images_are_named_up_to_a_bound() -> None:
    values = [noise(), b"a", noise(), b"b", *[b"c"] * 4]
    rows = [{"prompt": "what?", "image": value} for value in values]
    named = "; further rows with errors: row 3 of the data set; row 4 of the data set"

    for count in (5, 8):
        end = "$" if count == 5 else "; row 5 of the data set; row 6 of the data set and others$"
        with pytest.raises(
            DataError, match=f"^row 1 of the data set: .*; leave such rows out with bad_rows='drop'{named}{end}"
        ):
            prompts(rows[:count])
        with pytest.warns(UserWarning, match=f"left out {count - 2} of {count} rows.*: row 1 of .*{named}{end}"):
            assert len(prompts(rows[:count], bad_rows="drop").tables["train"]) == 2
    with pytest.raises(DataError, match=r"row 0 .* correct it; further rows with errors: row 1 of the data set$"):
        prompts(rows[4:6])


def test_images_for_a_model_of_text_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"column 'image' holds .* a model that reads text alone.* give tokenizer= its processor"
    ):
        prompts([{"prompt": "what?", "image": noise()}], tokenizer=byte_tokenizer())


def test_prompts_too_long_with_their_images_are_left_out() -> None:
    rows = [{"prompt": "what?", "images": [noise()]}, {"prompt": "what?", "images": [noise()] * 9}]

    assert len(prompts(rows, max_prompt_tokens=60, long_prompts="drop").tables["train"]) == 1
    with pytest.raises(
        DataError, match=r"row 1 .* has 63 tokens with those of its 9 images, and .* allows 60; show .* 'drop'"
    ):
        prompts(rows, max_prompt_tokens=60)


def test_images_of_pillow_that_are_closed_or_cut_off_are_refused_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "noise.jpg"
    Image.effect_noise((200, 200), 50).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    closed = Image.new("RGB", (2, 2))
    closed.close()
    for image in (closed, Image.open(path)):
        with pytest.raises(DataError, match="row 3: its image is damaged"):
            ImageFile.read(image, "row 3")
