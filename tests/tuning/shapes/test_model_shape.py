"""Sizes of a model that its config states: sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import AutoConfig

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from tests.tuning.estimate.test_roofline import estimator, seconds
from tests.tuning.examples import SMALL, shape_of

SIZES: dict[str, Any] = {
    "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
}  # fmt: skip


def _shape(family: str, **given: Any) -> ModelShape:
    config = AutoConfig.for_model(family, **SIZES, **given)
    shape = describe_roles([Role(name="any", source=config, trained=True)], {})["any"].shape
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("shape_of_family", "window", "num_windowed"),
    [
        (partial(_shape, "mistral", sliding_window=32), 32, 6),
        (partial(_shape, "mistral", sliding_window=None), None, 0),
        (partial(_shape, "gemma3_text", sliding_window=32, sliding_window_pattern=3), 32, 4),
        (partial(_shape, "qwen2", sliding_window=32), None, 0),  # only with use_sliding_window
        (partial(shape_of, "gpt-oss-20b"), 128, 12),
        (partial(shape_of, SMALL), None, 0),  # described as a Mistral, whose config has a window by default
    ],
)
def test_layers_of_a_sliding_window_are_read_from_the_config(
    shape_of_family: Callable[[], ModelShape], window: int | None, num_windowed: int
) -> None:
    shape = shape_of_family()
    assert (shape.window, shape.num_windowed) == (window, num_windowed)


@pytest.mark.parametrize("length", [8, 32, 33, 400])
def test_tokens_attend_to_those_of_the_window_in_its_layers(length: int) -> None:
    shape = _shape("gemma3_text", sliding_window=32, sliding_window_pattern=3)
    whole = sum(range(1, length + 1)) / length
    inside = sum(min(position, 32) for position in range(1, length + 1)) / length
    naive = (4 * inside + 2 * whole) / 6
    assert shape.mean_context(length / 2) == pytest.approx(naive, abs=0.51)  # a token attends to itself


def test_windows_shorten_training() -> None:
    model = "layers=8,hidden=1024,intermediate=256,heads=16,vocabulary=100"
    prices, shorter = estimator(model), estimator(model)
    for name, role in shorter.roles.items():
        assert role.shape is not None
        shorter.roles[name] = replace(role, shape=replace(role.shape, window=64, num_windowed=4))
    for call in ("reference.infer", "actor.train"):
        assert seconds(call, "dp8", shorter).total < seconds(call, "dp8", prices).total
