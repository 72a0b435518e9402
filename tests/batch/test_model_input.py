"""Keys of prompts: equal for equal tokens and further inputs, different for any change of either."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples, extra_inputs, model_inputs, prompt_keys, samples_from_state
from lightning_realloc.errors import DataError


def test_keys_are_equal_for_equal_inputs_alone() -> None:
    values = torch.arange(6.0).view(2, 3)
    inputs = [
        ModelInput((5, 6)),
        ModelInput((5, 7)),
        ModelInput((5, 6), {"a": values}),
        ModelInput((5, 6), {"b": values}),
        ModelInput((5, 6), {"a": values.T}),
        ModelInput((5, 6), {"a": values.view(3, 2)}),
        ModelInput((5, 6), {"a": values.bfloat16()}),
        ModelInput((5, 6), {"a": values, "b": values}),
    ]
    assert len({given.prompt_key for given in inputs}) == len(set(inputs)) == len(inputs)
    assert ModelInput((5, 6), {"a": values.clone()}) == inputs[2]
    assert all(0 <= given.prompt_key < 2**63 for given in inputs)


def test_a_key_does_not_depend_on_the_process() -> None:
    assert ModelInput((5, 6)).prompt_key == 7580301714997443198


def _samples(*prompts: tuple[int, ...], features: list[float] | None = None) -> Samples:
    columns: dict[str, torch.Tensor | Ragged] = {
        "prompt_ids": Ragged.from_list(prompts),
        "response_ids": Ragged.from_list([[8, 9]] * len(prompts)),
    }
    if features is not None:
        columns["input/features"] = Ragged(torch.tensor(features)[:, None], torch.ones(len(prompts), dtype=torch.int64))
    return Samples(torch.arange(len(prompts)), columns)


def test_packs_share_prompts_whose_further_inputs_are_equal() -> None:
    samples = _samples((5, 6), (5, 6), (5, 6), features=[1.0, 1.0, 2.0])
    packed = pack(samples, share_prompts=True)
    assert packed.shared == (0, 2, 0)
    assert packed.extras["features"].flatten().tolist() == [1.0, 2.0]
    assert packed.input_ids[0].tolist() == [5, 6, 8, 9, 8, 9, 5, 6, 8, 9]
    alone = pack(samples)
    assert alone.shared == (0, 0, 0) and alone.extras["features"].flatten().tolist() == [1.0, 1.0, 2.0]


def test_a_column_of_keys_replaces_digests() -> None:
    samples = _samples((5, 6), (5, 6)).with_columns(prompt_key=torch.tensor([3, 4]))
    assert prompt_keys(samples).tolist() == [3, 4]
    assert [given.prompt_key for given in model_inputs(samples)] == [3, 4]
    assert pack(samples, share_prompts=True).shared == (0, 0)


def test_equal_keys_of_different_prompts_are_refused() -> None:
    samples = _samples((5, 6), (5, 7)).with_columns(prompt_key=torch.tensor([3, 3]))
    with pytest.raises(DataError, match=r"samples 0 and 1 differ.*without_columns\('prompt_key'\)"):
        pack(samples, share_prompts=True)


def test_further_inputs_are_sequences() -> None:
    samples = _samples((5, 6)).with_columns(**{"input/features": torch.zeros(1, 2)})
    with pytest.raises(DataError, match="'input/features' must hold sequences"):
        extra_inputs(samples)


def test_responses_of_earlier_checkpoints_get_keys() -> None:
    state = {
        "ids": torch.arange(2),
        "columns": {
            "prompt_id": torch.tensor([0, 0]),
            "prompt_ids": {"values": torch.tensor([5, 6, 5, 6]), "lengths": torch.tensor([2, 2])},
        },
    }
    keys = samples_from_state(state).tensor("prompt_key").tolist()
    assert keys == [ModelInput((5, 6)).prompt_key] * 2
