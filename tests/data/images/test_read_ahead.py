"""Images are read in threads ahead of the model, in its order, and few at a time."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lightning_realloc import (
    GRPO,
    Conversation,
    MessageEnvironment,
    PromptDataModule,
    SamplingParams,
    StepResult,
    TrainOptions,
)
from lightning_realloc.batch.samples import Samples, model_inputs, prompt_images
from lightning_realloc.data.images import sample_images
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.sample_images import READ_AHEAD
from lightning_realloc.errors import DataError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.exchange.sample_table import PositionedRows
from tests.data.images.test_rows import drawn, prompts
from tests.strategies import runs
from tests.strategies.test_image_rows import ROWS, brightness
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor

NUM_ROWS = 12


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of threads and keys of the images that they read, in order."""
    calls: list[tuple[str, int]] = []
    open_image = ImageFile.open

    def opened(file: ImageFile) -> Any:
        calls.append((threading.current_thread().name.split("_")[0], file.key))
        return open_image(file)

    monkeypatch.setattr(ImageFile, "open", opened)
    monkeypatch.setattr(sample_images, "CACHED_BYTES", 1)
    return calls


def wait_for(read: list[tuple[str, int]], count: int) -> None:
    """Wait until so many images are read, and for a while in which no more may be."""
    ends_at = time.monotonic() + 10
    while len(read) < count and time.monotonic() < ends_at:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(read) == count


def rows() -> Samples:
    """Return rows with an image each."""
    return prompts([{"prompt": "what?", "image": drawn(number)} for number in range(NUM_ROWS)])


def keys(samples: Samples) -> list[int]:
    """Return the keys of the images of rows with one image each."""
    return [file.key for images in samples.objects("images") for file in images.files]


def test_few_samples_are_read_ahead_in_the_order_of_the_model(read: list[tuple[str, int]]) -> None:
    samples = rows()
    expected = [given.extras["pixel_values"] for given in model_inputs(rows())]
    order = [5, 3, *range(6, NUM_ROWS), 0]
    read.clear()

    PositionedRows(samples, np.arange(NUM_ROWS)).read_images_ahead([order[:2], order[2:]])

    wait_for(read, READ_AHEAD)
    assert {key for _, key in read} == {keys(samples)[row] for row in order[:READ_AHEAD]}
    for taken, row in enumerate(order[:-1], start=1):
        images = prompt_images(samples)[row]
        assert images is not None and torch.equal(images.inputs["pixel_values"], expected[row])
        wait_for(read, min(len(order), READ_AHEAD + taken))
    assert {name for name, _ in read} == {"images"}
    assert len({key for _, key in read}) == len(read)


def test_samples_out_of_order_are_read_by_who_asks_and_a_new_order_replaces_the_old(
    read: list[tuple[str, int]],
) -> None:
    samples = rows()
    positioned = PositionedRows(samples, np.arange(NUM_ROWS))
    positioned.read_images_ahead([range(9)])
    wait_for(read, READ_AHEAD)

    inputs = model_inputs(samples)
    assert inputs[11].extras["pixel_values"].shape == (1, 3, 16, 16)
    assert read[-1] == ("MainThread", keys(samples)[11])

    positioned.read_images_ahead([[10, 9]])
    wait_for(read, READ_AHEAD + 3)
    assert {key for _, key in read[-2:]} == {keys(samples)[9], keys(samples)[10]}


def test_a_damaged_image_is_an_error_of_the_sample_that_is_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        drawn(number).save(path)
    samples = prompts([{"prompt": "what?", "image": str(path)} for path in paths])
    paths[1].write_bytes(paths[1].read_bytes()[:-60])

    PositionedRows(samples, np.arange(3)).read_images_ahead([range(3)])
    first, damaged, last = model_inputs(samples)

    assert first.extras["pixel_values"].shape == last.extras["pixel_values"].shape
    with pytest.raises(DataError, match=r"row 1 .*1\.png"):
        damaged.extras["pixel_values"]


def test_a_run_reads_every_image_ahead(read: list[tuple[str, int]]) -> None:
    threads: list[set[str]] = []

    def reward(prompts: Any, completions: Any, images: Any, **columns: Any) -> list[float]:
        threads.append({name for name, _ in read})  # before the reward itself reads images
        scores = brightness(prompts, completions, images, **columns)
        read.clear()
        return scores

    module = runs.grpo(
        actor=tiny_vision_model("llava"), reference=tiny_vision_model("llava", seed=1), reward=reward,
        tokenizer=tiny_processor("llava"), train_options=TrainOptions(micro_batch_tokens=64),
    )  # fmt: skip
    runs.trainer(ReallocStrategy(), 1, max_epochs=1).fit(module, PromptDataModule(ROWS, batch_size=4))

    assert threads == [{"images"}, {"images"}], "generation; then also inference and training of the batch before"
    assert {name for name, _ in read} == {"images"}, "inference and training"


class Showing(MessageEnvironment):
    """Answers each turn with another image."""

    numbers = itertools.count(100)
    keys: ClassVar[set[int]] = set()

    def step(self, message: Mapping[str, Any]) -> StepResult:
        stream = io.BytesIO()
        drawn(next(self.numbers)).save(stream, "PNG")
        self.keys.add(ImageFile.read(stream.getvalue(), "an answer").key)
        return StepResult(images=[stream.getvalue()], reward=float(len(str(message["content"]))))


def test_a_run_reads_every_image_of_answers_ahead(read: list[tuple[str, int]]) -> None:
    actor, reference = (tiny_vision_model("llava", seed=seed, max_position_embeddings=512) for seed in range(2))
    module = GRPO(
        actor, reference=reference, environment=Showing, tokenizer=tiny_processor("llava"),
        conversation=Conversation(max_turns=3, max_turn_tokens=6),
        sampling=SamplingParams(n=2, max_new_tokens=200, seed=1), kl_coef=0.1,
    )  # fmt: skip
    runs.trainer(ReallocStrategy(), 1, max_epochs=1).fit(module, PromptDataModule(ROWS, batch_size=4))

    later = [(name, key) for name, key in read if name != "environment: read"]  # which looks whether one is whole
    assert {name for name, _ in later} == {"images"}, "generation, inference and training"
    of_answers = Counter(key for _, key in later if key in Showing.keys)
    assert len(of_answers) == 32 and set(of_answers.values()) <= {2, 3}, "one of a batch may still be in the cache"
