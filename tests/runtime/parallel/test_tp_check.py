"""Features of different tensor-parallel ranks must not mix between the layers that are cut."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.tp_check import find_mixed_features
from lightning_realloc.runtime.parallel.tp_plan import read_tp_plan
from tests.models import TENSOR_PARALLEL_FAMILIES, UNEVEN_HEADS, tiny_model


class NormedSilu(nn.Module):
    """An activation that divides by the norm of all features."""

    num_calls = 0

    def forward(self, features: Tensor) -> Tensor:
        """Return the activation."""
        type(self).num_calls += 1
        return nn.functional.silu(features) / features.norm(dim=-1, keepdim=True)


class Attention(nn.Module):
    """Has the layers of a family's attention."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.num_key_value_groups, self.head_dim = attention.o_proj, attention.num_key_value_groups, 16

    def heads(self, features: Tensor) -> Tensor:
        """Return the features of each head."""
        return features.unflatten(-1, (-1, self.head_dim))


class TalkingHeads(Attention):
    """Attention's values, mixed between heads."""

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Return the output."""
        values = self.heads(self.q_proj(hidden_states))
        return self.o_proj((values + values.mean(-2, keepdim=True)).flatten(-2)), None


class TalkingDifferences(Attention):
    """Differences of queries and keys, mixed between heads."""

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Return the output."""
        queries, keys = self.heads(self.q_proj(hidden_states)), self.heads(self.k_proj(hidden_states))
        return self.o_proj((queries + (queries - keys).mean(-2, keepdim=True)).flatten(-2)), None


def test_forwards_that_reduce_over_the_features_of_all_ranks_are_refused_in_every_layout_with_tp() -> None:
    normed, talking, differing = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", num_key_value_heads=4)
    normed.model.layers[1].mlp.act_fn = NormedSilu()
    size = 1 << 20  # terabytes, as far as a check would allocate them
    normed.model.register_parameter("experts", nn.Parameter(torch.empty(size, size, device="meta")))
    talking.model.layers[0].self_attn = TalkingHeads(talking.model.layers[0].self_attn)
    differing.model.layers[0].self_attn = TalkingDifferences(differing.model.layers[0].self_attn)
    for model, place in (
        (normed, "model.layers.1.mlp, a LlamaMLP"),
        (talking, "layers.0.self_attn, a TalkingHeads"),
        (differing, "layers.0.self_attn, a TalkingDifferences"),
    ):
        for device in ("cpu", "meta") if model is not normed else ("meta",):
            spec = describe_model(model.to(device))
            assert spec.tensor_parallel_degrees(8) == (1,)
            with pytest.raises(LayoutError, match=rf"tp=2 is impossible .*{place}, the inputs of \w+ on one rank"):
                ModelLayout(spec, Layout.parse("tp2"))


def test_models_whose_ranks_work_apart_pass_and_stay_as_they_were() -> None:
    adapted = tiny_model("qwen3")
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), adapted)
    models = [tiny_model(family) for family in TENSOR_PARALLEL_FAMILIES]
    uneven = tiny_model("llama", **UNEVEN_HEADS["9/3"])
    for model, tp in ((adapted, 4), (uneven, 9), *((model, 2) for model in models)):  # 4: ranks share two heads
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        with warnings.catch_warnings(action="error"):  # no model is left unchecked
            assert find_mixed_features(model, read_tp_plan(model), tp) is None
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_one_block_of_each_kind_is_run() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    for layer in model.model.layers[2:]:
        layer.mlp.act_fn = NormedSilu()
    NormedSilu.num_calls = 0
    refusal = describe_model(model).tp_refusal
    assert refusal is not None and "model.layers.2.mlp" in refusal
    assert NormedSilu.num_calls == 2  # with equal and with other features of other ranks


def test_a_model_that_cannot_be_checked_passes_with_a_warning() -> None:
    reading, infinite = tiny_model("llama"), tiny_model("llama")
    reading.model.layers[0].mlp.forward = lambda states: states @ reading.model.layers[0].mlp.up_proj.weight
    infinite.model.layers[1].mlp.act_fn = nn.Threshold(1e9, float("nan"))
    for model, reason in ((reading, "RuntimeError: "), (infinite, "its layers get values that are not finite")):
        with pytest.warns(UserWarning, match=f"LlamaForCausalLM work apart could not be tried .*{reason}"):
            assert describe_model(model.to("meta")).tp_refusal is None
