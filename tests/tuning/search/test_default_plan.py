"""The plan of a run without one is the heuristic plan if it fits, and else one that fits if any is known."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.memory.forecast import SET_UP, forecast_memory
from lightning_realloc.tuning.memory.least_memory import least_by_phase
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.default_plan import DefaultPlan, default_plan, largest_by_phase
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.space import common_dims
from tests.tuning.examples import PPO_FLOW, roles_of

MIXED = MemorySettings(copy_bytes=2, gathered_bytes=2)
"""Storage under ``precision="bf16-mixed"``."""
GRPO_FLOW = Dataflow(
    (
        PPO_FLOW.call("actor.generate"),
        PPO_FLOW.call("reference.infer"),
        replace(PPO_FLOW.call("actor.train"), needs=("rollout", "ref_logprobs")),
    )
)
SFT_FLOW = Dataflow((replace(PPO_FLOW.call("actor.train"), needs=("batch",)),))


@dataclass(frozen=True)
class Case:
    """A task whose forecasts are computed once."""

    task: PlanningTask
    known: dict[ExecutionPlan, dict[str, int]] = field(default_factory=dict, compare=False)

    def phase_bytes(self, plan: ExecutionPlan) -> dict[str, int]:
        if plan not in self.known:
            task, ranks = self.task, range(self.task.cluster.num_devices)
            self.known[plan] = largest_by_phase(
                forecast_memory(task.dataflow, plan, task.roles, task.settings, task.workload, ranks=ranks)
            )
        return self.known[plan]

    def planned(self) -> DefaultPlan:
        return default_plan(self.task, self.phase_bytes, world_size=self.task.cluster.num_devices)

    def excess(self, plan: ExecutionPlan, limit: int) -> int:
        """Return the bytes beyond ``limit`` in iterations, or beyond a device before them, whichever are more."""
        sizes = self.phase_bytes(plan)
        return max(size - (self.task.memory_budget if phase == SET_UP else limit) for phase, size in sizes.items())


def own_heuristic(task: PlanningTask) -> ExecutionPlan:
    return heuristic_plan(
        task.dataflow,
        task.models,
        task.cluster,
        world_size=task.cluster.num_devices,
        element_bytes=task.settings.copy_bytes,
    )


def random_tasks(count: int) -> Iterator[PlanningTask]:
    """Yield tasks whose devices have from a sixth to one and a half times the bytes that the heuristic plan needs."""
    rng = random.Random(7)
    for _ in range(count):
        heads = rng.choice((2, 4, 6, 8))
        shape = (
            f"layers=2,hidden={heads * 32},intermediate={heads * rng.randint(32, 96)},heads={heads},"
            f"kv_heads={rng.choice((1, heads))},vocabulary={rng.choice((256, 4000))}"
        )
        flow = rng.choice((PPO_FLOW, GRPO_FLOW, SFT_FLOW))
        nodes, devices = rng.choice(((1, 1), (1, 2), (1, 3), (1, 4), (2, 2)))
        cluster = replace(ClusterSpec.parse("h100"), num_nodes=nodes, devices_per_node=devices)
        response = rng.choice((16, 256, 900))
        load = Workload(
            num_sequences=rng.choice((8, 64)), prompt_tokens=64, response_tokens=response, group_size=rng.choice((1, 2))
        )
        recomputes = rng.random() < 0.7
        roles = roles_of(shape, flow)
        task = PlanningTask(
            dataflow=flow,
            roles={name: replace(role, can_recompute=recomputes) for name, role in roles.items()},
            cluster=cluster,
            settings=MIXED,
            workload=None if rng.random() < 0.2 else load,
            memory_budget=1,
        )
        budget = int(max(Case(task).phase_bytes(own_heuristic(task)).values()) * 10 ** rng.uniform(-0.8, 0.2))
        yield replace(task, memory_budget=budget, cluster=replace(cluster, device_memory_bytes=budget))


def test_a_plan_that_fits_is_chosen_wherever_one_is_known_and_the_heuristic_one_where_it_fits() -> None:
    kept = replaced = refused = 0
    for task in random_tasks(24):
        case, heuristic, limit, device = Case(task), own_heuristic(task), task.usable_bytes, task.memory_budget
        found = case.planned()
        assert found == case.planned() and found.heuristic == heuristic
        found.plan.check(task.dataflow, task.cluster.num_devices)
        found.plan.check_models(task.dataflow, task.models)
        _check_options(task, found.plan)
        assert (found.reason is None) == (found.plan == heuristic)
        if case.excess(heuristic, limit) <= 0:
            assert found.plan == heuristic
            kept += 1
            continue
        fits = case.excess(found.plan, device) <= 0
        if case.excess(found.plan, limit) > 0:  # without head-room, or not at all: no better plan is known
            assert all(case.excess(plan, limit if fits else device) > 0 for plan in _simple_plans(task))
        assert fits or found.plan == heuristic
        assert (found.shortage is None) == fits
        replaced, refused = replaced + fits, refused + (not fits)
    assert min(kept, replaced, refused) >= 3, (kept, replaced, refused)


def test_a_lower_bound_spares_forecasts_and_changes_no_choice() -> None:
    num_without = num_with = 0
    for task in random_tasks(8):
        plain, bounded = Case(task), Case(task)
        model, world_size = (
            MemoryModel(task.dataflow, task.roles, task.settings, task.workload),
            task.cluster.num_devices,
        )
        found = default_plan(
            task, bounded.phase_bytes, world_size=world_size, least_bytes=partial(least_by_phase, model)
        )
        assert found == plain.planned()
        num_without, num_with = num_without + len(plain.known), num_with + len(bounded.known)
        assert (found.shortage is None) == (plain.planned().shortage is None)
        for plan, sizes in plain.known.items():
            least = least_by_phase(model, plan)
            assert all(0 < size <= sizes[phase] for phase, size in least.items()), (plan, least, sizes)
    assert num_with < num_without / 2, (num_with, num_without)


def _check_options(task: PlanningTask, plan: ExecutionPlan) -> None:
    for name, call in plan.calls:
        assert not call.gradient_checkpointing or task.roles[str(task.dataflow.call(name).role)].can_recompute
        if task.workload is None:
            assert call.options == CallPlan(call.layout).options
        elif call.micro_batch_tokens is not None:
            longest = task.workload.prompt_tokens + task.workload.response_tokens
            assert call.micro_batch_tokens >= task.workload.group_size * longest


def _simple_plans(task: PlanningTask) -> Iterator[ExecutionPlan]:
    """Yield plans with one layout that shards over all ranks, and options that need few bytes."""
    flow, ranks = task.dataflow, tuple(range(task.cluster.num_devices))
    load = task.workload
    options: dict[str, CallPlan] = {}
    for dims in common_dims(flow, task.models, task.cluster):
        if dims.pp > 1 or dims.dp > 1:
            continue
        for call in flow.model_calls:
            options[call.name] = CallPlan(Layout(dims, ranks))
            if load is not None and call.kind == "generate":
                options[call.name] = replace(options[call.name], max_slots=1)
            if load is not None and call.kind == "train" and task.roles[str(call.role)].can_recompute:
                options[call.name] = replace(options[call.name], gradient_checkpointing=True)
        frozen = tuple(role for role in flow.roles if role not in flow.trained_roles)
        for offload in ((), frozen):
            yield ExecutionPlan(tuple(options.items()), offload)


def h100(flow: Dataflow, model: str, nodes: str, **load: int) -> PlanningTask:
    cluster = ClusterSpec.parse(f"h100:{nodes}")
    return PlanningTask(
        dataflow=flow,
        roles=roles_of(model, flow),
        cluster=cluster,
        settings=MIXED,
        workload=Workload(num_sequences=64, prompt_tokens=512, response_tokens=load.get("response_tokens", 1024)),
        memory_budget=cluster.device_memory_bytes,
    )


def test_options_change_before_layouts_and_only_those_of_calls_that_are_too_large() -> None:
    found = Case(h100(PPO_FLOW, "Qwen3-8B", "2x8")).planned()
    assert {name: call.layout for name, call in found.plan.calls} == {
        name: call.layout for name, call in found.heuristic.calls
    }
    changed = {name for name, call in found.plan.calls if call != found.heuristic.call(name)}
    assert changed == {"actor.train", "critic.train"}
    assert found.plan.call("actor.train").gradient_checkpointing
    assert found.reason is not None
    assert found.reason.startswith(
        "the heuristic plan needs 147.20 GiB in actor.train, and plans may fill 72.00 GiB of"
    )
    assert "actor.train: {gradient_checkpointing: true, layout: fsdp8@0-7, micro_batch_tokens: 16384}" in found.reason


def test_generation_stays_replicated_while_training_and_inference_use_all_ranks() -> None:
    found = Case(h100(PPO_FLOW, "Qwen3-8B", "1x8")).planned()
    layouts = {name: str(call.layout) for name, call in found.plan.calls}
    assert layouts.pop("actor.generate") == "dp8@0-7" and set(layouts.values()) == {"fsdp8@0-7"}


def test_the_smallest_plan_is_named_where_none_fits() -> None:
    case = Case(h100(PPO_FLOW, "Llama-3.1-70B", "1x8"))
    found = case.planned()
    assert found.plan == found.heuristic and found.reason is None and found.shortage is not None
    smallest = min(max(sizes.values()) for sizes in case.known.values())
    devices = math.ceil(8 * smallest / case.task.memory_budget)
    assert re.search(
        rf"none of the {len(case.known)} plans tried fits with them: the smallest needs {smallest / 2**30:.2f} GiB in "
        rf"\S+, and a device has 80.00 GiB \(.*\); use at least {devices} such devices, a smaller model",
        found.shortage,
    )


def test_rank_orders_are_chosen_only_for_plans_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ExecutionPlan] = []  # each takes seconds for a thousand ranks

    def counted(*args: Any, **options: Any) -> ExecutionPlan:
        made.append(heuristic_plan(*args, **options))
        return made[-1]

    monkeypatch.setattr(f"{default_plan.__module__}.heuristic_plan", counted)
    found = Case(h100(PPO_FLOW, "Qwen3-8B", "2x8")).planned()
    assert found.plan != found.heuristic and len(made) == 1


@pytest.mark.parametrize("has_other_options", [False, True])
def test_the_head_room_is_kept_where_some_plan_keeps_it(has_other_options: bool) -> None:
    task = h100(SFT_FLOW, "Qwen3-0.6B", "1x1")
    task = task if has_other_options else replace(task, workload=None)
    needed = max(Case(task).phase_bytes(own_heuristic(task)).values())
    found = Case(replace(task, memory_budget=math.ceil(needed / 0.95))).planned()
    assert (found.plan != found.heuristic) == has_other_options
