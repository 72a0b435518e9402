from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_realloc.algorithms.base.optimizers import parameters_of
from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.structure import tied_names
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.stage import cut_stage, get_stage_io
from tests.matrices import few_and_more
from tests.models import TIED_FAMILIES, tiny_model
from tests.runtime.parallel.pipeline_cases import (
    Case,
    move_weights_between_layouts,
    pipeline_beside_the_reference,
    score,
)
from tests.vision_models import tiny_vision_model
from tests.workers import WorkerPool

TIED = {"tie_word_embeddings": True}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt_neox", "gpt2")


def _assert_nothing_differs(answers: list[dict[str, list[str]]]) -> None:
    assert any(answers)
    for rank, differences in enumerate(answers):
        for case, found in differences.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


TWO_STAGES = [Case(family, "pp2@0-1", TIED if family in TIED_FAMILIES else {}) for family in FAMILIES]
IN_NO_OTHER_FEW = ("qwen3", "mistral", "phi3")
"""Families that no other list of a few cases has."""


@few_and_more(
    [case for case in TWO_STAGES if case.family in IN_NO_OTHER_FEW],
    [case for case in TWO_STAGES if case.family not in IN_NO_OTHER_FEW],
)
def test_two_stages_of_every_family_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(pipeline_beside_the_reference, cases, world_size=2, deadline_s=170.0))


@few_and_more(
    [
        Case("gpt_neox", "pp2.fsdp2@3,1,2,0", num_layers=3),
        Case("gemma", "pp2.tp2", TIED),
        Case("granite_swa", "pp2.cp2@1,0,2,3"),
    ],
    [
        Case("gpt2", "pp4@2,0,3,1", num_layers=4),
        Case("phi3", "pp2.dp2"),
        Case("llama", "pp4", num_layers=5),
        Case("qwen2", "pp2.fsdp2", TIED, num_micro_batches=1),
        Case("llama", "pp2.fsdp2"),
        Case("qwen3", "pp2.tp2"),
        Case("mixtral", "pp2.fsdp2.ep2", num_layers=3, checkpointing=True),
        Case("mixtral", "pp2.dp2.ep2@3,1,2,0"),
        Case("mistral", "pp2.cp2@1,0,2,3"),
        Case("granite_swa", "pp2.tp2"),
        Case("gpt_oss", "pp2.fsdp2.ep2", num_layers=3, checkpointing=True),
        Case("gpt_oss", "pp2.tp2", num_layers=3, checkpointing=True),
        *(Case(family, f"pp2.{axis}2", TIED) for family in ("llama", "qwen2") for axis in ("dp", "fsdp", "tp")),
        Case("gpt2", "pp3.fsdp1@2,0,3", TIED, num_layers=3),
    ],
)
def test_pipelines_compose_with_every_other_axis(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(pipeline_beside_the_reference, cases, deadline_s=170.0))


@few_and_more(
    [
        Case("llama", "pp4", num_layers=4, num_micro_batches=5),
        Case("qwen2", "pp2.fsdp2", TIED, num_micro_batches=1, tile_rows=2),
    ],
    [
        Case("llama", "pp2.fsdp2", num_layers=4, num_micro_batches=1),
        Case("llama", "pp4", num_layers=4, num_micro_batches=1),
        Case("llama", "pp4", num_layers=4, num_micro_batches=2),
        Case("llama", "pp2.fsdp2", num_layers=4, num_micro_batches=5),
        *(Case("llama", layout, tile_rows=2) for layout in ("pp2@0-1", "pp2.dp2", "pp2.fsdp2")),
    ],
)
def test_any_number_of_micro_batches_and_tiles_of_logits_equal_one_process(
    workers: WorkerPool, cases: list[Case]
) -> None:
    _assert_nothing_differs(workers.run(pipeline_beside_the_reference, cases, deadline_s=170.0))


@few_and_more(
    [
        Case("llama", "pp2.fsdp2", token_classifier=True, checkpointing=True, num_micro_batches=4),
        Case("qwen2", "pp2.tp2", TIED, lora_modules=("q_proj", "v_proj", "down_proj")),
    ],
    [
        Case("qwen2", "pp2.tp2", token_classifier=True),
        Case("llama", "pp4", num_layers=4, checkpointing=True, num_micro_batches=4),
        Case("gpt_neox", "pp2.fsdp2", lora_modules=("query_key_value", "dense")),
    ],
)
def test_critics_adapters_and_recomputed_activations_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(pipeline_beside_the_reference, cases, deadline_s=170.0))


@few_and_more(
    [
        Case("llama", "pp4", num_layers=4, num_micro_batches=5, schedule="zero_bubble"),
        Case("qwen2", "pp2.fsdp2", TIED, checkpointing=True, num_micro_batches=4, schedule="zero_bubble"),
        Case("qwen2", "pp2.tp2", TIED, lora_modules=("q_proj", "v_proj", "down_proj"), schedule="zero_bubble"),
    ],
    [
        Case("gpt2", "pp2.dp2", TIED, num_micro_batches=1, schedule="zero_bubble"),
        *(Case("qwen2", f"pp2.{axis}2", TIED, schedule="zero_bubble") for axis in ("cp", "dp", "tp")),
        *(Case(family, "pp2@0-1", {}, checkpointing=True, schedule="zero_bubble") for family in FAMILIES[:-1]),
        Case("llama", "pp4", num_layers=4, num_micro_batches=2, checkpointing=True, schedule="zero_bubble"),
        Case("llama", "pp2.fsdp2", tile_rows=2, schedule="zero_bubble"),
        Case("mixtral", "pp2.fsdp2.ep2", num_layers=3, checkpointing=True, schedule="zero_bubble"),
    ],
)
def test_gradients_of_weights_that_wait_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(pipeline_beside_the_reference, cases, deadline_s=170.0))


def test_weights_move_between_stages_and_other_layouts_bit_for_bit(workers: WorkerPool) -> None:
    pairs = [("pp2@0-1", "dp2@0-1"), ("pp2.fsdp2", "dp2.tp2"), ("pp4", "tp2@2-3"), ("pp2.tp2", "pp4@3,2,1,0")]

    assert workers.run(move_weights_between_layouts, "qwen2", pairs) == [[]] * 4


def _stage(model: nn.Module, index: int, layout: str = "pp2") -> nn.Module:
    cut_stage(model, ModelLayout(describe_model(model), Layout.parse(layout)), index)
    return model


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])  # the second saves buffers that choose experts
def test_a_stage_keeps_names_indices_and_buffers_of_the_whole_model(family: str) -> None:
    whole = tiny_model(family)
    layout = ModelLayout(describe_model(whole), Layout.parse("pp2"))
    stages = [_stage(tiny_model(family), index) for index in (0, 1)]

    for rank, stage in enumerate(stages):
        assert tuple(name for name, _ in stage.named_parameters()) == layout.names(rank)
        assert [name for name, _ in stage.named_buffers()] == [name for name, _ in whole.named_buffers()]
        assert len(stage.model.layers) == 2
    assert stages[1].model.layers[1].self_attn.layer_idx == 1


def test_single_parameters_beside_a_tower_lie_on_the_first_stage() -> None:
    whole = tiny_vision_model("llava_onevision")
    names = [[name for name, _ in _stage(copy.deepcopy(whole), rank).named_parameters()] for rank in (0, 1)]
    assert ["model.image_newline" in held for held in names] == [True, False]
    assert names[0] + names[1] == [name for name, _ in whole.named_parameters()]


def test_both_stages_of_tied_embeddings_hold_them_as_embeddings_and_head() -> None:
    for rank in (0, 1):
        stage = _stage(tiny_model("gemma"), rank)
        assert tied_names(stage)["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
        (spared,) = parameters_of(stage, ["embeddings"])  # optimizers group them alike, so that copies stay equal
        assert spared is stage.lm_head.weight


def _frozen_first_block(model: nn.Module) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def _shared_weight(model: nn.Module) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _bare_parameter(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_frozen_first_block, "would leave stage 0 of LlamaForCausalLM without a parameter that is trained"),
        (_shared_weight, r"layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are tied"),
        (_bare_parameter, r"LlamaForCausalLM holds the parameter 'scale' and modules of other stages"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_on_every_rank(
    change: Callable[[nn.Module], None], message: str
) -> None:
    for rank in (0, 1):
        model = tiny_model("llama")
        change(model)
        with pytest.raises(LayoutError, match=message):
            _stage(model, rank)


def test_too_few_blocks_are_refused_by_the_layout() -> None:
    with pytest.raises(LayoutError, match="pp=3 needs at least one block per stage but the model has 2 blocks"):
        ModelLayout(describe_model(tiny_model("llama")), Layout.parse("pp3"))


def test_a_stage_refuses_calls_outside_the_pipeline_and_other_tokens() -> None:
    stage = _stage(tiny_model("llama"), 1)
    ids = torch.arange(6).unsqueeze(0)
    with pytest.raises(LayoutError, match="is stage 1 of 2 of a pipeline, and cannot be called by itself"):
        stage(input_ids=ids)
    with (
        get_stage_io(stage).open(ids, torch.zeros(1, 6, 64)),
        pytest.raises(LayoutError, match=r"tokens of its micro-batch, .*shape \(1, 6\); it gave others, .*\(1, 3\)"),
    ):
        stage(input_ids=ids[:, :3])
    with pytest.raises(LayoutError, match="is not a pipeline stage"):
        get_stage_io(tiny_model("llama"))


def test_a_norm_registered_before_the_blocks_that_runs_after_them_is_refused() -> None:
    case = Case("opt", "pp2")
    stage, (batch, *_) = _stage(case.build(), 1), case.batches(1)[0]

    with (
        get_stage_io(stage).open(batch.input_ids, torch.zeros(1, batch.num_tokens, 64)),
        pytest.raises(LayoutError, match=r"such a module \(LayerNorm\) after them, on the last; use pp=1"),
    ):
        score(stage, batch, classifies=False)
