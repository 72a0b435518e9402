"""Rows with images become the tokens and further inputs that the model's processor makes of them."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from lightning_realloc import PreferenceDataModule, PromptDataModule, SFTDataModule
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.samples import Samples, model_inputs
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.images import sample_images
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.row_images import PillowImages
from lightning_realloc.errors import DataError
from lightning_realloc.rewards import RemoteReward
from tests.vision_processors import PROCESSED_FAMILIES, tiny_processor

SIZES = ((16, 16), (40, 24), (18, 60))


def drawn(number: int) -> Image.Image:
    """Return an image of noise; numbers have other sizes."""
    generator = torch.Generator().manual_seed(number)
    width, height = SIZES[number % 3]
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def table(module: RowDataModule) -> Samples:
    module.setup()
    return module.tables["train"]


def prompts(rows: list[dict[str, Any]], family: str = "llava", **settings: Any) -> Samples:
    return table(PromptDataModule(rows, batch_size=1, tokenizer=tiny_processor(family), **settings))


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("family", PROCESSED_FAMILIES)
def test_prompts_are_what_the_processor_makes_of_text_and_images(family: str) -> None:
    shown = {"type": "image"}
    rows = [
        {"prompt": user("no image"), "images": []},
        {"prompt": user("what is ", shown, "?"), "images": [drawn(1)]},
        {"prompt": user("of ", shown, shown, " and ", shown), "images": [drawn(0), drawn(1), drawn(2)]},
    ]

    samples = prompts(rows, family)

    processor = tiny_processor(family)
    for row, given, ids in zip(rows, model_inputs(samples), samples.ragged("prompt_ids").to_lists(), strict=True):
        text = ProcessorMixin.apply_chat_template(
            processor, row["prompt"], add_generation_prompt=True, tokenize=False, processor_kwargs={}
        )
        expected = processor(text=[text], images=[row["images"]] if row["images"] else None, return_tensors="pt")
        assert ids == expected["input_ids"][0].tolist()
        assert given.token_ids == tuple(ids)
        assert bool(given.extras) == bool(row["images"])
        for name, values in given.extras.items():
            like = expected[name]
            assert torch.equal(values.reshape(like.shape), like), name


@pytest.mark.parametrize("family", ["llava_onevision", "smolvlm", "qwen2_5_vl"])
def test_a_pack_reads_the_images_of_its_samples_once_for_a_shared_prompt(family: str) -> None:
    rows = [{"prompt": user({"type": "image"}, "a"), "image": drawn(n)} for n in (0, 1, 2)]
    samples = prompts(rows, family).repeat(2)
    samples = samples.with_columns(response_ids=samples.ragged("prompt_ids"))
    apart = [given.extras["pixel_values"] for given in model_inputs(samples)[::2]]

    packed = pack(samples, share_prompts=True)

    assert packed.extras["pixel_values"].shape[0] == sum(len(values) for values in apart)
    row = 0
    for values in apart:
        part = packed.extras["pixel_values"][row : row + len(values)]
        assert torch.equal(part[tuple(slice(size) for size in values.shape)], values)
        row += len(values)
    assert len(set(samples.by_ids(samples.ids[::2]).ids.tolist())) == 3


def test_images_behind_the_same_text_have_other_keys_and_equal_ones_the_same() -> None:
    rows = [{"prompt": user({"type": "image"}, "a"), "image": drawn(n)} for n in (0, 3, 0)]

    first, other, same = (given.prompt_key for given in model_inputs(prompts(rows)))

    assert first == same
    assert first != other


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "what?", "image": drawn(0)}],
        [{"prompt": [{"role": "user", "content": "what?"}], "images": [drawn(0)]}],
        [{"prompt": user({"type": "image", "image": drawn(0)}, "what?")}],
        [{"prompt": user({"type": "image"}, "what?"), "image": drawn(0)}],
    ],
)
def test_all_forms_of_a_row_with_an_image_mean_the_same(rows: list[dict[str, Any]]) -> None:
    (expected,) = model_inputs(prompts([{"prompt": user({"type": "image"}, "what?"), "images": [drawn(0)]}]))

    (found,) = model_inputs(prompts(rows))

    assert found == expected
    assert torch.equal(found.extras["pixel_values"], expected.extras["pixel_values"])


def test_files_bytes_and_addresses_are_read_as_images(tmp_path: Path) -> None:
    drawn(1).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "what?", "image": "a.png"}\n')
    (from_file,) = model_inputs(
        table(PromptDataModule(tmp_path / "rows.jsonl", batch_size=1, tokenizer=tiny_processor("llava")))
    )
    address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    for value in (content, {"bytes": content, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, address):
        (found,) = model_inputs(prompts([{"prompt": "what?", "image": value}]))

        assert torch.equal(found.extras["pixel_values"], from_file.extras["pixel_values"])


def test_images_next_to_held_out_rows_are_found(tmp_path: Path) -> None:
    for name, number in (("training", 0), ("held_out", 1)):
        (tmp_path / name).mkdir()
        drawn(number).save(tmp_path / name / "a.png")
        (tmp_path / name / "rows.jsonl").write_text('{"prompt": "what?", "image": "a.png"}\n')
    files = [tmp_path / "training/rows.jsonl"], tmp_path / "held_out/rows.jsonl"

    module = PromptDataModule(files[0], val_data=files[1], batch_size=1, tokenizer=tiny_processor("llava"))
    module.setup()

    shown = [module.tables[name].objects("images")[0][0] for name in ("train", "val")]
    assert [image.size for image in shown] == [SIZES[0], SIZES[1]]


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
@pytest.mark.parametrize("column", ["image", "images"])
def test_prompts_of_text_become_messages_if_other_rows_show_images(column: str, bad_rows: str) -> None:
    values = [None, drawn(0), *([b"damaged"] if bad_rows == "drop" else [])]
    rows = [{"prompt": "what?", column: value} for value in values]

    samples = prompts(rows, bad_rows=bad_rows)

    alone, shown = samples.objects("prompt")
    assert [message["role"] for message in (*alone, *shown)] == ["user", "user"]
    assert alone[0]["content"] == "what?"
    assert [len(images) for images in samples.objects("images")] == [0, 1]
    ids, _ = samples.ragged("prompt_ids").to_lists()
    processor = tiny_processor("llava")
    text = processor.apply_chat_template(user("what?"), add_generation_prompt=True, tokenize=False)
    assert ids == processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_prompts_of_text_stay_text_if_no_row_shows_images() -> None:
    assert prompts([{"prompt": "what?", "image": None}] * 2).objects("prompt") == ("what?", "what?")


def test_sft_and_preferences_show_images_in_front_of_their_answers() -> None:
    answer = [{"role": "assistant", "content": "red"}]
    sft = table(
        SFTDataModule(
            [{"messages": user({"type": "image"}, "what?") + answer, "images": [drawn(0)]}], batch_size=1,
            tokenizer=tiny_processor("llava"),
        )
    )  # fmt: skip
    pairs = table(
        PreferenceDataModule(
            [{"prompt": "what?", "chosen": "red", "rejected": "blue", "image": drawn(0)}], batch_size=1,
            tokenizer=tiny_processor("llava"),
        )
    )  # fmt: skip

    (prompt,), both = model_inputs(sft), model_inputs(pairs)

    assert [each.token_ids for each in both] == [prompt.token_ids] * 2
    assert all(torch.equal(each.extras["pixel_values"], prompt.extras["pixel_values"]) for each in both)
    assert pairs.ragged("response_ids").to_lists()[0] == sft.ragged("response_ids").to_lists()[0]


def test_a_cut_prompt_never_cuts_an_image_apart() -> None:
    rows = [{"prompt": user({"type": "image"}, "what is this?"), "image": drawn(0)}]

    with pytest.raises(DataError, match=r"row 0 .*show 3 of 4 parts of its 1 image;.*drop long rows"):
        prompts(rows, max_prompt_tokens=30, long_prompts="truncate")


def test_images_reach_other_processes_and_servers_as_images() -> None:
    (images,) = prompts([{"prompt": "what?", "image": drawn(1)}]).objects("images")
    (again,) = pickle.loads(pickle.dumps([images]))

    assert again == images
    assert np.array_equal(np.asarray(again[0]), np.asarray(drawn(1)))
    assert torch.equal(again.inputs["pixel_values"], images.inputs["pixel_values"])
    given: list[Any] = PillowImages().put_in(user({"type": "image", "image": ImageFile.read(drawn(1), "row 0")}))
    content = {"prompts": [given], "completions": [given], "columns": {"images": [images]}}
    everything, text = (RemoteReward("http://localhost", columns=names) for names in (None, ["answer"]))
    sent = [json.loads(reward._body(*content.values(), slice(1))[0]) for reward in (everything, text)]
    (address,) = images.addresses()
    assert [body["completions"][0][0]["content"][0]["image"] for body in sent] == [address, None]
    assert sent[0]["columns"]["images"] == [[address]]
    assert np.array_equal(np.asarray(ImageFile.read(address, "row 0").open()), np.asarray(drawn(1)))


def test_pixels_of_few_samples_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = prompts([{"prompt": "what?", "image": drawn(number)} for number in range(6)])
    opened: list[int] = []
    open_image = ImageFile.open
    monkeypatch.setattr(ImageFile, "open", lambda file: opened.append(file.key) or open_image(file))
    monkeypatch.setattr(sample_images, "CACHED_BYTES", 2 * 3 * 16 * 16 * 4)

    for given in (*model_inputs(samples), *model_inputs(samples)[-2:], *model_inputs(samples)[:1]):
        assert given.extras["pixel_values"].shape == (1, 3, 16, 16)

    assert len(opened) == 7
