"""Ranks that divide experts, whole or by their features, give the losses, gradients and updates of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.stacked_experts import undivided_experts
from lightning_realloc.runtime.parallel.model_spec import describe_model
from tests.matrices import few_and_more
from tests.models import tiny_model
from tests.runtime.parallel.pipeline_cases import move_weights_between_layouts
from tests.runtime.reference import Case, train_beside_the_reference
from tests.workers import WorkerPool

MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
LAYOUTS = {
    "mixtral": (
        "fsdp8.ep4", "dp8.ep4@7,5,3,1,6,4,2,0", "dp2.fsdp4.ep2", "pp2.fsdp4.ep4@1,0,3,2,5,4,7,6", "pp4.dp2.ep2",
        "fsdp2.cp2.ep2@7,1,3,5", "dp2.fsdp2.tp2.ep4", "pp2.fsdp2.tp2.ep2", "fsdp4.cp2", "dp1@5",
    ),
    "qwen2": (
        "fsdp8", "dp2.fsdp2.tp2@7,5,3,1,6,4,2,0", "pp2.fsdp2.cp2", "pp4.tp2@1,0,3,2,5,4,7,6", "dp2.cp2.tp2",
        "fsdp3.tp2@1-6", "pp2.tp4", "pp3.dp2@6,2,4,1,3,5", "fsdp5@3-7", "dp1@5",
    ),
}  # fmt: skip
"""Layouts of eight ranks along every axis, for a mixture of experts and for a dense model."""

ADAPTED = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
EAGER = {"experts_implementation": "eager"}


@dataclass(frozen=True)
class OneSided(Case):
    """A router without preferences: all tokens go to the first experts, and some ranks get none."""

    def build(self) -> nn.Module:
        """Return the model of the case with routers of zeros."""
        model = super().build()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.zero_()
        return model


@few_and_more(
    [
        Case("mixtral", "fsdp2.ep2@1,0", checkpointing=True, num_micro_batches=2),
        Case("qwen3_moe", "dp2.fsdp2.ep4"),
        Case("deepseek_v3", "fsdp4.ep2@3,1,2,0"),
        OneSided("mixtral", "fsdp2.tp2.ep2"),
        Case("gpt_oss", "fsdp2.tp2.ep2@2,3,0,1", lora_modules=ADAPTED),
        Case("gpt_oss", "tp3@3,1,0", {"intermediate_size": 56}),  # biases of outputs; 24, 16 and 16 features
    ],
    [
        *(Case(family, layout) for family in MIXTURES
          for layout in ("fsdp2.ep2", "dp2.ep2", "fsdp4.ep2", "fsdp4.ep4", "dp4.ep2", "dp2.fsdp2.ep2",
                         "tp2@1,0", "fsdp2.tp2", "dp2.tp2@3,1,2,0", "fsdp2.tp2.ep2", "dp2.tp2.ep2")),
        Case("mixtral", "fsdp2.tp2.ep2", tp_plan={"model.layers.*.mlp.experts": "replicate"}),
        *(Case(family, "tp4", checkpointing=True) for family in ("mixtral", "olmoe", "gpt_oss")),
        Case("mixtral", "tp2", overrides=EAGER),
        Case("gpt_oss", "fsdp2.tp2.ep2", overrides={"experts_implementation": "batched_mm"}),
        Case("mixtral", "tp2", {"intermediate_size": 50, **EAGER}),
        Case("mixtral", "tp2", lora_modules=("q_proj", "o_proj")),
        Case("mixtral", "tp2", num_labels=1),
        *(Case("mixtral", layout, lora_modules=ADAPTED)
          for layout in ("fsdp2", "fsdp4.ep4", "dp2.ep2", "dp4.ep4", "tp2", "dp2.tp2.ep2")),
        Case("deepseek_v3", "fsdp4.ep2", lora_modules=ADAPTED[1:2], checkpointing=True),
        Case("mixtral", "fsdp2.ep2", overrides=EAGER),
        Case("mixtral", "fsdp2.ep2", overrides={"experts_implementation": "batched_mm"}),
        OneSided("mixtral", "fsdp2.ep2", overrides=EAGER, checkpointing=True),
        OneSided("mixtral", "dp2.ep2@2,3"),
        Case("mixtral", "fsdp4.ep2", lora_modules=("q_proj", "o_proj")),
        Case("mixtral", "fsdp2.ep2", num_labels=1),
        Case("qwen3_moe", "dp4.ep2", overrides=EAGER, dtype=torch.float64, tolerance=1e-9),
    ],
)  # fmt: skip
def test_ranks_that_divide_experts_train_like_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    answers = workers.run(train_beside_the_reference, cases, deadline_s=170.0)
    assert any(answers)
    for rank, differences in enumerate(answers):
        for case, found in differences.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


def test_experts_move_between_layouts_bit_for_bit(workers: WorkerPool) -> None:
    pairs = [
        ("fsdp4.ep2", "dp4.ep4@3,1,2,0"), ("dp2.fsdp2.ep4", "dp1@2"), ("dp2.ep2@1,3", "pp2.fsdp2.ep2"),
        ("fsdp2.cp2.ep2", "dp2.fsdp2.ep2"), ("tp3@0-2", "fsdp2.tp2.ep2"), ("pp2.tp2@2,0,3,1", "fsdp4.ep4"),
    ]  # fmt: skip
    assert workers.run(move_weights_between_layouts, "mixtral", pairs, {"intermediate_size": 48}) == [[]] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [*LAYOUTS, "gpt_oss"])
def test_a_tied_model_moves_between_all_pairs_of_layouts_bit_for_bit(workers: WorkerPool, family: str) -> None:
    pairs = list(combinations(LAYOUTS.get(family, LAYOUTS["mixtral"]), 2))  # there and back
    found = workers.run(move_weights_between_layouts, family, pairs, world_size=8, deadline_s=240.0)
    assert found == [[]] * 8


@pytest.mark.parametrize("family", MIXTURES)
def test_the_experts_of_every_family_can_be_divided(family: str) -> None:
    model = tiny_model(family)
    spec = describe_model(model, max_tp=1)
    laid_out = ModelLayout(spec, Layout.parse("fsdp4.ep2"))
    divided = {name for name, weight in model.named_parameters() if ".experts." in name and weight.ndim > 1}
    for param in spec.params:
        whole = laid_out.gathered_shard(param.name, 0)
        assert whole is not None
        share = 2 if param.name in divided or ".experts." in param.name else 1
        assert whole.shape == (param.shape[0] // share, *param.shape[1:])
    assert spec.expert_parallel_degrees(4) == (1, 2, 4)


def test_experts_that_ranks_cannot_divide_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"ep=2 is impossible for this model: it has no experts; leave ep out"):
        ModelLayout(describe_model(tiny_model("llama"), max_tp=1), Layout.parse("fsdp2.ep2"))
    with pytest.raises(LayoutError, match=r"use ep in \(1, 2\)"):
        ModelLayout(describe_model(tiny_model("mixtral", num_local_experts=6), max_tp=1), Layout.parse("dp4.ep4"))
    model: Any = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.norm = nn.LayerNorm(4)
    assert (
        undivided_experts(model) == "model.layers.1.mlp.experts.norm.weight belongs to all experts of a layer together"
    )
    del experts.norm
    experts.scale = nn.Parameter(torch.ones(7))
    assert "experts.scale of shape (7,) is not stacked by its num_experts=4" in str(undivided_experts(model))
