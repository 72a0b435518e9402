"""Built-in shapes have the published parameter counts and the parameters of transformers' models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.known_models import KnownModel, find_known_model, known_models, parse_shape
from lightning_realloc.tuning.shapes.model_shape import ModelShape

# Parameters of the published checkpoints.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    assert known_models()[name].spec().num_elements == PUBLISHED[name]


def describe(family: str, **sizes: Any) -> tuple[ModelSpec, ModelShape]:
    """Return the parameters of a small transformers model without weights, and the shape of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_realloc.runtime.parallel.model_spec import describe_model

    config = AutoConfig.for_model(
        family,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        **sizes,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = describe_model(model)
    return described, ModelShape.from_config(config, described)


SMALL = KnownModel(num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocabulary=128)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_shape_equal_those_of_transformers(family: str, tied: bool) -> None:
    known = replace(SMALL, tied=tied, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    described, shape = describe(family, tie_word_embeddings=tied)
    assert sorted(known.spec().params, key=str) == sorted(described.params, key=str)
    assert known.spec().aliases == described.aliases
    assert known.shape() == shape


@pytest.mark.parametrize(
    ("family", "sizes", "features"),
    [("mixtral", {"num_local_experts": 4}, 96), ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32}, 32)],
)
def test_experts_equal_those_of_transformers(family: str, sizes: dict[str, int], features: int) -> None:
    experts = Experts(count=4, per_token=2, features=features)
    known = replace(SMALL, experts=experts, qk_norm=family == "qwen3_moe")
    described, shape = describe(family, num_experts_per_tok=2, **sizes)
    assert sorted(known.spec().params, key=str) == sorted(described.params, key=str)
    assert known.spec().tensor_parallel_degrees(8) == described.tensor_parallel_degrees(8) == (1,)
    assert known.shape() == shape


def test_some_blocks_may_be_dense_and_experts_may_be_shared() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    _, shape = describe("qwen3_moe", mlp_only_layers=[1], **sizes)
    assert shape.experts == Experts(count=4, per_token=2, features=32, num_dense_blocks=1)
    _, shape = describe("qwen2_moe", shared_expert_intermediate_size=48, **sizes)
    assert shape.experts == Experts(count=4, per_token=2, features=32, shared_features=48)
    _, shape = describe("glm4_moe", n_routed_experts=4, n_shared_experts=3, first_k_dense_replace=1, **sizes)
    assert shape.experts == Experts(count=4, per_token=2, features=32, shared_features=96, num_dense_blocks=1)


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_no_rank_holds_more_heads_than_the_shape_says(tp: int) -> None:
    model = find_known_model("Qwen2.5-0.5B")  # 14 query heads on 2 key-value heads
    layout = ModelLayout(model.spec(), Layout.parse(f"tp{tp}"))
    for name, size in (("q", model.shape().queries(tp)), ("k", model.shape().keys(tp))):
        rows = [layout.local_shape(f"model.layers.0.self_attn.{name}_proj.weight", rank)[0] for rank in range(tp)]
        assert size == rows[0] == max(rows)
    assert model.shape().kv_cache_elements(tp) == 2 * 24 * model.shape().keys(tp)


def test_a_scoring_model_has_one_output_and_no_vocabulary_head() -> None:
    role = find_known_model("llama-2-7b-HF").role(scores=True)
    assert role.shape is not None and role.shape.num_outputs == 1
    assert role.model.num_elements == 6_738_415_616 - 32000 * 4096 + 4096


def test_the_error_for_an_unknown_name_has_the_nearest_one() -> None:
    with pytest.raises(PlanError, match=r"'Llama-2-7b' is not built in \(nearest: meta-llama/Llama-2-7b-hf"):
        find_known_model("Llama-2-7b")
    with pytest.raises(PlanError, match=r"nearest: mistralai/Mixtral-8x7B-v0\.1"):
        find_known_model("mistralai/Mixtral-8x7B")
    with pytest.raises(PlanError, match="known: meta-llama/Llama-2-7b-hf"):
        find_known_model("zzzz")


def test_a_shape_is_parsed_in_any_order() -> None:
    llama = parse_shape("heads=32, layers=32,hidden=4096,intermediate=11008,vocabulary=32000")
    assert llama == known_models()["meta-llama/Llama-2-7b-hf"]
    text = "layers=28,hidden=1024,intermediate=3072,heads=16,kv_heads=8,head_dim=128,vocabulary=151936,tied,qk_norm"
    assert parse_shape(text) == known_models()["Qwen/Qwen3-0.6B"]
    text = "layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=32000,experts=8,experts_per_token=2"
    assert parse_shape(text) == known_models()["mistralai/Mixtral-8x7B-v0.1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": ""}, "lacks hidden; as in layers=32,"),
        ({"layers": "layers=0"}, "'layers=0' of the shape"),
        ({"layers": "layer=4"}, "'layer=4' of the shape"),
        ({"layers": "layers=4,layers=5"}, "each once"),
        ({"layers": "layers=4,tide"}, "'tide' of the shape"),
        ({"layers": "layers=4,experts=8"}, "lacks experts_per_token"),
        ({"layers": "layers=4,experts=2,experts_per_token=3"}, "experts_per_token=3 must lie between 1 and experts=2"),
        ({"heads": "heads=8,kv_heads=3"}, "heads=8 of the shape .* must be a multiple of kv_heads=3"),
    ],
)
def test_an_invalid_shape_is_refused(change: dict[str, str], message: str) -> None:
    parts = {
        "layers": "layers=4",
        "hidden": "hidden=64",
        "intermediate": "intermediate=128",
        "heads": "heads=8",
        "vocabulary": "vocabulary=100",
    }
    with pytest.raises(PlanError, match=message):
        parse_shape(",".join((parts | change).values()))
