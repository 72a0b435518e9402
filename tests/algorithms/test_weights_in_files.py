"""Models whose weights stay in their files until they are divided: the same values, without memory for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.mapped_weights import is_mapped
from lightning_realloc.runtime.model.merged_weights import read_region
from lightning_realloc.runtime.model.model_classes import Task
from lightning_realloc.runtime.model.recorded_init import weight_values
from tests.models import tiny_model, tiny_scorer
from tests.strategies.peft.peft_runs import LORA

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def saved(folder: Path, model: PreTrainedModel, dtype: torch.dtype, **options: Any) -> Path:
    """Save a model in a dtype."""
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def both(role: Role, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return the model of a role in memory, and with its weights in files."""
    return role.build(seed=3, **options), role.build(seed=3, deferred=True, **options)


def assert_same(whole: nn.Module, mapped: nn.Module) -> None:
    """Compare names, values, what is trained, and buffers; weights may have the files' dtype."""
    theirs = dict(mapped.named_parameters(remove_duplicate=False))
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        other = theirs.pop(name)
        assert torch.equal(parameter, weight_values(other).float()), name
        assert parameter.requires_grad == other.requires_grad, name
    assert not theirs
    buffers = dict(mapped.named_buffers())
    for name, buffer in whole.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    assert [len(names) for names in ties(whole)] == [len(names) for names in ties(mapped)]
    assert whole.config.to_dict() == mapped.config.to_dict()
    assert whole.training and mapped.training


def ties(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def in_memory(model: nn.Module) -> list[str]:
    """Return the parameters that take memory."""
    return [name for name, parameter in model.named_parameters() if not (parameter.is_meta or is_mapped(parameter))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gpt2", "opt", "phi3", "gpt_neox"])
def test_values_equal_those_in_memory_and_take_none(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model(family), dtype)
    whole, mapped = both(Role(name="actor", source=folder, trained=True))
    assert_same(whole, mapped)
    assert in_memory(mapped) == []
    assert {parameter.dtype for parameter in mapped.parameters()} == {dtype}
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}


def test_several_files_and_files_of_torch_are_mapped(tmp_path: Path) -> None:
    several = saved(tmp_path / "several", tiny_model("llama"), torch.bfloat16, max_shard_size="50KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    pickled = saved(tmp_path / "pickled", tiny_model("qwen2"), torch.bfloat16)
    (pickled / "model.safetensors").unlink()
    torch.save(tiny_model("qwen2").to(torch.bfloat16).state_dict(), pickled / "pytorch_model.bin")
    for folder in (several, pickled):
        whole, mapped = both(Role(name="actor", source=folder, trained=False))
        assert_same(whole, mapped)
        assert in_memory(mapped) == []


def test_files_that_cannot_be_mapped_are_in_memory_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, tiny_model("llama"), torch.bfloat16)
    (folder / "model.safetensors").unlink()
    state = tiny_model("llama").to(torch.bfloat16).state_dict()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        whole, loaded = both(Role(name="actor", source=folder, trained=True))
    assert_same(whole, loaded)
    assert len(in_memory(loaded)) == len(state)
    assert any(f"holds {len(state)} of its weights" in message for message in caplog.messages)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_a_new_head_is_in_memory_in_float32_with_the_values_of_its_seed(task: Task, tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model("llama"), torch.bfloat16)
    whole, mapped = both(Role(name="critic", source=folder, trained=True, task=task))
    assert_same(whole, mapped)
    assert {name.partition(".")[0] for name in in_memory(mapped)} == {"score"}
    assert mapped.get_parameter("score.weight").dtype == torch.float32


def test_a_saved_head_has_its_values(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_scorer("qwen2"), torch.bfloat16)
    whole, mapped = both(Role(name="reward", source=folder, trained=False, task="sequence_classification"))
    assert_same(whole, mapped)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_new_adapters_are_in_float32_over_weights_in_files(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model(family), torch.bfloat16)
    whole, mapped = both(Role(name="actor", source=folder, trained=True, peft=LORA))
    assert_same(whole, mapped)
    assert all(".lora_" in name for name in in_memory(mapped)) and in_memory(mapped)
    critic = Role(name="critic", source=folder, trained=True, peft=LORA, task="token_classification")
    assert_same(*both(critic))


def test_adapters_that_are_merged_or_need_norms_keep_weights_in_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", tiny_model("llama"), torch.bfloat16)
    for role in (
        Role(name="actor", source=folder, trained=True, peft={**LORA, "use_dora": True}),
        Role(name="actor", source=tiny_model("llama"), trained=True),
    ):
        assert not role.can_defer_weights
        whole, other = both(role)
        assert_same(whole, other)
        assert len(in_memory(other)) == len(list(other.parameters()))


def test_a_model_from_a_config_is_made_when_it_is_divided() -> None:
    role = Role(name="critic", source=tiny_model("llama").config, trained=True, task="token_classification", peft=LORA)
    whole, deferred = both(role)
    for name, parameter in whole.named_parameters():
        other = deferred.get_parameter(name)
        assert other.is_meta == (".lora_" not in name and not name.startswith("score.")), name
        assert torch.equal(weight_values(other), parameter), name
        assert other.requires_grad == parameter.requires_grad, name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_merged_when_they_are_read(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model(family), torch.bfloat16)
    whole, mapped = both(Role(name="actor", source=folder, trained=True))
    assert_same(whole, mapped)
    assert in_memory(mapped) == []
    for name, weight in mapped.named_parameters():
        if ".experts." in name:
            starts = tuple(size // 3 for size in weight.shape)
            shape = tuple(size - start - 1 for size, start in zip(weight.shape, starts, strict=True))
            box = tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))
            assert torch.equal(read_region(weight, starts, shape).float(), whole.get_parameter(name)[box]), name


def test_missing_weights_are_random_as_in_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model("llama", num_hidden_layers=1), torch.bfloat16)
    config = tiny_model("llama").config
    config.save_pretrained(folder)
    role = Role(name="actor", source=folder, trained=True)
    with pytest.raises(ConfigError, match=r"has no weights for model\.layers\.1"):
        role.build(seed=3, deferred=True)
    whole, mapped = both(role, allow_missing=True)
    assert_same(whole, mapped)
    assert all(".layers.1." in name for name in in_memory(mapped))


def test_a_head_that_the_config_ties_to_another_weight_stays_apart(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    folder = saved(tmp_path, model, torch.bfloat16)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    whole, mapped = both(Role(name="actor", source=folder, trained=True))
    assert_same(whole, mapped)
    assert len(ties(mapped)) == len(list(mapped.parameters(recurse=True)))


def test_the_head_of_a_classifier_of_another_size_is_refused(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    role = Role(name="reward", source=tmp_path, trained=False, task="sequence_classification")
    messages = []
    for deferred in (False, True):
        with pytest.raises(ConfigError) as error:
            role.build(seed=0, deferred=deferred)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
