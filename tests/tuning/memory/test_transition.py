"""Bytes of a rank during a change of plans, counted by hand for a model of known size."""

from __future__ import annotations

from typing import Any

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.tuning.memory.forecast import transition_bytes
from lightning_realloc.tuning.memory.parts import MemorySettings
from tests.tuning.examples import PPO_FLOW, SMALL, roles_of

ROLES = roles_of(SMALL)
SETTINGS = MemorySettings()
ACTOR = ROLES["actor"].model.num_elements


def plan(**layouts: Any) -> ExecutionPlan:
    """Return a plan with all calls replicated on ranks 0-1, except those given."""
    calls = {call.name: "dp2@0-1" for call in PPO_FLOW.model_calls}
    return ExecutionPlan.from_mapping({"calls": calls | {n.replace("_", "."): one for n, one in layouts.items()}})


def extra(before: ExecutionPlan, after: ExecutionPlan, rank: int) -> int:
    """Return the bytes that a change needs."""
    return transition_bytes(PPO_FLOW, before, after, ROLES, SETTINGS, rank=rank)


def test_roles_that_stay_need_no_bytes() -> None:
    assert extra(plan(), plan(), 0) == 0
    assert extra(plan(), plan(actor_generate="tp2@0-1"), 0) == 0  # a replica is filled when it is needed


def test_a_role_is_whole_next_to_its_old_replica_while_it_moves() -> None:
    arriving = extra(plan(), plan(actor_train="dp2@2-3"), 2)
    assert arriving == 2 * 4 * ACTOR + 4 * ACTOR  # two moments and weights; while weights arrive, it is less
    assert extra(plan(), plan(actor_train="dp2@2-3"), 0) == 0
    # The old replica stays until the new one is complete.
    assert extra(plan(), plan(actor_train={"layout": "dp2@0-1", "gradient_checkpointing": True}), 0) == arriving


def test_memory_that_a_role_frees_is_used_by_the_next_one() -> None:
    before = plan(critic_train="dp2@2-3", critic_infer="dp2@2-3")
    swapped = plan(actor_train="dp2@2-3", actor_generate="dp2@2-3")
    critic = ROLES["critic"].model.num_elements
    # Roles move in the dataflow's order: the actor leaves rank 0 before the critic arrives.
    assert extra(before, swapped, 0) == max(0, 12 * critic - 12 * ACTOR)
    assert extra(before, swapped, 2) == 12 * ACTOR
