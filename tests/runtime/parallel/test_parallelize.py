from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import local_tensors
from tests.matrices import few_and_more
from tests.models import FAMILIES, TENSOR_PARALLEL_FAMILIES, UNEVEN_HEADS, tiny_model
from tests.runtime.reference import Case, train_beside_the_reference
from tests.workers import WorkerPool

UNEVEN = {"vocab_size": 131, "intermediate_size": 90}
WITHOUT_TP = ("fsdp2@0-1", "dp2@2-3", "dp2.fsdp2@0-3", "fsdp4@0-3")
BIASES = {"attention_bias": True, "mlp_bias": True}


def _assert_nothing_differs(answers: list[dict[str, list[str]]]) -> None:
    assert any(answers)
    for rank, differences in enumerate(answers):
        for case, found in differences.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


@few_and_more(
    [Case("mistral", "fsdp2.tp2@0-3")],  # a few cases below have the other families
    [
        *(Case(family, "tp4@0-3") for family in TENSOR_PARALLEL_FAMILIES),
        *(Case(family, "fsdp2.tp2@0-3") for family in TENSOR_PARALLEL_FAMILIES if family != "mistral"),
    ],
)
def test_training_under_tensor_parallelism_equals_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


DATA_PARALLEL = [Case(family, layout) for family, layout in zip(FAMILIES, cycle(WITHOUT_TP), strict=False)]


@few_and_more(
    [*DATA_PARALLEL[::4], Case("gpt2", "fsdp4@0-3"), Case("opt", "dp2@0-1")],
    [*DATA_PARALLEL[1::4], *DATA_PARALLEL[2::4], *DATA_PARALLEL[3::4], Case("qwen2", "dp2.fsdp2@0-3")],
)
def test_training_under_data_parallelism_equals_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


@pytest.mark.exhaustive  # random plans: tests/strategies/pool/test_plans.py
@few_and_more(
    [
        Case("gemma", "dp2.tp2@0,2,1,3"),
        Case("qwen3", "fsdp2.tp2@3,1,2,0"),
    ],
    [
        Case("qwen2", "tp4@2,0,3,1"),
        Case("qwen3", "dp2.tp2@0-3"),
        Case("llama", "fsdp4@2,0,3,1"),
        Case("opt", "dp2.fsdp2@3,2,1,0"),
    ],
)
def test_tensor_parallelism_composes_with_replication_and_ranks_in_any_order(
    workers: WorkerPool, cases: list[Case]
) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


@pytest.mark.exhaustive  # single precision: every other test here
def test_double_precision_agrees_to_rounding(workers: WorkerPool) -> None:
    # Rotary angles and norms are float32 inside transformers, on both sides alike; the rest is rounding of doubles.
    cases = [Case("gpt_neox", layout, dtype=torch.float64, tolerance=1e-12) for layout in ("tp4@0-3", "fsdp2.tp2@0-3")]

    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


@few_and_more(
    [
        Case("llama", "tp4@0-3", {**UNEVEN, **BIASES, "tie_word_embeddings": True}),
        Case("llama", "fsdp2.tp2@0-3", {**UNEVEN, **BIASES, "num_key_value_heads": 1}),
        Case("phi3", "tp4@0-3", UNEVEN),
        Case("llama", "tp4@0-3", {"vocab_size": 5, "bos_token_id": 1, "eos_token_id": 2}),  # a rank without tokens
    ],
    [
        Case("gemma", "fsdp2.tp2@0-3", UNEVEN),
        Case("qwen3", "tp4@0-3", {"num_key_value_heads": 1, **UNEVEN}),
        Case("mistral", "tp4@0-3", {"num_key_value_heads": 4}),
        Case("gpt_neox", "tp4@0-3", {"tie_word_embeddings": True, **UNEVEN}),
    ],
)
def test_uneven_sizes_head_counts_biases_and_ties_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


NINE, FOURTEEN, SIX, FIVE = UNEVEN_HEADS.values()
TIED = {"tie_word_embeddings": True}
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@few_and_more(
    [
        Case("llama", "tp3@1-3", {**NINE, **TIED}),
        Case("llama", "tp4@3,0,2,1", NINE),  # the third key-value head on two ranks
        Case("qwen3", "tp3@0-2", FOURTEEN),  # the first key-value head on one rank, the second on two; norms of heads
        Case("granite_swa", "fsdp2.tp2@0-3", NINE),  # attention sinks
        Case("qwen2", "tp4@0-3", FOURTEEN, lora_modules=EVERYWHERE),
    ],
    [
        Case("gpt_neox", "dp2.tp2@0-3", FIVE),
        Case("qwen2", "fsdp2.tp2@0-3", NINE, checkpointing=True),
        Case("llama", "tp2@0-1", NINE),
        Case("qwen2", "tp4@0-3", FOURTEEN),  # tied, with biases
        Case("granite_swa", "tp4@0-3", FOURTEEN),
        Case("qwen3", "tp4@0-3", {**SIX, **TIED}),
        Case("gpt_neox", "tp2@2-3", FIVE),
        Case("llama", "fsdp2.tp2@0-3", {**NINE, **TIED}),
        Case("llama", "fsdp2.tp2@0-3", NINE, lora_modules=EVERYWHERE),
    ],
)
def test_heads_that_the_degree_does_not_divide_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, [replace(c, tolerance=1e-5) for c in cases]))


OPT_PLAN = {
    "model.decoder.embed_tokens": "embedding_rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
}


@few_and_more(
    [
        Case("qwen3", "tp4@0-3", num_labels=3),
        Case("gpt2", "dp2.fsdp2@0-3", num_labels=3),
        Case("qwen3", "fsdp2.tp2@0-3", num_micro_batches=2),
        Case("qwen2", "tp2@0-1", checkpointing=True),
        Case("opt", "tp2@2-3", tp_plan=OPT_PLAN),
    ],
    [Case("llama", "fsdp2.tp2@0-3", num_labels=1), Case("qwen3", "tp4@0-3", num_micro_batches=2)],
)
def test_heads_micro_batches_checkpointing_and_custom_plans_equal_one_process(
    workers: WorkerPool, cases: list[Case]
) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


@few_and_more(
    [
        Case("qwen2", "fsdp2.tp2@0-3", lora_modules=EVERYWHERE),
        Case("gpt_neox", "tp2@2-3", lora_modules=("query_key_value", "dense")),
        Case("phi3", "tp2@0-1", lora_modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
    [
        Case("qwen3", "tp4@0-3", lora_modules=EVERYWHERE),
        Case("gpt2", "fsdp4@0-3", lora_modules=("c_attn",)),
    ],
)
def test_adapters_train_on_sharded_layers(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_nothing_differs(workers.run(train_beside_the_reference, cases))


def _mixed_precision_and_replicas() -> dict[str, object]:
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    layout = Layout.parse("fsdp2.tp2@0-3")
    meshes.create([layout])
    model = tiny_model("qwen3")
    model_layout = ModelLayout(describe_model(model), layout)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    parallelize(model, model_layout, meshes, mixed_precision=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        ids = torch.arange(20).view(2, 10) + 10 * layout.coordinate(rank).fsdp
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    replicated = [spec.name for spec in model_layout.model.params if spec.tensor_cut is None]
    weights = local_tensors(model)
    return {
        "fsdp index": layout.coordinate(rank).fsdp,
        "logits": output.logits.float(),
        "logits dtype": output.logits.dtype,
        "weight dtypes": {tensor.dtype for tensor in weights.values()},
        "replicated": torch.cat([weights[name].flatten() for name in replicated]),
        "wrapped": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


def test_replicas_stay_equal_to_the_last_bit_under_mixed_precision(workers: WorkerPool) -> None:
    answers = workers.run(_mixed_precision_and_replicas)

    assert [answer["wrapped"] for answer in answers] == [3] * 4  # two blocks and the root
    assert {answer["logits dtype"] for answer in answers} == {torch.bfloat16}
    assert {dtype for answer in answers for dtype in answer["weight dtypes"]} == {torch.float32}
    for first, second in ((answers[0], answers[1]), (answers[2], answers[3])):
        assert first["fsdp index"] == second["fsdp index"]
        assert torch.equal(first["logits"], second["logits"])
        assert torch.equal(first["replicated"], second["replicated"])


def _refusals() -> list[str]:
    meshes = MeshRegistry("cpu")
    tp2 = Layout.parse("tp2@0-1")
    meshes.create([tp2])
    llama = tiny_model("llama")
    spec = describe_model(llama)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(LayoutError) as precision:
        parallelize(llama, ModelLayout(spec, tp2), meshes, mixed_precision=policy)
    parallelize(llama, ModelLayout(spec, tp2), meshes)
    with pytest.raises(LayoutError) as twice:
        parallelize(llama, ModelLayout(spec, tp2), meshes)
    return [str(precision.value), str(twice.value)]


def test_models_that_cannot_run_are_refused_with_the_way_out(workers: WorkerPool) -> None:
    precision, twice = workers.run(_refusals, world_size=2)[0]

    assert "torch.autocast" in precision
    assert "already installed" in twice
    with pytest.raises(LayoutError, match=r"GPT2LMHeadModel has no tensor-parallel plan; pass one .*tp_plan="):
        ModelLayout(describe_model(tiny_model("gpt2")), Layout.parse("tp2"))
    with pytest.raises(LayoutError, match=r"tp=8 must not exceed the number of heads or units along dim 0 \(4\)"):
        ModelLayout(describe_model(tiny_model("llama")), Layout.parse("tp8"))
