"""Bytes of a plan, counted by hand, and the changes that the error for a plan without enough memory proposes."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.layout.cuts import sharded_experts
from lightning_realloc.limits import CHUNK_ELEMENTS, TILE_ELEMENTS
from lightning_realloc.tuning.memory.advice import find_excess, in_half_precision
from lightning_realloc.tuning.memory.forecast import MemoryForecast, forecast_memory
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings, Workload, parse_bytes
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

# 4000 elements: an embedding of 1000, three blocks of 1000 each; the head is tied.
SPEC = ModelSpec(
    (
        ParamSpec("embed", (100, 10), section="ends"),
        *(ParamSpec(f"block.{i}", (100, 10), sharded(TensorParallelCut(0)), block=i) for i in range(3)),
    ),
    num_blocks=3,
    aliases=(("head", "embed"),),
)
SHAPE = ModelShape(num_layers=3, hidden=10, intermediate=20, num_heads=2, num_kv_heads=1, head_dim=5, num_outputs=100)
FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("rollout", "ref")),
    )
)
ROLES = {"actor": RoleMemory(model=SPEC, shape=SHAPE), "reference": RoleMemory(model=SPEC, shape=SHAPE)}
LOAD = Workload(num_sequences=8, prompt_tokens=4, response_tokens=6, micro_batch_tokens=40)


def plan(generate: str, infer: str, train: object) -> ExecutionPlan:
    """Return a plan for the three calls."""
    calls = {"actor.generate": generate, "reference.infer": infer, "actor.train": train}
    return ExecutionPlan.from_mapping({"calls": calls})


def forecast(
    chosen: ExecutionPlan, load: Workload | None = None, roles: dict[str, RoleMemory] = ROLES, **settings: object
) -> MemoryForecast:
    """Return the forecast of four ranks."""
    return forecast_memory(FLOW, chosen, roles, MemorySettings(**settings), load, ranks=range(4))  # type: ignore[arg-type]


def test_shards_optimizer_state_and_gathered_blocks_add_up() -> None:
    parts = forecast(plan("fsdp4", "fsdp4", "fsdp4")).at("actor.train", 0)
    # A quarter of 4000 weights each for the actor and the reference, in fp32; two more numbers per weight of the actor.
    assert (parts.weights, parts.optimizer, parts.copies) == (2 * 4000, 8000, 0)
    # The embedding and two blocks of 1000 are gathered. Gradients are those of the embedding and a block; for one
    # block, also the message and its quarter.
    assert (parts.gathered, parts.gradients) == (3 * 4000, 2 * 4000 + 5000)


def test_a_role_takes_no_bytes_on_ranks_without_it() -> None:
    found = forecast(plan("dp2@0-1", "dp2@2-3", "dp2@0-1"))
    assert found.at("actor.generate", 3).optimizer == 0
    assert found.at("actor.train", 3) == found.at("actor.generate", 3)
    assert found.at("actor.train", 3).weights == 4 * 4000  # the whole reference


def test_weights_that_are_pushed_wait_on_both_ends() -> None:
    apart = plan("tp2@0-1", "dp2@2-3", "fsdp2@2-3")
    pushed, moved = (forecast(apart, pushes_weights=pushes, shares_memory=True) for pushes in (True, False))
    # Half of the blocks and the whole embedding under tp2; half of everything under fsdp2; 4 bytes each.
    assert pushed.at("actor.generate", 0).staging - moved.at("actor.generate", 0).staging == 4 * 2500
    assert pushed.at("actor.train", 2).staging - moved.at("actor.train", 2).staging == 4 * 2000
    assert pushed.at("actor.generate", 0).copies == 4 * 2500  # of its own, since ranks take versions at other steps
    together = plan("tp4", "dp4", "fsdp4")
    assert forecast(together, pushes_weights=True) == forecast(together)


def test_weights_are_staged_if_they_are_cast_or_cut_otherwise() -> None:
    rows, columns = (
        ParamSpec(name, (1024, 64), sharded(TensorParallelCut(dim)), block=0)
        for name, dim in (("rows", 0), ("columns", 1))
    )
    role = RoleMemory(model=ModelSpec((rows, columns), num_blocks=1))

    def staging(generate: str, train: str, role: RoleMemory = role, **settings: object) -> int:
        roles = {"actor": role, "reference": role}
        return forecast(plan(generate, "dp2", train), roles=roles, **settings).at("actor.generate", 0).staging

    # Each rank sends half of the rows of both to the other one, from storage to storage; in bf16 it casts them.
    assert staging("dp2", "fsdp2") == 0
    assert staging("dp2", "fsdp2", copy_bytes=2) == 2 * (512 * 64) * 2
    frozen = replace(role, frozen_params=frozenset({"rows", "columns"}))
    assert staging("dp2", "fsdp2", frozen, copy_bytes=2) == 0
    # Half of the rows of half of the columns lies apart in the sender's tensor, and together in the receiver's.
    assert staging("tp2", "fsdp2") == (512 * 32) * 4
    assert staging("tp2", "dp2") == 0  # nothing is sent
    # Biases, and other small weights, are packed for sending and for receiving.
    small = replace(role, model=ModelSpec((ParamSpec("bias", (64,), sharded(), block=0),), num_blocks=1))
    assert staging("dp2", "fsdp2", small) == 2 * 32 * 4


def test_tied_weights_count_once() -> None:
    assert forecast(plan("dp1", "dp1", "dp1")).at("actor.generate", 0).weights == 2 * 4 * SPEC.num_elements


def test_a_replica_of_the_same_dtype_region_and_rank_is_the_source_itself() -> None:
    # Under tp2 and under dp2 rank 0 holds the whole embedding; only the blocks are copied.
    assert forecast(plan("dp2", "dp2", "tp2")).at("actor.generate", 0).copies == 3 * 4000
    assert forecast(plan("dp2", "dp2", "tp2"), copy_bytes=2).at("actor.generate", 0).copies == 4 * 2000


def test_generation_in_the_training_layout_has_a_replica_of_its_own_in_another_dtype() -> None:
    # fp32 at home and bf16 in replicas: all 4,000 weights are copied, unless FSDP gathers them in bf16 anyway.
    for layout in ("dp1", "dp2"):
        found = forecast(plan(layout, layout, layout), copy_bytes=2)
        assert found.at("actor.generate", 0).copies == 4000 * 2
        assert forecast(plan(layout, layout, layout)).at("actor.generate", 0).copies == 0
    assert forecast(plan("fsdp2", "fsdp2", "fsdp2"), copy_bytes=2).at("actor.generate", 0).copies == 0
    alone = forecast(plan("tp2", "dp1", "dp1"), copy_bytes=2)
    assert [phase.phase for phase in alone.phases if phase.rank == 0 and "->" in phase.phase] == ["-> actor.generate"]


def test_shared_memory_is_divided_equally_among_its_readers() -> None:
    found = forecast(plan("dp4", "dp4", "fsdp4"), shares_memory=True)
    assert [found.at("actor.generate", rank).copies for rank in range(4)] == [4000] * 4
    assert forecast(plan("dp4", "dp4", "fsdp4")).at("actor.generate", 0).copies == 16000


def test_freed_replicas_count_in_their_own_call_only() -> None:
    found = forecast(plan("dp4", "dp4", "fsdp4"), frees_copies=True)
    assert found.at("actor.generate", 0).copies == 16000
    assert found.at("actor.train", 0).copies == 0


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state() -> None:
    adapted = RoleMemory(model=SPEC, frozen_params=frozenset({"embed", "block.0", "block.1"}))
    parts = forecast(plan("dp1", "dp1", "dp1"), roles={**ROLES, "actor": adapted}).at("actor.train", 0)
    assert (parts.optimizer, parts.gradients) == (8000, 4000)


def test_a_role_that_shares_a_base_is_counted_once() -> None:
    params = (*SPEC.params, ParamSpec("block.0.base_layer.weight", (100, 10), sharded(TensorParallelCut(0)), block=0))
    adapted = RoleMemory(model=ModelSpec(params, num_blocks=3), frozen_params=frozenset({"embed"}))
    roles = {"actor": adapted, "reference": RoleMemory(model=adapted.model, shares="actor")}
    beside = forecast(plan("dp1", "dp1", "dp1"), roles=roles)
    assert beside.at("reference.infer", 0) == MemoryParts(weights=5 * 4000, optimizer=4 * 8000)
    assert beside.at("set-up", 0).weights == 5 * 4000 + 4000  # and one whole tensor
    # Generation merges adapters into a copy of the one adapted weight.
    assert beside.at("actor.generate", 0).copies == 4000
    # If the two calls have one layout, they share a replica; otherwise the reference has its own.
    together = forecast(plan("dp1@1", "dp1@1", "dp1@0"), roles=roles)
    assert together.at("reference.infer", 1).copies == 5 * 4000
    apart = forecast(plan("dp1@0", "dp1@1", "dp1@0"), roles=roles)
    assert apart.at("reference.infer", 1).copies == 5 * 4000
    assert apart.at("actor.train", 0).copies == 0


def test_experts_with_adapters_are_summed_in_every_pass_and_kept_for_its_backward_pass() -> None:
    embedding, *blocks = SPEC.params
    names = [f"block.{i}.experts.base_layer.up" for i in range(3)]
    experts = [
        replace(b, name=n, shape=(4, 25, 10), cuts=sharded_experts()) for b, n in zip(blocks, names, strict=True)
    ]
    factors = [ParamSpec(f"block.{i}.experts.lora_A.weight", (4, 10), block=i) for i in range(3)]
    adapted, plain = (
        RoleMemory(
            model=replace(SPEC, params=(embedding, *held, *factors)),
            shape=SHAPE,
            frozen_params=frozenset(param.name for param in (embedding, *held)),
        )
        for held in (experts, blocks)
    )
    load = Workload(num_sequences=8, prompt_tokens=900, response_tokens=100, micro_batch_tokens=1000)

    def added(call: str, **options: object) -> int:
        chosen = plan("dp1", "dp1", {"layout": "dp1", **options})
        roles = ({"actor": role, "reference": replace(role, shares="actor")} for role in (adapted, plain))
        one, other = (forecast(chosen, load, each).at(call, 0).activations for each in roles)
        return one - other

    # 1000 elements in fp32 for each of three blocks, or for the recomputed one.
    assert added("actor.train") == 3 * 4000
    assert added("actor.train", gradient_checkpointing=True) == 4000
    assert added("reference.infer") == added("actor.generate") == 0  # the base alone, and merged weights


def test_building_needs_shards_and_one_tensor_at_a_time() -> None:
    # A quarter of the actor's 4000 weights and of the reference's; the embedding has 1000, all of 4 bytes.
    assert forecast(plan("fsdp4", "fsdp4", "fsdp4")).at("set-up", 0) == MemoryParts(weights=2 * 4000 + 4000)
    # Rank 3 has none of the actor; rank 0 has none of the reference.
    apart = forecast(plan("dp1@0", "dp1@3", "dp1@0"))
    assert [apart.at("set-up", rank).weights for rank in (0, 1, 3)] == [5 * 4000, 0, 5 * 4000]


def test_models_that_are_built_whole_count_on_cpu_until_they_are_divided() -> None:
    given = {name: replace(role, deferred=False) for name, role in ROLES.items()}
    layouts = plan("fsdp4", "fsdp4", "fsdp4")
    # Both whole models, and a tensor of the first one's shard.
    assert forecast(layouts, roles=given, builds_on_device=True).at("set-up", 0).weights == 2 * 16000 + 4000
    assert forecast(layouts, roles=given).at("set-up", 0).weights == 2 * 4000 + 4000
    assert forecast(layouts, builds_on_device=True).at("set-up", 0).weights == 2 * 4000 + 4000


def test_the_cache_holds_every_slot_at_full_length() -> None:
    # 8 sequences of 10 tokens, keys and values of one head of 5 in three layers, fp32.
    parts = forecast(plan("dp1", "dp1", "dp1"), LOAD).at("actor.generate", 0)
    assert parts.kv_cache == 8 * 10 * (2 * 5 * 3) * 4
    halved = forecast(plan("dp2", "dp2", "dp2"), LOAD).at("actor.generate", 0)
    assert halved.kv_cache == parts.kv_cache / 2


def test_several_micro_batches_keep_whole_gradients_until_the_last() -> None:
    one = forecast(plan("fsdp4", "fsdp4", "fsdp4"), LOAD).at("actor.train", 0)
    several = {"layout": "fsdp4", "micro_batch_tokens": 10}
    two = forecast(plan("fsdp4", "fsdp4", several), LOAD).at("actor.train", 0)
    assert two.gradients >= 4 * SPEC.num_elements > one.gradients - 4 * 2000


def _logits_bytes(call: str, head: ParamSpec | None, layout: str, response_tokens: int = 100) -> int:
    """Return the bytes of logits for eight responses and a vocabulary of 10,000; ``head`` None ties the head."""
    section = "ends" if head is None else "input"
    embedding = ParamSpec("embed", (10_000, 10), sharded(TensorParallelCut(0)), section)
    params = (embedding, *SPEC.params[1:], *([] if head is None else [head]))
    model = ModelSpec(params, num_blocks=3)
    role = RoleMemory(model=model, shape=replace(SHAPE, num_outputs=10_000))
    load = Workload(num_sequences=8, prompt_tokens=1, response_tokens=response_tokens, micro_batch_tokens=1 << 20)
    return forecast(plan(layout, layout, layout), load, {"actor": role, "reference": role}).at(call, 0).logits


def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_from_it_on() -> None:
    load = Workload(num_sequences=8, prompt_tokens=900, response_tokens=100, micro_batch_tokens=1000)
    found = forecast(plan("dp1", "dp1", "pp3@0-2"), load)
    # One block each, in fp32.
    kept, backward = 1000 * SHAPE.saved_bytes(1, 4), 1000 * 4 * SHAPE.backward_elements(1)
    assert found.at("actor.train", 0).activations == 3 * kept + backward
    assert found.at("actor.train", 1).activations == 2 * kept + backward
    # The first and the last stage hold the tied embedding. Rank 0 has the reference, too.
    assert [found.at("actor.train", rank).weights for rank in range(3)] == [4 * (2000 + 4000), 4 * 1000, 4 * 2000]


def test_logits_divided_among_ranks_count_on_each_of_them() -> None:
    cut = ParamSpec("head", (10_000, 10), sharded(TensorParallelCut(0)), section="output")
    whole = ParamSpec("head", (10_000, 10), section="output")
    every = 800 * 10_000 * 4  # fp32, and the same in a chunk; a backward pass doubles both
    for head in (cut, None):
        assert [_logits_bytes("reference.infer", head, layout) for layout in ("dp1", "tp2")] == [2 * every, every]
        assert [_logits_bytes("actor.train", head, layout) for layout in ("dp1", "tp2")] == [4 * every, 2 * every]
        assert _logits_bytes("reference.infer", head, "tp3") == 2 * 800 * 3334 * 4
        # Sampling takes all logits of 8 sequences, their message, the rank's part, and probabilities in fp32.
        assert _logits_bytes("actor.generate", head, "tp2") == 8 * 10_000 * 4 * (2 + 0.5 + 1)
    assert _logits_bytes("reference.infer", whole, "tp2") == 2 * every


def test_logits_beyond_a_tile_take_a_tile_and_the_sums_of_gradients() -> None:
    tile, chunk = (TILE_ELEMENTS // 10_000) * 10_000 * 4, CHUNK_ELEMENTS * 4
    # 8 * 2,000 rows of 10,000 logits are 160 million. Gradients: by hidden states (width 10), and by the head, of a
    # tile and summed in fp32.
    sums = 4 * 16_000 * 10 + (4 + 4) * 10_000 * 10
    assert _logits_bytes("reference.infer", None, "dp1", 2000) == tile + chunk
    assert _logits_bytes("actor.train", None, "dp1", 2000) == 2 * tile + 2 * chunk + sums


def test_checkpointing_and_smaller_micro_batches_keep_fewer_activations() -> None:
    def activations(**options: object) -> int:
        return forecast(plan("dp1", "dp1", {"layout": "dp1", **options}), LOAD).at("actor.train", 0).activations

    assert activations(gradient_checkpointing=True) < activations()
    assert activations(micro_batch_tokens=10) < activations(micro_batch_tokens=20) < activations()


def test_ranks_that_divide_rows_and_host_memory_keep_fewer_activations() -> None:
    load = replace(LOAD, response_tokens=1_000_000, micro_batch_tokens=10_000_000)

    def activations(**options: object) -> int:
        return forecast(plan("dp1", "dp1", {"layout": "dp1", **options}), load).at("actor.train", 0).activations

    assert activations(layout="fsdp2.cp2") == pytest.approx(activations(layout="fsdp2") / 2, rel=1e-3)
    assert activations(activation_offload=True) < 0.8 * activations()
    # Four ranks divide two heads and rows into halves. Keys and values, 5 features each, are read of one more token for
    # each of a rank's, and of half of one twice. Three blocks keep them.
    tokens = activations(layout="cp4") - activations(layout="fsdp2.cp2")
    assert tokens / (2 * (1 + 0.5) * 5 * 4 * 3) == pytest.approx(8 * 1_000_004 / 4, rel=1e-3)


@pytest.mark.parametrize("layout", ["cp4", "fsdp2.cp2", "dp2.cp2"])
def test_ranks_that_divide_rows_shard_weights_as_fsdp_does(layout: str) -> None:
    fields = ("weights", "optimizer", "copies", "gathered", "gradients")
    found, expected = (
        forecast(plan("dp4", "fsdp4", text), replace(LOAD, micro_batch_tokens=1000)).at("actor.train", 1)
        for text in (layout, layout.replace("fsdp2.cp2", "fsdp4").replace("cp", "fsdp"))
    )
    assert [getattr(found, name) for name in fields] == [getattr(expected, name) for name in fields]


def test_weights_whose_gradients_wait_keep_inputs_and_gradients_of_their_layers() -> None:
    def activations(rank: int, **options: object) -> int:
        train = {"layout": "pp3@0-2", "gradient_checkpointing": True, **options}
        return forecast(plan("dp1@3", "dp1@3", train), LOAD).at("actor.train", rank).activations

    # A micro-batch of 4 sequences has 40 tokens, and a stage one block. Inputs of its layers: twice the width, the
    # query heads and the MLP's features. Their outputs' gradients: heads, twice the width, and twice those features.
    elements = (2 * 10 + 10 + 20) + (10 + 2 * 5 + 2 * 10 + 2 * 20)
    for rank in range(3):
        more = activations(rank, pipeline_schedule="zero_bubble") - activations(rank)
        assert more == min(rank, 2) * 40 * elements * 4


def test_without_a_workload_only_bytes_independent_of_sequences_are_counted() -> None:
    for entry in forecast(plan("dp4", "dp4", "fsdp4")).phases:
        assert entry.parts.activations == entry.parts.logits == entry.parts.kv_cache == 0


def test_the_summary_names_every_phase_and_the_peak_of_each_rank() -> None:
    text = forecast(plan("dp2@0-1", "dp2@2-3", "fsdp2@0-1"), LOAD).summary()
    for phase in ("set-up", "-> actor.generate", "actor.generate", "reference.infer", "actor.train"):
        assert re.search(rf"^{phase} +[0-3] ", text, re.MULTILINE)
    assert "peak of rank 0-1: " in text


def test_a_role_without_a_model_is_named() -> None:
    with pytest.raises(PlanError, match="'reference' has no model"):
        forecast(plan("dp1", "dp1", "dp1"), roles={"actor": ROLES["actor"]})


def test_the_error_for_an_excess_proposes_changes_that_fit() -> None:
    chosen = plan("dp4", "dp4", "dp4")
    needed = forecast(chosen, LOAD).peak().parts.total
    assert find_excess(FLOW, chosen, lambda p: forecast(p, LOAD), budget_bytes=needed) is None
    text = find_excess(FLOW, chosen, lambda p: forecast(p, LOAD), budget_bytes=needed - 1)
    assert text is not None and "on rank 0 in actor.train" in text
    assert "actor.train: {gradient_checkpointing: true, layout: dp4@0-3}" in text
    assert "actor.generate: {" not in text  # fewer slots do not change training


def test_the_error_for_long_rows_proposes_to_divide_them() -> None:
    load, chosen = replace(LOAD, response_tokens=10_000, micro_batch_tokens=10_004), plan("dp4", "dp4", "dp4")
    needed = forecast(chosen, load).peak().parts.total
    text = find_excess(FLOW, chosen, lambda p: forecast(p, load), budget_bytes=needed - 1)
    assert text is not None and "actor.train: dp2.cp2@0-3 (" in text and "actor.train: cp4@0-3 (" in text


def test_the_message_has_cheaper_settings_with_the_bytes_they_need() -> None:
    chosen = plan("dp4", "dp4", "dp4")
    frozen = {**ROLES, "actor": replace(ROLES["actor"], frozen_params=frozenset(p.name for p in SPEC.params))}
    halves = {"master_bytes": 2, "copy_bytes": 2, "gathered_bytes": 2, "optimizer_bytes": 4}
    assert in_half_precision(MemorySettings()) == MemorySettings(**halves)
    adapted, half = forecast(chosen, LOAD, frozen), forecast(chosen, LOAD, **halves)
    needed = max(one.peak().parts.total for one in (adapted, half))
    assert needed < forecast(chosen, LOAD).peak().parts.total
    text = find_excess(
        FLOW, chosen, lambda p: forecast(p, LOAD), budget_bytes=needed,
        lighter=lambda: [("LoRA", lambda p: forecast(p, LOAD, frozen)), ("bf16-true", lambda p: half)],
    )  # fmt: skip
    assert text is not None and "one of these would fit: " in text
    for name, found in (("LoRA", adapted), ("bf16-true", half)):
        assert f"{name} ({found.peak().parts.total / 2**20:.2f} MiB)" in text
    text = find_excess(
        FLOW, chosen, lambda p: forecast(p, LOAD), budget_bytes=1000, lighter=lambda: [("bf16-true", lambda p: half)]
    )
    assert text is not None and "(the nearest: " in text


def test_an_alternative_is_proposed_only_if_it_fits() -> None:
    text = find_excess(FLOW, plan("dp4", "dp4", "dp4"), lambda p: forecast(p, LOAD), budget_bytes=1000)
    assert text is not None and "no change that was tried makes it fit" in text


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("1.5 GB", 1_500_000_000), (4096, 4096), ("7000b", 7000)]
)
def test_amounts_of_memory_are_parsed(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_an_amount_without_a_unit_is_refused() -> None:
    with pytest.raises(PlanError, match=r'24 bytes, too few for a device; did you mean "24GiB"'):
        parse_bytes(24)


@pytest.mark.parametrize("text", ["24 apples", "", "0", "-3GB", "GiB"])
def test_invalid_amounts_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no amount of memory"):
        parse_bytes(text)


def test_a_config_without_the_sizes_of_a_decoder_is_refused() -> None:
    config = SimpleNamespace()
    config.get_text_config = lambda: config
    with pytest.raises(PlanError, match="has no hidden_size"):
        ModelShape.from_config(config, SPEC)


def test_a_partner_lies_in_the_layout_of_the_call_that_asks_it() -> None:
    calls = [replace(call, partners=("actor", "seller")) if call.kind == "generate" else call for call in FLOW.calls]
    roles = {**ROLES, "seller": ROLES["reference"]}
    chosen, settings = plan("tp2@0-1", "dp2@2-3", "fsdp2@2-3"), MemorySettings()
    plain, asking = (
        forecast_memory(flow, chosen, roles, settings, LOAD, ranks=range(4)) for flow in (FLOW, Dataflow(tuple(calls)))
    )
    more = asking.at("actor.generate", 0)
    # Half of the blocks and the whole embedding, 4 bytes each.
    assert more.weights - plain.at("actor.generate", 0).weights == 4 * 2500
    # Both models answer: each has as many keys and values as the actor.
    assert more.kv_cache == 3 * plain.at("actor.generate", 0).kv_cache > 0
    assert asking.at("actor.train", 2) == plain.at("actor.train", 2)  # ranks without the call
    # The reference has its home elsewhere, so it has a replica next to the actor's, unless its home is there.
    asked = Dataflow(tuple(replace(call, partners=("reference",) if call.partners else ()) for call in calls))
    replicas = {}
    for infer in ("dp2@2-3", "tp2@0-1"):
        lying = plan("tp2@0-1", infer, "fsdp2@2-3")
        ours, own = (forecast_memory(f, lying, roles, settings, LOAD, ranks=range(4)) for f in (asked, FLOW))
        replicas[infer] = ours.at("actor.generate", 0).copies - own.at("actor.generate", 0).copies
    assert replicas == {"dp2@2-3": 4 * 2500, "tp2@0-1": 0}
    offloaded = forecast_memory(
        Dataflow(tuple(calls)), replace(chosen, offload=("seller",)), roles, settings, LOAD, ranks=range(4)
    )
    assert offloaded.at("actor.generate", 0) == more
