"""Built-in models and written shapes have the published parameter counts and those of transformers' models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.report.known_models import find_known_model, parse_shape
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from tests.matrices import matrix
from tests.tuning.examples import role_of, shape_of

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
    "openai/gpt-oss-120b": 116_829_156_672,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,  # without the 14,848 biases of routers, which are buffers
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-27b-it": 27_432_406_640,
    "OpenGVLab/InternVL3-8B-hf": 7_944_373_760,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2_246_784_880,
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": 507_482_304,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
}


LIKE_OTHERS = (
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B",
    "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-1.7B",
    "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "google/gemma-3-4b-it", "google/gemma-3-27b-it",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
)  # fmt: skip
"""Models of a family and a way of tying that another one, or a test of small shapes, has as well."""


@pytest.mark.parametrize("name", matrix(PUBLISHED, *(name for name in PUBLISHED if name not in LIKE_OTHERS)))
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    assert role_of(name).model.num_elements == PUBLISHED[name]


def test_projections_of_latent_attention_have_the_elements_of_its_weights() -> None:
    model = role_of("deepseek-ai/DeepSeek-V3").model
    products = sum(inner * outer for inner, outer in shape_of("deepseek-ai/DeepSeek-V3").projections())
    weights = [param for param in model.params if param.block == 0 and "self_attn" in param.name]
    assert products == sum(param.numel for param in weights if len(param.shape) == 2)


@pytest.mark.parametrize("tp", [1, 8])
def test_latents_are_whole_on_every_rank_and_keys_and_values_are_not(tp: int) -> None:
    shape = shape_of("deepseek-ai/DeepSeek-V3")
    assert shape.latent is not None and shape.kv_cache_elements(tp) == 61 * (512 + 64)
    expanding = replace(shape, latent=replace(shape.latent, is_cached=False))
    assert expanding.kv_cache_elements(tp) == 61 * 128 // tp * (192 + 128)


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


SMALL = "layers=2,hidden=64,intermediate=96,heads=4,kv_heads=2,vocabulary=128"


@pytest.mark.parametrize(
    ("family", "flags", "sizes"),
    [
        ("llama", "", {}),
        ("qwen2", ",qkv_bias", {}),
        ("qwen3", ",qk_norm", {}),
        ("mixtral", ",experts=4,experts_per_token=2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen3_moe",
            ",experts=4,experts_per_token=2,qk_norm",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        ),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_shape_is_that_of_the_family_with_these_properties(
    family: str, flags: str, sizes: dict[str, int], tied: bool
) -> None:
    role = role_of(SMALL + flags + ",tied" * tied)
    described, shape = describe(family, tie_word_embeddings=tied, **sizes)
    assert role.model == described and role.shape == shape
    assert bool(described.aliases) == tied


def test_some_blocks_may_be_dense_and_experts_may_be_shared() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    _, shape = describe("qwen3_moe", mlp_only_layers=[1], **sizes)
    assert shape.experts == Experts(count=4, per_token=2, features=32, num_dense_blocks=1, are_cut=True)
    _, shape = describe("qwen2_moe", shared_expert_intermediate_size=48, **sizes)
    assert shape.experts == Experts(count=4, per_token=2, features=32, shared_features=48, are_cut=True)
    _, shape = describe("glm4_moe", n_routed_experts=4, n_shared_experts=3, first_k_dense_replace=1, **sizes)
    assert shape.experts == Experts(
        count=4, per_token=2, features=32, shared_features=96, num_dense_blocks=1, are_cut=True
    )


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_no_rank_holds_more_heads_than_the_shape_says(tp: int) -> None:
    shape = shape_of("Qwen2.5-0.5B")  # 14 query heads on 2 key-value heads
    layout = ModelLayout(role_of("Qwen2.5-0.5B").model, Layout.parse(f"tp{tp}"))
    for name, size in (("q", shape.queries(tp)), ("k", shape.keys(tp))):
        rows = [layout.local_shape(f"model.layers.0.self_attn.{name}_proj.weight", rank)[0] for rank in range(tp)]
        assert size == rows[0] == max(rows)
    assert shape.kv_cache_elements(tp) == 2 * 24 * shape.keys(tp)


def test_a_scoring_model_has_one_output_and_no_vocabulary_head() -> None:
    role = role_of("llama-2-7b-HF", scores=True)
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
    def content(text: str) -> dict[str, Any]:
        return parse_shape(text).to_dict()

    text = "heads=4, experts_per_token=2,tied, head_dim=16,layers=2,experts=4 ,hidden=64,vocabulary=128,intermediate=96"
    expected = "layers=2,hidden=64,intermediate=96,heads=4,kv_heads=4,vocabulary=128,experts=4,experts_per_token=2,tied"
    assert content(text) == content(expected)
    assert content(SMALL) != content(f"{SMALL},head_dim=32")
    assert find_known_model("Qwen3-0.6B").head_dim == 128 and find_known_model("Qwen3-8B").head_dim == 4096 // 32


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
        ({"heads": "heads=8,head_dim=7"}, "refuses the shape 'layers=4,.* even rotary dimension"),
        ({"heads": "heads=8,qkv_bias,qk_norm"}, "has qk_norm and qkv_bias, as .* leave qkv_bias out, or give"),
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
