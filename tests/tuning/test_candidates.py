"""Proposed plans differ in kind, fit into memory, and are never the plan in use."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.candidates import PlanEvaluator, interchangeable_ranks
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.plan_search import search_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.tuner_actions import Candidate
from tests.tuning.examples import PPO_FLOW, SMALL, roles_of

CLUSTER = ClusterSpec.local(4)
TYPICAL = TypicalLengths.from_iterations([Lengths((8, 10), (30, 40)), Lengths((10, 12), (50, 0))])
ROLES = roles_of(SMALL)
START = ExecutionPlan.static(PPO_FLOW, Layout.parse("fsdp4@0-3"))


def roofline(lengths: TypicalLengths) -> Estimator:
    load = Workload(num_sequences=lengths.num_sequences, prompt_tokens=lengths.prompt_tokens, response_tokens=64)
    return RooflineEstimator(
        PPO_FLOW, CLUSTER, ROLES, MemorySettings(), load, responses=lengths.responses, efficiency=CPU_EFFICIENCY
    )


PROSPECTS = PlanEvaluator(
    task=PlanningTask(
        dataflow=PPO_FLOW,
        roles=ROLES,
        cluster=CLUSTER,
        settings=MemorySettings(),
        workload=Workload(num_sequences=2, prompt_tokens=12, response_tokens=64),
        memory_budget=2**30,
        headroom=0.0,
    ),
    estimate=roofline,
    lengths=TYPICAL,
)


def within(memory_budget: int) -> PlanEvaluator:
    """Return the evaluator for devices with this many bytes."""
    return replace(PROSPECTS, task=replace(PROSPECTS.task, memory_budget=memory_budget))


def propose(start: ExecutionPlan, evaluator: PlanEvaluator = PROSPECTS, *, seconds: float) -> list[Candidate]:
    """Return the proposals of a number of this process's seconds, whatever else the machine does."""
    return evaluator.propose(start, seconds=seconds, seed=0, clock=time.process_time)


def test_lengths_of_iterations_are_combined() -> None:
    assert TypicalLengths(2, 10, 12, (1, 30, 40, 50)) == TYPICAL
    assert Lengths((3,), (4,)).num_tokens == 7
    with pytest.raises(PlanError, match="1 prompts and 2 responses"):
        Lengths((1,), (2, 3))
    with pytest.raises(PlanError, match="at least one iteration"):
        TypicalLengths.from_iterations([])


def test_proposals_differ_fit_and_exclude_the_plan_in_use() -> None:
    found = propose(START, seconds=0.5)
    plans = [candidate.plan for candidate in found]
    assert len(plans) == len(set(plans)) >= 3 and START not in plans
    assert all(PROSPECTS.fits(plan) for plan in plans)
    assert [one.predicted_s for one in found] == sorted(PROSPECTS.seconds(plan) for plan in plans)
    assert found[0].predicted_s < PROSPECTS.seconds(START)
    static = [plan for plan in plans if len(plan.layouts) == 1]
    apart = [plan for plan in plans if any(layout.dims.size < 4 for layout in plan.layouts)]
    assert static and apart


def test_a_proposal_is_never_the_plan_in_use() -> None:
    best = propose(START, seconds=0.3)[0].plan
    assert best not in [candidate.plan for candidate in propose(best, seconds=0.3)]


def test_plans_that_do_not_fit_are_not_proposed() -> None:
    least = max(PROSPECTS.peak_bytes(START).values())
    tight = within(least)
    assert tight.fits(START) and not within(least - 1).fits(START)
    replicated = ExecutionPlan.static(PPO_FLOW, Layout.parse("dp4@0-3"))
    assert PROSPECTS.fits(replicated) and not tight.fits(replicated)
    assert all(tight.fits(candidate.plan) for candidate in propose(START, tight, seconds=0.3))
    assert propose(START, within(least // 8), seconds=0.1) == []


def test_ranks_with_the_same_calls_and_stages_are_interchangeable() -> None:
    plan = ExecutionPlan.from_mapping({"calls": {"actor.train": "pp2.fsdp2@0-3", "critic.train": "tp2@1,3"}})
    assert interchangeable_ranks(plan) == [(0,), (1,), (2,), (3,)]
    assert interchangeable_ranks(START) == [(0, 1, 2, 3)]


def test_options_of_the_initial_plan_are_kept() -> None:
    calls = tuple(
        (name, replace(plan, max_slots=3) if name == "actor.generate" else plan) for name, plan in START.calls
    )
    found = propose(ExecutionPlan(calls), seconds=0.2)
    kept = [one.plan.call("actor.generate").max_slots for one in found]
    assert kept.count(3) >= len(kept) - 1  # the heuristic does not know them


def test_small_batches_are_divided_for_the_stages_of_a_pipeline() -> None:
    # Eight sequences of 10 + 20 tokens: four micro-batches have two each, eight have one.
    few = replace(PROSPECTS, lengths=TypicalLengths.from_iterations([Lengths((10,) * 8, (20,) * 8)]))
    default = PROSPECTS.task.workload.micro_batch_tokens // 4
    assert few._options(START).micro_batch_tokens == (None, 30, 60, default)
    many = replace(PROSPECTS, lengths=TypicalLengths.from_iterations([Lengths((10,) * 8, (20 * default,) * 8)]))
    assert many._options(START).micro_batch_tokens == (None, default)


def test_work_grows_with_the_longest_response_and_with_tokens() -> None:
    def work(*responses: int) -> float:
        return PROSPECTS.work(START, TypicalLengths.from_iterations([Lengths((10,) * len(responses), responses)]))

    even = work(20, 20, 20, 20)
    assert work(5, 5, 5, 65 - 1) > 1.5 * even  # as many tokens, three times the decoding steps
    assert work(*[20] * 16) > even


def test_seconds_of_calls_include_the_moves_before_them() -> None:
    plan = ExecutionPlan.from_mapping(
        {"calls": {call.name: "fsdp4@0-3" for call in PPO_FLOW.model_calls} | {"actor.generate": "dp4@0-3"}}
    )
    seconds = PROSPECTS.call_seconds(plan)
    prices = roofline(TYPICAL)
    own = prices.call_seconds("actor.generate", plan.call("actor.generate")).total
    moved = prices.move_seconds("actor", plan.layout("actor.train"), plan.layout("actor.generate"))
    assert seconds["actor.generate"] == pytest.approx(own + moved) and moved > 0
    assert set(seconds) == {call.name for call in PPO_FLOW.model_calls}


def test_a_search_can_be_restricted_to_all_ranks() -> None:
    def sizes(num_ranks: int | None) -> set[int]:
        plan = search_plan(
            PROSPECTS.task.models,
            roofline(TYPICAL),
            seed=0,
            seconds=0.3,
            clock=time.process_time,
            options=CallOptions(micro_batch_tokens=(None,), num_ranks=num_ranks),
        ).plan
        return {layout.dims.size for layout in plan.layouts}

    assert sizes(4) == {4} and sizes(None) - {4}
