"""The demonstration of images: its drawings and answers, a few iterations of it, and what it learns in minutes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from examples import demo_vision
from examples.agents import Scores
from tests.workers import WorkerPool


def test_a_drawing_has_its_colour_and_its_shape_covers_less_than_a_square() -> None:
    rng = random.Random(0)
    areas = dict.fromkeys(demo_vision.SHAPES, 0)
    for _ in range(100):
        for shape in demo_vision.SHAPES:
            image = demo_vision.drawing("red", shape, rng)
            area = sum(pixel == demo_vision.COLOURS["red"] for pixel in image.get_flattened_data())
            assert 0 < area <= 17 * 17
            areas[shape] += area
    assert areas["triangle"] < areas["circle"] < areas["square"]


def test_a_right_answer_names_colour_and_shape() -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("red circle", " red circle", "circle red", "red")]
    assert demo_vision.is_right(None, said, ["red circle"] * 4) == [1.0, 1.0, 0.0, 0.0]


def run(folder: str, seed: int, num_demonstrations: int, num_iterations: int, warm_up_epochs: int) -> list[Scores]:
    settings = replace(
        demo_vision.SETTINGS, folder=Path(folder), seed=seed, num_demonstrations=num_demonstrations,
        num_iterations=num_iterations, warm_up_epochs=warm_up_epochs,
    )  # fmt: skip
    return list(demo_vision.main(settings))


def test_a_few_iterations(workers: WorkerPool, tmp_path: Path) -> None:
    ((before, after),) = workers.run(run, str(tmp_path), 0, 100, 2, 1, world_size=1, init_process_group=False)
    assert before.keys() == after.keys() >= demo_vision.LABELS.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_answers_rise(workers: WorkerPool, tmp_path: Path, seed: int) -> None:
    settings = demo_vision.SETTINGS
    sizes = settings.num_demonstrations, settings.num_iterations, settings.warm_up_epochs
    ((before, after),) = workers.run(
        run, str(tmp_path), seed, *sizes, world_size=1, init_process_group=False, deadline_s=1200.0
    )
    assert after["val/reward"] > before["val/reward"] + 0.2
