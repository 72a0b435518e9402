"""The heuristic plan trains sharded, and cuts replicas only as far as memory requires."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.cuts import TensorParallelCut, sharded, sharded_experts
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec, ParamSpec
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.search.heuristic import TRAINING_SHARE_OF_MEMORY, WEIGHTS_SHARE_OF_MEMORY, heuristic_plan
from tests.dataflow.test_dataflow import GENERATE, JUDGE, SCORE, TRAIN, call

PPO_FLOW = Dataflow(
    (
        GENERATE,
        SCORE,
        call("reward.infer", ("rollout",), ("scores",)),
        call("critic.infer", ("rollout",), ("values",)),
        call("estimate_advantages", ("scores", "values", "ref_logprobs"), ("advantages", "returns")),
        call("actor.train", ("rollout", "advantages")),
        call("critic.train", ("rollout", "values", "returns")),
    )
)
"""A dataflow of two trained and two frozen models."""
FLOW = Dataflow((GENERATE, SCORE, JUDGE, TRAIN))
NUM_ELEMENTS = 1024 * 64
MODEL = ModelSpec(
    (ParamSpec("block.0.weight", (1024, 64), sharded(TensorParallelCut(0, num_units=4)), "block", 0),), num_blocks=1
)
UNCUT = ModelSpec((ParamSpec("block.0.weight", (1024, 64), sharded(), "block", 0),), num_blocks=1, tp_refusal="no plan")


def layouts(model: ModelSpec, device_memory_bytes: float, *, world_size: int = 8) -> dict[str, str]:
    """Return call name -> layout on ``world_size`` devices of one node."""
    cluster = replace(ClusterSpec.local(world_size), device_memory_bytes=int(device_memory_bytes))
    plan = heuristic_plan(FLOW, {"actor": model, "reference": model}, cluster, world_size=world_size, element_bytes=2)
    plan.check(FLOW, world_size)
    return {name: str(call.layout) for name, call in plan.calls}


def test_with_enough_memory_every_rank_generates_with_a_whole_replica() -> None:
    copy_bytes = 2 * NUM_ELEMENTS
    assert layouts(MODEL, copy_bytes / WEIGHTS_SHARE_OF_MEMORY + 1) == {
        "actor.train": "fsdp8@0-7",
        "actor.generate": "dp8@0-7",
        "reference.infer": "dp8@0-7",
    }


def test_a_shared_base_has_the_layout_of_its_owners_generation() -> None:
    cluster = replace(ClusterSpec.local(8), device_memory_bytes=int(NUM_ELEMENTS / WEIGHTS_SHARE_OF_MEMORY + 1))
    models = {"actor": MODEL, "reference": MODEL}
    plan = heuristic_plan(FLOW, models, cluster, world_size=8, element_bytes=2, sharers={"reference": "actor"})
    assert plan.layout("actor.generate").dims.tp == 2
    assert plan.layout("reference.infer") == plan.layout("actor.generate")  # one replica


def test_replicas_are_cut_by_the_smallest_degree_that_fits() -> None:
    copy_bytes = 2 * NUM_ELEMENTS
    halves = layouts(MODEL, copy_bytes / 2 / WEIGHTS_SHARE_OF_MEMORY + 1)
    assert halves["actor.generate"].startswith("dp4.tp2@")
    assert halves["reference.infer"] == "dp4.tp2@0-7"
    quarters = layouts(MODEL, copy_bytes / 4 / WEIGHTS_SHARE_OF_MEMORY + 1)
    assert quarters["actor.generate"].startswith("dp2.tp4@")


def test_a_model_that_fits_nowhere_stays_sharded() -> None:
    # Four heads limit tp to 4, and less than an eighth of the weights fits.
    assert set(layouts(MODEL, 2 * NUM_ELEMENTS / 8 / WEIGHTS_SHARE_OF_MEMORY).values()) == {"fsdp8@0-7"}
    assert set(layouts(UNCUT, NUM_ELEMENTS / WEIGHTS_SHARE_OF_MEMORY).values()) == {"fsdp8@0-7"}


def test_replicas_larger_than_a_node_become_stages_of_the_widest_groups() -> None:
    model = ModelSpec(tuple(replace(sized(1024).params[0], name=f"block.{b}", block=b) for b in range(4)), num_blocks=4)
    cluster = replace(ClusterSpec.local(2), num_nodes=4)
    models = {"actor": model, "reference": model}

    def found(divisor: int, **given: bool) -> dict[str, str]:
        memory = int(2 * model.num_elements / divisor / WEIGHTS_SHARE_OF_MEMORY + 1)
        machines = replace(cluster, device_memory_bytes=memory)
        plan = heuristic_plan(FLOW, models, machines, world_size=8, element_bytes=2, **given)
        plan.check(FLOW, 8)
        return {name: str(call.layout.dims) for name, call in plan.calls}

    assert found(2) == {"actor.train": "fsdp8", "actor.generate": "dp4.tp2", "reference.infer": "dp4.tp2"}
    assert found(4) == {"actor.train": "fsdp8", "actor.generate": "pp2.dp2.tp2", "reference.infer": "pp2.dp2.tp2"}
    assert found(4, generates_in_stages=False) == found(4) | {"actor.generate": "dp2.tp4"}
    assert found(4, generates_in_tensor_parallel=False) == found(4) | {"actor.generate": "pp4.dp2"}


def test_experts_are_divided_where_no_whole_replica_fits() -> None:
    model = ModelSpec(
        (ParamSpec("block.0.experts", (4, 256, 64), sharded_experts(), "block", 0),),
        num_blocks=1,
        tp_refusal="no plan",
        ep_refusal=None,
    )
    memory = int(2 * model.num_elements / 2 / WEIGHTS_SHARE_OF_MEMORY + 1)
    cluster = replace(ClusterSpec.local(8), device_memory_bytes=memory)
    models = {"actor": model, "reference": model}

    def found(**given: bool) -> dict[str, str]:
        plan = heuristic_plan(FLOW, models, cluster, world_size=8, element_bytes=2, **given)
        plan.check_models(FLOW, models)
        return {name: str(call.layout.dims) for name, call in plan.calls}

    assert found() == {"actor.train": "fsdp8", "actor.generate": "dp8.ep2", "reference.infer": "dp8.ep2"}
    assert found(generates_in_lockstep=False) == found() | {"actor.generate": "fsdp8"}


@pytest.mark.parametrize(
    ("num_samples", "tokens", "layout"),
    [(8, 65536, "fsdp8"), (4, 65536, "fsdp4.cp2"), (1, 65536, "cp8"), (1, 4096, "fsdp4.cp2"), (1, 1024, "fsdp8")],
)
def test_ranks_divide_rows_where_there_are_fewer_samples_than_ranks(num_samples: int, tokens: int, layout: str) -> None:
    model = replace(MODEL, attention_heads=((4, 2),))
    load = Workload(num_sequences=2 * num_samples, num_minibatches=2, prompt_tokens=24, response_tokens=tokens - 24)
    cluster, models = ClusterSpec.local(8), {"actor": model, "reference": model}
    plan = heuristic_plan(FLOW, models, cluster, world_size=8, element_bytes=2, workload=load)
    assert {name: str(call.layout.dims) for name, call in plan.calls} == {
        "actor.train": layout,
        "actor.generate": "dp8",
        "reference.infer": "dp8",
    }


def test_any_number_of_ranks_gets_a_plan() -> None:
    for world_size in (1, 2, 3, 6, 7):
        found = layouts(MODEL, NUM_ELEMENTS / WEIGHTS_SHARE_OF_MEMORY + 1, world_size=world_size)
        assert all(layout.endswith(f"0-{world_size - 1}") or "@" in layout for layout in found.values())


def sized(num_rows: int) -> ModelSpec:
    """Return a model of ``num_rows * 64`` elements and four heads."""
    cut = TensorParallelCut(0, num_units=4)
    return ModelSpec((ParamSpec("block.0.weight", (num_rows, 64), sharded(cut), "block", 0),), num_blocks=1)


def ppo_plan(world_size: int, *, device_memory_bytes: float = 1e12, **rows: int) -> dict[str, Layout]:
    """Return call name -> layout on nodes of eight; ``rows`` are sizes of models, 1024 by default."""
    models = {role: sized(rows.get(role, 1024)) for role in PPO_FLOW.roles}
    cluster = replace(
        ClusterSpec.local(min(8, world_size)),
        num_nodes=-(-world_size // 8),
        device_memory_bytes=int(device_memory_bytes),
    )
    plan = heuristic_plan(PPO_FLOW, models, cluster, world_size=world_size, element_bytes=2)
    plan.check(PPO_FLOW, world_size)
    for name, planned in plan.calls:
        ModelLayout(models[str(PPO_FLOW.call(name).role)], planned.layout)  # raises if the model does not allow it
    return {name: planned.layout for name, planned in plan.calls}


@pytest.mark.parametrize("rows", [{}, {"critic": 128}, {"actor": 4096, "reference": 4096}])
def test_ppo_gets_a_valid_plan_with_concurrent_training_on_1_to_64_ranks(rows: dict[str, int]) -> None:
    for world_size in range(1, 65):
        plan = ppo_plan(world_size, **rows)
        actor, critic = (set(plan[f"{role}.train"].ranks) for role in ("actor", "critic"))
        assert actor | critic == set(range(world_size))
        assert set(plan["actor.generate"].ranks) == set(range(world_size))
        assert world_size == 1 or not actor & critic
    assert {str(layout) for layout in ppo_plan(1, **rows).values()} == {"dp1@0"}


def test_four_equal_models_divide_eight_ranks_like_the_best_plans() -> None:
    # Three equal inference calls on eight ranks: the reference on all, then 4 + 4, takes 1/8 + 1/4 = 3/8 of a call on
    # one rank, the same as all three in sequence on all ranks; 3 + 3 + 2 would take 1/2.
    assert {name: str(layout) for name, layout in ppo_plan(8).items()} == {
        "actor.generate": "dp8@0-7",
        "reference.infer": "dp8@0-7",
        "reward.infer": "dp4@0-3",
        "critic.infer": "dp4@4-7",
        "actor.train": "fsdp4@0-3",
        "critic.train": "fsdp4@4-7",
    }
    # On six ranks, 2 + 2 + 2 wastes nothing, so all three run at once.
    six = ppo_plan(6)
    assert [str(six[f"{role}.infer"]) for role in ("reference", "reward", "critic")] == [
        "dp2@0-1",
        "dp2@2-3",
        "dp2@4-5",
    ]
    # On seven ranks, every division is slower: 1/7 + 1/3 against 3/7.
    assert {str(ppo_plan(7)[f"{role}.infer"]) for role in ("reference", "reward", "critic")} == {"dp7@0-6"}


def test_ranks_follow_model_sizes_and_nodes_stay_whole() -> None:
    # Sizes of three to one: six and two of eight ranks.
    plan = ppo_plan(8, actor=3072, reference=3072)
    assert (str(plan["actor.train"]), str(plan["critic.train"])) == ("fsdp6@0-5", "fsdp2@6-7")
    # Two and one of three nodes, and not 18 and 6 ranks.
    plan = ppo_plan(24, actor=3072, reference=3072)
    assert (str(plan["actor.train"]), str(plan["critic.train"])) == ("fsdp16@0-15", "fsdp8@16-23")


def test_models_too_large_for_their_ranks_train_on_all_ranks() -> None:
    # 16 bytes for each of 65,536 elements, over four ranks: 262,144 bytes a rank.
    need = 16 * NUM_ELEMENTS / 4 / TRAINING_SHARE_OF_MEMORY
    assert str(ppo_plan(8, device_memory_bytes=need + 1)["actor.train"]) == "fsdp4@0-3"
    tight = ppo_plan(8, device_memory_bytes=need - 1)
    assert {str(tight[f"{role}.train"]) for role in ("actor", "critic")} == {"fsdp8@0-7"}


def test_dependent_calls_do_not_get_separate_ranks() -> None:
    chained = Dataflow(
        (
            GENERATE,
            call("first.infer", ("rollout",), ("one",)),
            call("second.infer", ("rollout", "one"), ("two",)),
            call("actor.train", ("rollout", "two")),
            call("second.train", ("rollout", "two")),
        )
    )
    models = {role: MODEL for role in chained.roles}
    plan = heuristic_plan(chained, models, ClusterSpec.local(4), world_size=4, element_bytes=2)
    assert str(plan.layout("first.infer")) == str(plan.layout("second.infer")) == "dp4@0-3"


def test_a_role_without_a_model_is_named() -> None:
    with pytest.raises(PlanError, match=r"call 'reference\.infer' needs a model for role 'reference'; there are actor"):
        heuristic_plan(FLOW, {"actor": MODEL}, ClusterSpec.local(2), world_size=2, element_bytes=2)
