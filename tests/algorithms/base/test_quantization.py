"""Roles with 4-bit weights: how they are loaded and described, which roles can have them, and their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_realloc.algorithms.base import quantization
from lightning_realloc.algorithms.base.quantization import read_quantization
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.adapter_layers import adapters_merged
from lightning_realloc.runtime.model.quantized import free_quantized_weights, quantized_bytes, quantized_layers
from lightning_realloc.runtime.model.structure import copy_without_weights
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import MemorySettings
from tests.models import tiny_model
from tests.strategies import runs

pytest.importorskip("bitsandbytes", reason="4-bit weights need the package bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


def _actor(source: Any, **settings: Any) -> Role:
    return Role(**{"name": "actor", "source": source, "trained": True, "peft": LORA, **settings})


def _loaded(base: Path, **options: Any) -> Any:
    settings = BitsAndBytesConfig(**{**NF4, **options})
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=settings)


def _held_bytes(model: nn.Module) -> int:
    total = 0
    for layer in quantized_layers(model).values():
        scales = layer.weight.quant_state
        tensors = [layer.weight.data, scales.absmax, *([scales.state2.absmax] if scales.nested else [])]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


@pytest.mark.parametrize("doubly", [False, True])
def test_a_description_has_the_parameters_and_bytes_of_the_model(base: Path, doubly: bool, tmp_path: Path) -> None:
    settings = {**NF4, "bnb_4bit_use_double_quant": doubly}
    given = _loaded(base, bnb_4bit_use_double_quant=doubly)
    given.save_pretrained(tmp_path)
    asked = _actor(base, quantization=settings)
    for role in (asked, _actor(tmp_path), _actor(given), replace(asked, trained=False, peft=None)):
        described, built = role.describe(), role.build(seed=0)
        assert describe_model(described) == describe_model(built)
        assert quantized_bytes(described) == quantized_bytes(built) == _held_bytes(built)
        assert len(quantized_layers(built)) == 14
        assert not any("proj.weight" in name or "base_layer" in name for name, _ in built.named_parameters())
        assert isinstance(given.model.layers[0].mlp.up_proj.weight, nn.Parameter)  # the given module stays as it was


def test_copies_share_4_bit_weights_and_a_release_frees_them(base: Path) -> None:
    model = _actor(base, quantization=NF4).build(seed=0)
    copied = copy_without_weights(model)
    for ours, theirs in zip(quantized_layers(model).values(), quantized_layers(copied).values(), strict=True):
        assert ours.weight is theirs.weight and ours.quant_state is theirs.quant_state
        assert ours is not theirs
    assert all(parameter.is_meta for parameter in copied.parameters())
    free_quantized_weights(copied)
    assert all(layer.weight.is_meta and layer.quant_state is None for layer in quantized_layers(copied).values())
    assert _held_bytes(model) > 0


@torch.no_grad()
def test_adapters_over_4_bit_weights_are_not_merged(base: Path) -> None:
    model = _actor(base, quantization=NF4).build(seed=0).eval()
    tokens = torch.arange(3, 20)[None]
    before = model(input_ids=tokens).logits
    with adapters_merged(model):
        assert torch.equal(model(input_ids=tokens).logits, before)
    assert len(quantized_layers(model)) == 14


def test_a_forecast_counts_4_bit_weights_on_every_rank(base: Path) -> None:
    module = runs.grpo(actor=base, reference=base, peft_config=LORA, quantization_config={"actor": NF4})
    plan = ExecutionPlan.static(module.dataflow, Layout.parse("fsdp2@0-1"))
    packed = describe_roles(module.roles(), {})
    peaks = [
        forecast_memory(module.dataflow, plan, roles, MemorySettings(), None, ranks=(0, 1)).peak().parts.weights
        for roles in (packed, {name: replace(role, quantized_bytes=0) for name, role in packed.items()})
    ]
    assert peaks[0] - peaks[1] == packed["actor"].quantized_bytes > 0
    assert packed["reference"].quantized_bytes == 0


def test_tensor_parallelism_is_refused(base: Path) -> None:
    spec = describe_model(_actor(base, quantization=NF4).describe())
    with pytest.raises(LayoutError) as caught:
        ModelLayout(spec, Layout.parse("dp2.tp2"))
    assert str(caught.value) == (
        "tp=2 is impossible for this model: its 4-bit weights are packed in blocks, which a cut would break; use tp=1"
    )
    assert spec.tensor_parallel_degrees(4) == (1,)  # a search does not propose it, either


def _refusals(base: Path) -> list[tuple[Role, str]]:
    asked = _actor(base, quantization=NF4)
    given, llama = _loaded(base), tiny_model("llama")
    eight = BitsAndBytesConfig(load_in_8bit=True)
    scorer = {"name": "critic", "task": "token_classification"}
    return [
        (replace(asked, peft=None), "actor has 4-bit weights and is trained, and such weights cannot change; train"),
        (replace(asked, trained=False, peft=None, average_of="actor"), "actor has 4-bit weights and is averaged"),
        (replace(asked, trained=False), "actor is not trained, so its adapters would be merged, and merging into 4"),
        (replace(asked, peft={**LORA, "use_dora": True}), "actor: use_dora needs the norms of whole weights"),
        (replace(asked, source=llama.config), "give the name or folder of a model, or a module that from_pretrained"),
        (replace(asked, source=llama), "actor: weights are quantized while they are loaded, and actor is a config"),
        (replace(asked, source=given), "returned without naming actor in quantization_config"),
        (_actor(given, **scorer), "critic is a config, a module, or a module with another head"),
        (_actor(given, peft=None), "actor has 4-bit weights and is trained"),
        (replace(asked, quantization=eight), r"actor is quantized \(bitsandbytes\): .* only 4-bit ones of bits"),
        (replace(asked, quantization={"load_in_4bits": True, **NF4}), "quantization_config has no option load_in_4bi"),
        (replace(asked, quantization="nf4"), "actor: quantization_config='nf4' is a str; give a BitsAndBytesConfig"),
        (replace(asked, quantization={"load_in_4bit": True, "bnb_4bit_quant_type": 3}), "is refused by transformers"),
    ]  # fmt: skip


def test_roles_that_cannot_have_4_bit_weights_are_refused_before_and_while_they_are_built(base: Path) -> None:
    for role, message in _refusals(base):
        for attempt in (role.describe, lambda role=role: role.build(seed=0)):
            with pytest.raises(ConfigError, match=message):
                attempt()


def test_a_missing_package_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"actor: 4-bit weights need the package bitsandbytes; pip install 'lightning-re"
    ):
        _actor(base, quantization=NF4).describe()


def test_weights_that_were_packed_for_inference_are_refused(base: Path) -> None:
    given = _loaded(base)
    next(iter(quantized_layers(given).values())).weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(
        ConfigError, match=r"actor: bitsandbytes has packed model.layers.0.self_attn.q_proj for inference"
    ):
        _actor(given).build(seed=0)


class Forgetful(runs.RecordedGRPO):
    """GRPO whose actor ignores the setting."""

    def roles(self) -> tuple[Role, ...]:
        """Return GRPO's roles without quantization."""
        return tuple(replace(role, quantization=None) for role in super().roles())


def test_a_configuration_holds_for_every_trained_role_or_by_role(base: Path) -> None:
    sources = {"actor": base, "critic": base, "reference": base, "peft_config": LORA}
    for settings, expected in (
        (NF4, {"actor", "critic"}),
        ({"critic": NF4, "reference": NF4}, {"critic", "reference"}),
    ):
        roles = runs.ppo(**sources, quantization_config=settings).roles()
        assert {role.name for role in roles if role.quantization is not None} == expected
    with pytest.raises(
        ConfigError, match="quantization_config names judge, and the roles are actor, critic, reference"
    ):
        runs.ppo(**sources, quantization_config={"judge": NF4}).configure_model()
    module = Forgetful(base, runs.low_tokens, sampling=runs.SAMPLING, peft_config=LORA, quantization_config=NF4)
    with pytest.raises(
        ConfigError, match=r"quantization_config gives actor 4-bit weights, and its Role has quantizatio"
    ):
        module.configure_model()
    assert read_quantization(None, tiny_model("llama").config, "actor") is None
