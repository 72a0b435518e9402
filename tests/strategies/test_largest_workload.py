"""The longest sequence that data and sampling allow is compared with the limits of forward passes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples, model_inputs
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import DataError
from lightning_realloc.strategies.largest_workload import check_longest_sequences, largest_images, mean_images
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.shapes.tower import Tower
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.vision_models import vision_config
from tests.vision_processors import PROCESSED_FAMILIES, tiny_processor


def check(module: Any, data: Any, plan: dict[str, Any]) -> None:
    """Check an algorithm's calls against the rows of a data module."""
    data.setup()
    trainer: Any = runs.trainer("auto", 1)
    trainer.datamodule = data
    check_longest_sequences(module, trainer, ExecutionPlan.from_mapping(plan), module.dataflow.iteration_calls)


def options(limit: int) -> Any:
    """Return training options with a limit of tokens."""
    return runs.options(micro_batch_tokens=limit)


def test_a_row_that_fits_no_forward_pass_is_refused_with_call_and_setting() -> None:
    # The byte tokenizer makes a token of each letter, and ends a completion: 3 + 4 + 1 tokens.
    data = SFTDataModule([{"prompt": "abc", "completion": "defg"}], batch_size=1, tokenizer=runs.byte_tokenizer())
    plan = runs.calls(actor_train="dp1")
    check(runs.sft(train_options=options(8)), data, plan)
    with pytest.raises(DataError, match=r"micro-batch of actor\.train; one has 8 tokens, and micro_batch_tokens=7"):
        check(runs.sft(train_options=options(7)), data, plan)
    planned = runs.calls(actor_train={"layout": "dp1", "micro_batch_tokens": 4})
    with pytest.raises(DataError, match=r"micro_batch_tokens=4: raise it to at least 8 where it is set, in the plan's"):
        check(runs.sft(train_options=options(8)), data, planned)


def test_both_sides_of_a_pair_must_fit() -> None:
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "e"}]  # 2 + 2 + 1 and 2 + 1 + 1 tokens
    data = PreferenceDataModule(rows, batch_size=1, tokenizer=runs.byte_tokenizer())
    plan = runs.calls(actor_train="dp1", reference_infer="dp1")
    check(preferences.dpo(train_options=options(9)), data, plan)
    with pytest.raises(DataError, match=r"a pair must fit one micro-batch of .*; one has 9 tokens"):
        check(preferences.dpo(train_options=options(8)), data, plan)


def test_responses_that_may_become_too_long_are_warned_about() -> None:
    data = PromptDataModule([{"prompt": "abcd"}], batch_size=1, tokenizer=runs.byte_tokenizer())  # 4 + at most 6 tokens
    plan = runs.calls(actor_train="dp1", actor_generate="dp1", reference_infer="dp1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(runs.grpo(train_options=options(10)), data, plan)
    with pytest.warns(UserWarning, match="micro_batch_tokens=9 of .* is less than the 10 tokens of the longest prompt"):
        check(runs.grpo(train_options=options(9)), data, plan)
    with pytest.raises(DataError, match="one has 4 tokens, and micro_batch_tokens=3"):
        check(runs.grpo(train_options=options(3)), data, plan)
    # A call whose limit is only perhaps too low hides none whose limit certainly is.
    for lower in ("actor_train", "reference_infer"):
        planned = {"calls": plan["calls"] | runs.calls(**{lower: {"layout": "dp1", "micro_batch_tokens": 3}})["calls"]}
        with pytest.raises(DataError, match="one has 4 tokens, and micro_batch_tokens=3"):
            check(runs.grpo(train_options=options(9)), data, planned)


# ---- images
def shown(*sizes: tuple[int, int]) -> dict[str, Any]:
    return {"prompt": "ab", "images": [Image.new("RGB", size) for size in sizes]}


def num_patches(inputs: Mapping[str, Tensor], tower: Tower) -> int:
    """Return the patches in the tensors that a model gets; a class token counts as one of each part."""
    pixels = inputs["pixel_values"]
    if pixels.ndim == 2:
        return len(pixels)
    parts, height, width = math.prod(pixels.shape[:-3]), *pixels.shape[-2:]
    return parts * ((height // tower.patch) * (width // tower.patch) + tower.num_extra)


@pytest.mark.parametrize("family", PROCESSED_FAMILIES)
def test_images_of_rows_are_counted_as_the_model_gets_them(family: str) -> None:
    rows = [shown(), shown((16, 16)), shown((40, 24), (18, 60), (16, 16)), shown((18, 60))]
    data = PromptDataModule(rows, batch_size=2, tokenizer=tiny_processor(family))
    data.setup()
    trainer: Any = runs.trainer("auto", 1)
    trainer.datamodule = data
    role = Role(name="actor", source=vision_config(family), trained=True)
    tower = describe_roles([role], {})["actor"].tower
    assert tower is not None
    given = model_inputs(data.tables["train"])
    patches = [num_patches(one.extras, tower) if one.extras else 0 for one in given]
    placeholders = vision_config(family).image_token_id
    tokens = [one.token_ids.count(placeholders) for one in given]
    largest, mean = largest_images(trainer, tower), mean_images(trainer, tower)
    assert largest is not None and mean is not None
    assert (largest.num_patches, mean.num_patches) == pytest.approx((patches[2], sum(patches) / 4))
    if family != "llava_onevision":  # which drops features of padding, and adds some for ends of lines
        assert (largest.tokens, mean.tokens) == pytest.approx((tokens[2], sum(tokens) / 4))
    assert largest_images(trainer, None) is None

    if family == "llava_onevision":  # whose samples have another number of parts each
        return
    columns = {
        f"input/{name}": Ragged.from_list([one.extras.get(name, values[:0]) for one in given])
        for name, values in given[2].extras.items()
    }
    trainer.datamodule = SimpleNamespace(tables={"train": Samples(torch.arange(4), columns)})
    own = largest_images(trainer, tower)
    assert own is not None and own.num_patches == pytest.approx(patches[2])
