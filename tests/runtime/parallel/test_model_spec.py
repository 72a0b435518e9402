from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.model.structure import copy_model, find_blocks
from lightning_realloc.runtime.parallel.model_spec import describe_model
from tests.models import FAMILIES, TENSOR_PARALLEL_FAMILIES, TIED_FAMILIES, tiny_model
from tests.vision_models import tiny_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_lists_every_parameter_once(family: str) -> None:
    model = tiny_model(family)

    spec = describe_model(model)

    assert {param.name: param.shape for param in spec.params} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert spec.num_elements == model.num_parameters()
    assert spec.num_blocks == 2
    assert bool(spec.aliases) == (family in TIED_FAMILIES)
    assert (spec.tp_refusal is None) == (family in TENSOR_PARALLEL_FAMILIES)


def test_parameters_belong_to_the_input_a_block_or_the_output() -> None:
    spec = describe_model(tiny_model("llama"))

    assert [(p.name, p.block) for p in spec.params if p.section != "block"] == [
        ("model.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
    ]
    assert [spec.param(name).section for name in ("model.embed_tokens.weight", "lm_head.weight")] == ["input", "output"]
    assert all(p.name.startswith(f"model.layers.{p.block}.") for p in spec.params if p.section == "block")


def test_a_tied_head_is_an_alias_of_the_embedding() -> None:
    spec = describe_model(tiny_model("qwen2"))

    assert spec.aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert spec.param("lm_head.weight").section == "ends"


def test_parts_that_only_images_use_cost_no_token_anything() -> None:
    costs = describe_model(tiny_vision_model("qwen2_5_vl")).costs
    assert costs[0] == 0 and costs[1] > 0


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_moe"])
def test_costs_are_the_multiplications_of_a_token(family: str) -> None:
    model = tiny_model(family, experts_implementation="eager")  # whose products the counter sees
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.tensor([[5]]))

    costs = describe_model(model).costs

    assert costs[0] == 0 and costs[1] == costs[2]
    assert costs[3] == 128 * 64  # also of a tied head
    # Two floating-point operations each. Attention to one token, which costs leave out, takes less than 1 %.
    assert 2 * sum(costs) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_key_value_heads_allow_more_ranks_than_there_are_heads() -> None:
    # 4 query heads: 3 does not divide them; 2 key-value heads may be replicated.
    assert describe_model(tiny_model("llama")).tensor_parallel_degrees(8) == (1, 2, 3, 4)
    assert describe_model(tiny_model("gpt2")).tensor_parallel_degrees(8) == (1,)


def test_a_model_without_weights_has_the_same_description() -> None:
    model = tiny_model("qwen3")

    assert describe_model(copy.deepcopy(model).to("meta")) == describe_model(model)


def test_a_classification_head_is_replicated_output() -> None:
    config = AutoConfig.for_model("llama", **FAMILIES["llama"], num_labels=3)
    with torch.device("meta"):
        spec = describe_model(AutoModelForSequenceClassification.from_config(config))

    assert spec.tp_refusal is None
    assert (spec.param("score.weight").tensor_cut, spec.param("score.weight").section) == (None, "output")


def test_blocks_are_the_outermost_list_even_where_blocks_hold_lists() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(2, 2)])
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    assert [name for name, _ in find_blocks(Model())] == ["blocks.0", "blocks.1"]
    assert find_blocks(nn.Linear(2, 2)) == ()


def test_blocks_are_found_by_the_transformers_class_and_not_by_size() -> None:
    config = AutoConfig.for_model("gpt2", **FAMILIES["gpt2"])
    model = AutoModelForCausalLM.from_config(config)
    model.value_heads = nn.ModuleList([nn.Linear(2000, 64)])  # bigger than both blocks together

    assert [name for name, _ in find_blocks(model)] == ["transformer.h.0", "transformer.h.1"]


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(LayoutError, match="Identity has no parameters"):
        describe_model(nn.Identity())


def test_a_copy_has_weights_and_hooks_of_its_own_and_keeps_ties() -> None:
    model, heard = tiny_model("qwen2"), []
    model.lm_head.register_forward_hook(lambda *_: heard.append("head"))
    other = copy_model(model)
    other.model.norm.register_forward_hook(lambda *_: heard.append("the copy's norm"))
    ids = torch.tensor([[3, 5, 7]])
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert heard == ["head", "the copy's norm", "head"]
    assert other.lm_head.weight is other.model.embed_tokens.weight is not model.lm_head.weight
    other.lm_head.weight.data.zero_()
    assert bool(model.lm_head.weight.any())
    kept = nn.Parameter(torch.ones(1))
    assert vars(copy_model(model.model.norm, {id(model.model.norm.weight): kept}))["_parameters"]["weight"] is kept
