"""Are built-in shapes those of the published models, and the parameters those that transformers makes?"""

from __future__ import annotations

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.tuning.known_models import KNOWN_MODELS, KnownModel, find_known_model, parse_shape

# Parameters of the published checkpoints.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    assert KNOWN_MODELS[name].spec().num_elements == PUBLISHED[name]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_shape_are_those_that_transformers_makes(family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_realloc.runtime.model_spec import describe_model
    from lightning_realloc.tuning.model_shape import ModelShape

    known = KnownModel(
        num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocabulary=128, tied=tied,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
    )  # fmt: skip
    config = AutoConfig.for_model(
        family, num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = describe_model(model)
    assert sorted(known.spec().params, key=str) == sorted(described.params, key=str)
    assert known.spec().aliases == described.aliases
    assert known.shape() == ModelShape.read(config, described)


def test_a_model_that_scores_has_one_output_and_no_vocabulary_head() -> None:
    role = find_known_model("llama-2-7b-HF").role(scores=True)
    assert role.shape is not None and role.shape.num_outputs == 1
    assert role.model.num_elements == 6_738_415_616 - 32000 * 4096 + 4096


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"'Llama-2-7b' is not built in \(nearest: meta-llama/Llama-2-7b-hf"):
        find_known_model("Llama-2-7b")
    with pytest.raises(PlanError, match="known: meta-llama/Llama-2-7b-hf"):
        find_known_model("zzzz")


def test_a_shape_is_written_out_in_any_order() -> None:
    llama = parse_shape("heads=32, layers=32,hidden=4096,intermediate=11008,vocabulary=32000")
    assert llama == KNOWN_MODELS["meta-llama/Llama-2-7b-hf"]
    text = "layers=28,hidden=1024,intermediate=3072,heads=16,kv_heads=8,head_dim=128,vocabulary=151936,tied,qk_norm"
    assert parse_shape(text) == KNOWN_MODELS["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": ""}, "lacks hidden; as in layers=32,"),
        ({"layers": "layers=0"}, "'layers=0' of the shape"),
        ({"layers": "layer=4"}, "'layer=4' of the shape"),
        ({"layers": "layers=4,layers=5"}, "each once"),
        ({"layers": "layers=4,tide"}, "'tide' of the shape"),
        ({"heads": "heads=8,kv_heads=3"}, "heads=8 of the shape .* must be a multiple of kv_heads=3"),
    ],
)
def test_a_shape_with_a_mistake_is_refused(change: dict[str, str], message: str) -> None:
    parts = {"layers": "layers=4", "hidden": "hidden=64", "intermediate": "intermediate=128", "heads": "heads=8",
             "vocabulary": "vocabulary=100"}  # fmt: skip
    with pytest.raises(PlanError, match=message):
        parse_shape(",".join((parts | change).values()))
