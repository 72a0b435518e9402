"""VLLMEngine's side of prompts with images: files, the processor, restarts, and refusals; and the child's checks."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import model_inputs
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import SamplingParams, VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.inside import child_images as child
from tests.data.images.test_rows import drawn, prompts, user
from tests.generation.vllm.stand_in import notes, stand_in
from tests.models import tiny_model
from tests.vision_models import IMAGE, VIDEO, tiny_vision_model
from tests.vision_processors import tiny_processor

GREEDY = SamplingParams(max_new_tokens=3, temperature=0)
SHOWN = {"type": "image"}


def engine_with(folder: Path, behaviour: str = "", family: str = "llava", **options: Any) -> VLLMEngine:
    """Return an engine on a program that behaves so."""
    options = {"python": stand_in(folder, behaviour), **options}
    return VLLMEngine(tiny_vision_model(family), options=VLLMOptions(**options))


def inputs(*images: Sequence[Any], family: str = "llava") -> list[ModelInput]:
    """Return prompts of one text, each with its images."""
    return model_inputs(
        prompts([{"prompt": user(*[SHOWN] * len(each), "ab"), "images": each} for each in images], family)
    )


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the settings of every start."""
    return list(map(json.loads, notes(folder, "settings")))


def test_prompts_go_with_their_expanded_tokens_and_with_a_file_for_each_image(tmp_path: Path) -> None:
    drawn(1).save(path := tmp_path / "one.png")
    stream = BytesIO()
    drawn(2).save(stream, "JPEG")
    given = inputs([path], [], [stream.getvalue(), path])
    engine = engine_with(tmp_path)

    engine.generate(given, SamplingParams(max_new_tokens=3, temperature=0, n=2))

    requests = list(map(json.loads, notes(tmp_path, "request")))
    assert [tuple(request["prompt"]) for request in requests] == [one.token_ids for one in given for _ in range(2)]
    assert given[0].token_ids.count(IMAGE) > 1, "expanded"
    of_bytes = requests[4]["images"][0]
    assert [request["images"] for request in requests] == [[str(path)]] * 2 + [[]] * 2 + [[of_bytes, str(path)]] * 2
    hashes = [hashlib.sha256(content).hexdigest() for content in (path.read_bytes(), stream.getvalue())]
    assert notes(tmp_path, "image") == [hashes[0]] * 2 + [hashes[1], hashes[0]] * 2
    assert not Path(of_bytes).parent.exists(), "removed after the call"
    engine.service.close()


def test_images_of_pillow_go_without_loss(tmp_path: Path) -> None:
    shown = ImageFile.read(drawn(4), "row 0")
    path = shown.path(tmp_path)
    assert ImageFile.read(path, "row 0").open().tobytes() == drawn(4).tobytes()
    assert shown.path(tmp_path) == path, "written once"


def test_a_vllm_for_text_alone_is_replaced_once_when_images_come(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    for shown in ([], [drawn(0)], [], [drawn(1)]):
        engine.generate(inputs(shown), GREEDY)
    text, images = starts(tmp_path)
    assert text["llm"]["language_model_only"] and text["llm"]["skip_tokenizer_init"] and text["images"] is None
    assert "processor_config.json" not in text["files"]
    assert "language_model_only" not in images["llm"] and not images["llm"]["skip_tokenizer_init"]
    assert images["images"] == {"placeholders": [IMAGE], "backend": "pil"}
    assert {"config.json", "processor_config.json", "tokenizer.json"} <= set(images["files"])
    assert len(notes(tmp_path, "weights")) == 2
    engine.service.close()


def test_vllm_gets_the_processor_with_the_settings_of_the_user(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    given = inputs([drawn(0)])
    assert given[0].images is not None
    given[0].images.save_processor(tmp_path / "saved")
    engine.generate(given, GREEDY)
    saved = json.loads((tmp_path / "saved/processor_config.json").read_text())
    assert saved["image_processor"]["size"] == {"shortest_edge": 16}
    engine.service.close()


def test_placeholders_are_never_drawn_and_models_of_text_have_none(tmp_path: Path) -> None:
    given = [[5, 6]]
    (tmp_path / "text").mkdir()
    for engine in (
        engine_with(tmp_path, family="llava_onevision"),
        VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=stand_in(tmp_path / "text"))),
    ):
        engine.generate(given, GREEDY)
        engine.service.close()
    (asked,), (of_text,) = notes(tmp_path, "sampling"), notes(tmp_path / "text", "sampling")
    lowest = torch.finfo(torch.float32).min
    assert json.loads(asked)["logit_bias"] == {str(IMAGE): lowest, str(VIDEO): lowest}
    assert json.loads(of_text)["logit_bias"] == {}


def test_a_refusal_of_vllm_ends_the_call_and_is_not_tried_again(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, "reads no images", restarts=3)
    with pytest.raises(GenerationError, match=r"^vLLM reads no images with Llava; use engine='native'$"):
        engine.generate(inputs([drawn(0)]), GREEDY)
    assert len(notes(tmp_path, "started")) == 1


def test_a_server_is_refused_for_prompts_with_images() -> None:
    engine = VLLMEngine(tiny_vision_model("llava"), options=VLLMOptions(address="http://127.0.0.1:9"))
    with pytest.raises(
        GenerationError, match=r"the server http://127.0.0.1:9 would expand the tokens .* leave address"
    ):
        engine.generate(inputs([drawn(0)]), GREEDY)


def test_images_for_a_model_of_text_and_inputs_without_images_are_refused(tmp_path: Path) -> None:
    engine = VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=stand_in(tmp_path)))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.forward has no argument 'pixel_values'"):
        engine.generate(inputs([drawn(0)]), GREEDY)
    own = ModelInput((5, IMAGE, 6), {"pixel_values": torch.zeros(1, 3, 16, 16)})
    with pytest.raises(GenerationError, match="the model's input 'pixel_values' needs an engine that passes further"):
        engine_with(tmp_path).generate([own], GREEDY)
    assert not (tmp_path / "notes").exists(), "before vLLM starts"


def test_images_in_the_answers_of_an_environment_are_refused(tmp_path: Path) -> None:
    engine, params = engine_with(tmp_path), SamplingParams(max_new_tokens=9, stop_token_ids=tuple(range(128)))
    with pytest.raises(GenerationError, match=f"the token {IMAGE} in an answer of its environment"):
        engine.generate(inputs([drawn(0)]), params, environment=lambda turn: [5, IMAGE, IMAGE])


def test_images_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    engine, given = engine_with(tmp_path), inputs([drawn(0)])
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(GenerationError, match=r"images of prompts cannot be handed to vLLM .* No space left .* TMPDIR"):
        engine.generate(given, GREEDY)


# ---- in vLLM's process
class Renderer:
    """Finds an image at some tokens, as vLLM does."""

    def __init__(self, offset: int, length: int, marks: Sequence[bool] | None = None) -> None:
        self.used = SimpleNamespace(image_processor=SimpleNamespace(backend="pil"))
        self.mm_processor = SimpleNamespace(info=SimpleNamespace(get_hf_processor=lambda: self.used))
        is_embed = None if marks is None else torch.tensor(marks)
        self._found = SimpleNamespace(offset=offset, length=length, is_embed=is_embed)

    def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (given,) = prompts
        assert given["multi_modal_data"]["image"][0].mode == "RGB"
        return [{**given, "mm_placeholders": {"image": [self._found]}}]


def image_prompts(renderer: Renderer, backend: str = "pil", **config: Any) -> child.ImagePrompts:
    """Return the child's reader of prompts on such a vLLM."""
    hf_config = SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])
    settings = {"model": "", "hf_config": hf_config, "is_mm_prefix_lm": False, **config}
    engine = SimpleNamespace(vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")))
    llm = SimpleNamespace(renderer=renderer, model_config=SimpleNamespace(**settings), llm_engine=engine)
    return child.ImagePrompts(llm, [9], backend)


def test_the_child_takes_prompts_whose_images_vllm_finds_where_they_are(tmp_path: Path) -> None:
    drawn(0).save(path := tmp_path / "image.png")
    for renderer in (Renderer(1, 2), Renderer(0, 4, [False, True, True, False])):
        made = image_prompts(renderer).prompt([5, 9, 9, 6], [str(path)])
        assert made["prompt_token_ids"] == [5, 9, 9, 6]
    for renderer in (Renderer(1, 1), Renderer(1, 2, [False, True]), Renderer(2, 2)):
        with pytest.raises(
            child.ImagesRefused, match="the run's processor put them at 2 tokens from 1 to 2; give the run"
        ):
            image_prompts(renderer).prompt([5, 9, 9, 6], [str(path)])


def test_the_child_makes_pixels_by_the_library_of_training(tmp_path: Path) -> None:
    tiny_processor("llava").save_pretrained(tmp_path)
    renderer = Renderer(1, 2)
    renderer.used.image_processor.backend = "torchvision"
    image_prompts(renderer, model=str(tmp_path))
    assert isinstance(renderer.used.image_processor, CLIPImageProcessorPil)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_child_refuses_pixels_of_a_library_that_it_lacks(tmp_path: Path) -> None:
    tiny_processor("llava").save_pretrained(tmp_path)
    with pytest.raises(
        child.ImagesRefused, match="training makes pixels by torchvision, which vLLM's environment lacks"
    ):
        image_prompts(Renderer(1, 2), "torchvision", model=str(tmp_path))


def test_the_child_refuses_models_that_its_vllm_cannot_read_images_with() -> None:
    text = Renderer(0, 1)
    text.mm_processor = None  # type: ignore[assignment]
    with pytest.raises(
        child.ImagesRefused, match=r"vLLM reads no images with Gemma3ForConditionalGeneration; use engine="
    ):
        image_prompts(text)
    with pytest.raises(child.ImagesRefused, match=r"tokens of an image see each other in Gemma3.* hides later ones"):
        image_prompts(Renderer(0, 1), is_mm_prefix_lm=True)


def test_the_child_opens_images_as_training_does(tmp_path: Path) -> None:
    turned = drawn(1)
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=turned.getexif())
    faint = drawn(2).convert("RGBA")
    faint.putalpha(ImageOps.invert(drawn(2).convert("L")))
    faint.save(tmp_path / "faint.png")
    paths = [tmp_path / "turned.jpg", tmp_path / "faint.png"]
    for made, path in zip(child._opened(tuple(map(str, paths))), paths, strict=True):
        expected = ImageFile.read(path, "row 0").open()
        assert (made.size, made.mode, made.tobytes()) == (expected.size, "RGB", expected.tobytes())
    assert Image.open(paths[0]).size == (40, 24) and ImageFile.read(paths[0], "row 0").size == (24, 40)
    with pytest.raises(
        child.ImagesRefused, match=r"vLLM cannot read an image: .*gone\.png.*; leave images as they are"
    ):
        child._opened((str(tmp_path / "gone.png"),))
