"""Features of different tensor-parallel ranks must not mix between the layers that are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.parallel.tp_check import check_slices_stay_apart
from lightning_realloc.runtime.parallel.tp_plan import read_tp_plan
from tests.models import TENSOR_PARALLEL_FAMILIES, UNEVEN_HEADS, tiny_model


class NormedSilu(nn.Module):
    """An activation that divides by the norm of all features."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the activation."""
        return nn.functional.silu(features) / features.norm(dim=-1, keepdim=True)


class TalkingHeads(nn.Module):
    """Attention's values, mixed between heads."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.num_key_value_groups, self.head_dim = attention.o_proj, 2, 16

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Return the output."""
        values = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        return self.o_proj((values + values.mean(-2, keepdim=True)).flatten(-2)), None


def test_forwards_that_reduce_over_the_features_of_all_ranks_are_refused() -> None:
    normed, talking = tiny_model("llama"), tiny_model("llama")
    normed.model.layers[1].mlp.act_fn = NormedSilu()
    talking.model.layers[0].self_attn = TalkingHeads(talking.model.layers[0].self_attn)
    for model, place in ((normed, "model.layers.1.mlp, a LlamaMLP"), (talking, "layers.0.self_attn, a TalkingHeads")):
        for device in ("cpu", "meta"):
            model.to(device)
            with pytest.raises(LayoutError, match=rf"tp=2 is impossible .*{place}, the inputs of \w+ on one rank"):
                check_slices_stay_apart(model, read_tp_plan(model), 2)


def test_models_whose_ranks_work_apart_pass_and_stay_as_they_were() -> None:
    adapted = tiny_model("qwen3")
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), adapted)
    models = [tiny_model(family) for family in TENSOR_PARALLEL_FAMILIES]
    uneven = tiny_model("llama", **UNEVEN_HEADS["9/3"])
    for model, tp in ((adapted, 4), (uneven, 2), *((model, 2) for model in models)):  # 4: ranks share two heads
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        check_slices_stay_apart(model, read_tp_plan(model), tp)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    check_slices_stay_apart(nn.Linear(2, 2), read_tp_plan(models[0]), 2)  # takes no tokens
