"""Images of planned prompts: sizes from flags or rows, and patches and tokens as the model's processor makes them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import AutoImageProcessor

from lightning_realloc import cli
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_request import PlanRequest, parse_request
from tests.vision_models import VISION_FAMILIES, vision_config
from tests.vision_processors import PROCESSED_FAMILIES, tiny_processor

SIZES = ((32, 32), (40, 24), (18, 60), (130, 70))
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2_vl": ({"max_pixels": 512}, {"min_pixels": 4096, "max_pixels": 8192}),
    "qwen2_5_vl": ({"max_pixels": 512},),
    "qwen3_vl": ({"size": {"shortest_edge": 256, "longest_edge": 2048}},),
    "internvl": ({"max_patches": 6},),
    "smolvlm": ({"do_image_splitting": False}, {"size": {"longest_edge": 96}}),
    "idefics3": ({"do_image_splitting": False},),
    "llava_onevision": ({"image_grid_pinpoints": [[32, 32], [64, 64]]},),
    "llava": ({"crop_size": {"height": 16, "width": 24}},),
}
"""Family -> settings of its processor of images that change patches and tokens."""


def folder_of(family: str, folder: Path) -> Path:
    """Write the family's tiny configuration and its image processor."""
    vision_config(family).save_pretrained(folder)
    tiny_processor(family).image_processor.save_pretrained(folder)
    return folder


def write_run(folder: Path, rows: list[dict[str, Any]], family: str = "llava", **settings: Any) -> str:
    """Write a configuration of `fit` whose data shows images; return its name."""
    folder_of(family, folder / "model")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"data": str(folder / "rows.jsonl"), "batch_size": 2, **settings.pop("data", {})}
    content = {
        "trainer": {"accelerator": "cuda", "devices": 2},
        "model": {
            "class_path": "GRPO",
            "init_args": {"actor": str(folder / "model"), "reward": "my.judge", **settings},
        },
        "data": {"class_path": "PromptDataModule", "init_args": data},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "run.yaml")


def drawn(folder: Path, name: str, width: int, height: int) -> str:
    Image.new("RGB", (width, height)).save(folder / name)
    return name


def planned(request: PlanRequest) -> Any:
    """Return the images that the actor reads, their sizes, and by whose settings."""
    tower = read_roles(request.sources, request.dataflow, is_priced=False)["actor"].tower
    assert tower is not None
    return request.images.read(tower)


@pytest.mark.parametrize(
    ("family", "settings"),
    [(family, settings) for family in PROCESSED_FAMILIES for settings in ({}, *SETTINGS.get(family, ()))],
)
def test_images_have_the_tokens_and_patches_of_the_models_processor(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    assert set(PROCESSED_FAMILIES) <= set(VISION_FAMILIES)
    row = {"prompt": "what?", "images": [drawn(tmp_path, f"{number}.png", *size) for number, size in enumerate(SIZES)]}
    run = write_run(tmp_path, [row], family, data={"processor_kwargs": settings})
    images, sizes, by = planned(parse_request(["--config", run, "--check"]))
    assert sizes == SIZES and by == f"the image processor of {tmp_path / 'model'}"

    whole = tiny_processor(family)
    whole.image_processor = AutoImageProcessor.from_pretrained(tmp_path / "model", **settings)
    processor, tokens, patches = ImageProcessor(whole), 0, 0
    vision = vision_config(family).vision_config
    edge = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    extra = int(family in ("internvl", "llava"))  # a class token
    for size in SIZES:
        (text,) = processor.placeholders((size,)).texts
        text = re.sub(r"_[3-9]", "_1", text)  # places of parts that the tiny vocabulary lacks
        tokens += len(whole.tokenizer(text.replace("\n\n", "\n"), add_special_tokens=False)["input_ids"])
        shape = processor.placeholders((size,)).shapes["pixel_values"]
        if family.startswith("qwen"):
            patches += shape[0]
        else:
            patches += math.prod(shape[:-3]) * ((shape[-2] // edge) * (shape[-1] // edge) + extra)
    assert images.tokens == pytest.approx(tokens)
    assert images.num_patches == pytest.approx(patches)


def test_rows_of_the_data_say_how_many_images_there_are_and_flags_take_precedence(tmp_path: Path) -> None:
    small, large = drawn(tmp_path, "a.png", 32, 32), drawn(tmp_path, "b.png", 40, 24)
    rows = [
        {"prompt": "none", "images": []},
        {"prompt": "one", "images": [large]},
        {"prompt": "two", "images": [small, large]},
    ]
    run = ["--config", write_run(tmp_path, rows), "--check"]
    assert planned(parse_request(run))[1] == ((32, 32), (40, 24))
    assert planned(parse_request([*run, "--image-size", "64x48"]))[1] == ((64, 48),) * 2
    assert planned(parse_request([*run, "--images-per-prompt", "3"]))[1][0] in ((32, 32), (40, 24))
    assert len(planned(parse_request([*run, "--images-per-prompt", "3"]))[1]) == 3
    assert planned(parse_request([*run, "--images-per-prompt", "0"])) is None
    both = planned(parse_request([*run, "--images-per-prompt", "1", "--image-size", "100x80"]))
    assert both[1] == ((100, 80),)


def test_a_plan_counts_images_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "what?", "image": drawn(tmp_path, "a.png", 64, 64)}]
    run = ["--config", write_run(tmp_path, rows, "smolvlm", data={"max_prompt_tokens": 200}), "--cluster", "h100"]
    cli.run(["plan", *run, "--seconds", "0.1"])
    text = capsys.readouterr().out
    # 2 x 2 squares with 4 tokens and two around them, a break after each line, and the whole image.
    assert "64 sequences" not in text and f"of {200 - (2 * (2 * 6 + 1) + 7)} + 33 + " in text
    assert "1 image of 64x64 in each prompt: 33 of its tokens, and 80 patches for the tower, which is frozen" in text
    assert f"resized as by the image processor of {tmp_path / 'model'}" in text
    cli.run(["plan", *run, "--seconds", "0.1", "--train-vision", "projector"])
    assert "which is frozen, with a trained projector" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "model")
    vision_config("smolvlm").save_pretrained(tmp_path / "model")
    cli.run(["plan", *run, "--seconds", "0.1"])
    assert f"resized as by published smolvlm models, as there is no image processor of {tmp_path / 'model'} on" in (
        capsys.readouterr().out
    )


def test_images_that_cannot_be_read_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--config", write_run(tmp_path, [{"prompt": "what?", "image": "gone.png"}]), "--cluster", "h100"]
    cli.run(["plan", *run, "--seconds", "0.1"])
    text = capsys.readouterr().out
    assert "images of the data are not counted: " in text and "line 1: there is no image 'gone.png' in" in text
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    with pytest.raises(PlanError, match=r"the image processor of .* cannot be loaded"):
        cli.run(["plan", *run, "--images-per-prompt", "1"])


def test_images_longer_than_prompts_may_be_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "what?", "image": drawn(tmp_path, "a.png", 64, 64)}]
    for setting in ("max_prompt_tokens", "max_tokens"):
        run = write_run(tmp_path, rows, "smolvlm", data={"max_prompt_tokens": 20})
        if setting == "max_tokens":
            content = yaml.safe_load(Path(run).read_text())
            content["data"] = {
                "class_path": "SFTDataModule",
                "init_args": {"data": str(tmp_path / "rows.jsonl"), "batch_size": 1, "max_tokens": 20},
            }
            content["model"] = {"class_path": "SFT", "init_args": {"actor": str(tmp_path / "model")}}
            Path(run).write_text(yaml.safe_dump(content))
        with pytest.raises(ReallocError, match=rf"have 33 tokens, and data.init_args.{setting} allows 20"):
            cli.run(["plan", "--config", run, "--cluster", "h100"])


def test_the_trained_parts_of_a_configuration_are_planned(tmp_path: Path) -> None:
    memory = {}
    for trained in ("none", "projector", "all"):
        request = parse_request(["--config", write_run(tmp_path, [{"prompt": "a"}], train_vision=trained), "--check"])
        assert request.flags.train_vision == trained
        roles = read_roles(request.sources, request.dataflow, is_priced=False, train_vision=request.flags.train_vision)
        memory[trained] = roles["actor"].trained_vision
    assert memory == {"none": None, "projector": "projector", "all": "tower"}
    with pytest.raises(PlanError, match="--train-vision='both' must be one of none, projector, all"):
        parse_request(["--actor", "Qwen/Qwen3-0.6B", "--cluster", "h100:1x1", "--train-vision", "both"])
    with pytest.raises(
        PlanError, match=r"train_vision='all' trains a part for images, and actor=Qwen/Qwen3-0\.6B reads"
    ):
        cli.run(["plan", "--actor", "Qwen/Qwen3-0.6B", "--cluster", "h100:1x1", "--train-vision", "all"])
