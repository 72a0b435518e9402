from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import TensorParallelCut
from lightning_realloc.runtime.model.structure import vision_parts
from lightning_realloc.runtime.parallel.tp_plan import AttentionHeads, read_tp_plan, with_wildcards
from tests.models import SIZES, tiny_model
from tests.vision_models import VISION_FAMILIES, tiny_vision_model


def _on_meta(model_type: str, **settings: object) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **settings}))


def test_layer_numbers_become_wildcards_and_digits_inside_words_stay() -> None:
    assert with_wildcards("model.layers.12.mlp.fc1") == "model.layers.*.mlp.fc1"
    assert with_wildcards("blocks.0") == "blocks.*"


def test_heads_are_counted_from_sizes_in_the_config() -> None:
    # 4 query heads and 2 key-value heads of 16: 64 and 32 output features.
    cuts = read_tp_plan(tiny_model("qwen3")).cuts
    attention = "model.layers.1.self_attn"

    assert cuts[f"{attention}.q_proj.weight"] == TensorParallelCut(0, num_units=4, num_groups=2)
    assert cuts[f"{attention}.k_proj.weight"] == TensorParallelCut(0, num_units=2, replicate_units=True)
    assert cuts[f"{attention}.v_proj.weight"] == TensorParallelCut(0, num_units=2, replicate_units=True)
    assert cuts[f"{attention}.o_proj.weight"] == TensorParallelCut(1, num_units=4, num_groups=2)
    assert cuts["model.layers.1.mlp.down_proj.weight"] == TensorParallelCut(1)
    assert f"{attention}.q_norm.weight" not in cuts


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_all_projections_of_a_text_decoder_are_cut_and_none_of_a_tower(family: str) -> None:
    model = tiny_vision_model(family)
    cuts, parts, head = read_tp_plan(model).cuts, vision_parts(model), model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            assert (f"{name}.weight" in cuts) == (name not in parts), name


def test_fused_queries_keys_and_values_of_one_head_stay_together() -> None:
    plan = read_tp_plan(tiny_model("gpt_neox"))

    by_head = TensorParallelCut(0, num_units=4, num_groups=4)
    assert plan.cuts["gpt_neox.layers.0.attention.query_key_value.weight"] == by_head
    assert plan.cuts["gpt_neox.layers.0.attention.query_key_value.bias"] == by_head
    assert "gpt_neox.layers.0.attention.dense.bias" not in plan.cuts
    assert plan.attention["gpt_neox.layers.0.attention"] == AttentionHeads(query=4, key_value=4, head_dims=(16,))


def test_a_gathered_projection_may_be_cut_anywhere() -> None:
    plan = read_tp_plan(tiny_model("phi3"))

    assert plan.cuts["model.layers.0.self_attn.qkv_proj.weight"] == TensorParallelCut(0)
    assert plan.attention == {}


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_neox"])
def test_tied_embeddings_and_heads_are_cut_alike(family: str) -> None:
    model = tiny_model(family, tie_word_embeddings=True)
    embedding = next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))

    plan = read_tp_plan(model)

    assert plan.cuts[f"{embedding}.weight"] == plan.cuts["lm_head.weight"] == TensorParallelCut(0)
    assert plan.styles[embedding] == "embedding_rowwise"


def test_an_embedding_follows_its_tied_head_to_the_other_dim() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)

    plan = read_tp_plan(model, {"lm_head": "rowwise_rep"})

    assert plan.styles["lm_head"] == "rowwise_split_input"
    assert plan.styles["model.embed_tokens"] == "embedding_colwise"
    assert plan.cuts["model.embed_tokens.weight"] == plan.cuts["lm_head.weight"] == TensorParallelCut(1)


def test_packed_styles_cut_both_halves() -> None:
    plan = read_tp_plan(tiny_model("phi3"), {"model.layers.*.mlp.gate_up_proj": "packed_colwise"})

    assert plan.cuts["model.layers.0.mlp.gate_up_proj.weight"] == TensorParallelCut(0, block_sizes=(128, 128))


def test_the_refusal_of_a_model_without_a_plan_says_how_to_pass_one() -> None:
    refusal = read_tp_plan(tiny_model("opt")).refusal

    assert refusal is not None
    assert "OPTForCausalLM has no tensor-parallel plan; pass one" in refusal
    assert 'tp_plan={"' in refusal


def test_stacked_experts_are_cut_along_their_features() -> None:
    mixtral, gpt_oss = (tiny_model(family, intermediate_size=72) for family in ("mixtral", "gpt_oss"))
    experts, units = "model.layers.1.mlp.experts", 9  # of eight features
    plan = read_tp_plan(mixtral)

    assert plan.cuts[f"{experts}.gate_up_proj"] == TensorParallelCut(1, 2 * units, block_sizes=(72, 72))
    assert plan.cuts[f"{experts}.down_proj"] == TensorParallelCut(2, units)
    whole = read_tp_plan(mixtral, {"model.layers.*.mlp.experts": "replicate"})
    assert whole.refusal is None
    assert not any(".experts." in name for name in whole.cuts)
    # Without a plan of its own, with transposed weights, biases, and the gate of each feature next to its up.
    plan = read_tp_plan(gpt_oss)
    assert {name: cut for name, cut in plan.cuts.items() if name.startswith(experts)} == {
        f"{experts}.gate_up_proj": TensorParallelCut(2, units),
        f"{experts}.gate_up_proj_bias": TensorParallelCut(1, units),
        f"{experts}.down_proj": TensorParallelCut(1, units),
    }
    assert plan.styles["model.layers.0.self_attn.q_proj"] == "colwise"
    assert plan.cuts["model.layers.0.self_attn.sinks"] == TensorParallelCut(0, num_units=4, num_groups=2)


def test_experts_that_ranks_cannot_add_up_are_refused_by_name() -> None:
    normed, scaled = tiny_model("mixtral"), tiny_model("mixtral")
    normed.model.layers[1].mlp.experts.has_post_expert_norm = True
    scaled.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(4))
    for model, reason in (
        (normed, "model.layers.1.mlp.experts: a norm of each expert's output needs the features of all ranks"),
        (
            scaled,
            "model.layers.0.mlp.experts: tensor parallelism cuts experts of gate_up_proj and down_proj, and these",
        ),
    ):
        refusal = read_tp_plan(model).refusal
        assert refusal is not None
        assert refusal.startswith(reason)
        assert "'replicate'" in refusal
        assert read_tp_plan(model, {"model.layers.*.mlp.experts": "replicate"}).refusal is None


def test_parameters_between_sharded_layers_need_a_plan_that_names_them() -> None:
    apertus = _on_meta("apertus")  # its activation has learned parameters, which transformers' plan leaves out
    activation = "model.layers.*.mlp.act_fn"

    refusal = read_tp_plan(apertus).refusal

    assert refusal is not None
    assert f"pass a tp_plan that names '{activation}'" in refusal
    assert "as 'replicated_with_grad_allreduce' if it reads a rank's own features" in refusal
    plan = read_tp_plan(apertus, {activation: "replicated_with_grad_allreduce"})
    assert plan.refusal is None
    assert plan.styles["model.layers.1.mlp.act_fn"] == "replicated_with_grad_allreduce"


def test_norms_with_a_row_per_head_are_refused_whatever_the_plan_calls_them() -> None:
    cohere, norms = _on_meta("cohere", use_qk_norm=True), ("q_norm", "k_norm")
    for style in ("replicate", "replicated_with_grad_allreduce", None):
        plan = {} if style is None else {f"model.layers.*.self_attn.{norm}": style for norm in norms}
        refusal = read_tp_plan(cohere, plan).refusal
        assert refusal is not None
        assert refusal == (
            "model.layers.0.self_attn.q_norm.weight: it has a row for each attention head (4), and no tensor-parallel "
            "style divides such a parameter"
        )
    assert read_tp_plan(_on_meta("cohere", use_qk_norm=False)).refusal is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"transformer.h.*.mlp.c_fc": "colwise"}, "cuts Linear modules, but this is a Conv1D"),
        ({"transformer.wte": "sideways"}, "transformer.wte: the tensor-parallel style 'sideways' is not supported"),
        ({"transformer.wte.weight": "colwise"}, "to a bare parameter"),
    ],
)
def test_plan_entries_that_cannot_apply_are_refused(entry: dict[str, str], reason: str) -> None:
    refusal = read_tp_plan(tiny_model("gpt2"), entry).refusal

    assert refusal is not None
    assert reason in refusal


def test_a_plan_for_modules_that_do_not_exist_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"model\.layer\.\*\.mlp.*match no module of LlamaForCausalLM"):
        read_tp_plan(tiny_model("llama"), {"model.layer.*.mlp.up_proj": "colwise"})


def test_adapters_are_cut_like_the_layers_they_adapt() -> None:
    from peft import LoraConfig, get_peft_model

    names = ["k_proj", "down_proj"]
    plan = read_tp_plan(get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=names)))
    layer = "base_model.model.model.layers.0"

    heads = TensorParallelCut(0, num_units=2, replicate_units=True)
    assert plan.cuts[f"{layer}.self_attn.k_proj.base_layer.weight"] == heads
    assert plan.cuts[f"{layer}.self_attn.k_proj.lora_B.default.weight"] == heads
    assert f"{layer}.self_attn.k_proj.lora_A.default.weight" not in plan.cuts
    assert plan.cuts[f"{layer}.mlp.down_proj.lora_A.default.weight"] == TensorParallelCut(1)
    assert f"{layer}.mlp.down_proj.lora_B.default.weight" not in plan.cuts
    with_magnitudes = LoraConfig(r=4, target_modules=["down_proj"], use_dora=True)
    refusal = read_tp_plan(get_peft_model(tiny_model("llama"), with_magnitudes)).refusal
    assert refusal is not None
    assert "lora_magnitude_vector" in refusal
