"""Timelines equal those computed by hand, and follow the rules of the schedule for any plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.timeline.call_timeline import MOVE_PREFIX, CallTimeline
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap
from lightning_realloc.tuning.timeline.simulator import simulate
from tests.tuning.examples import PPO_FLOW, FixedEstimator

SECONDS = {
    "actor.generate": 4.0,
    "reward.infer": 1.0,
    "reference.infer": 2.0,
    "critic.infer": 1.0,
    "actor.train": 6.0,
    "critic.train": 3.0,
}
OVERLAPS: tuple[Overlap, ...] = ("iterations", "calls", "none")


def plan_of(layouts: dict[str, str], offload: tuple[str, ...] = ()) -> ExecutionPlan:
    return ExecutionPlan(tuple((name, CallPlan(Layout.parse(text))) for name, text in layouts.items()), offload)


def times(timeline: CallTimeline, iteration: int) -> dict[str, tuple[float, float]]:
    return {entry.phase: (entry.start, entry.end) for entry in timeline.entries if entry.iteration == iteration}


def test_calls_on_the_same_ranks_run_one_after_the_other() -> None:
    plan = ExecutionPlan.static(PPO_FLOW, Layout.parse("fsdp4"))
    for overlap in OVERLAPS:
        timeline = simulate(plan, FixedEstimator(PPO_FLOW, SECONDS), overlap=overlap)
        assert timeline.seconds_per_iteration == pytest.approx(4 + 1 + 2 + 1 + 6 + 3)
        assert timeline.mean_idle_share == pytest.approx(0)


SPLIT = {
    "actor.generate": "dp2@0-1",
    "reward.infer": "dp1@2",
    "reference.infer": "dp2@0-1",
    "critic.infer": "dp1@3",
    "actor.train": "fsdp2@0-1",
    "critic.train": "fsdp2@2-3",
}
"""The actor on ranks 0-1, the critic on 2-3; critic.infer and actor.generate have replicas in other layouts."""
MOVES = {"actor": 0.5, "critic": 0.25, "reward": 100.0}


def test_a_timeline_computed_by_hand() -> None:
    timeline = simulate(plan_of(SPLIT), FixedEstimator(PPO_FLOW, SECONDS, MOVES), iterations=2, overlap="calls")
    # The first move takes 0.5 s; generation ends at 4.5; the reward reads until 5.5, the reference until 6.5.
    # The critic's weights move on ranks 2-3: rank 2 is in reward.infer until 5.5, so from 5.5 to 5.75.
    first = {
        "-> actor.generate": (0, 0.5),
        "actor.generate": (0.5, 4.5),
        "reward.infer": (4.5, 5.5),
        "reference.infer": (4.5, 6.5),
        "-> critic.infer": (5.5, 5.75),
        "critic.infer": (5.75, 6.75),
        "actor.train": (6.75, 12.75),
        "critic.train": (6.75, 9.75),
    }
    assert times(timeline, 0) == first
    assert times(timeline, 1) == {name: (start + 12.75, end + 12.75) for name, (start, end) in first.items()}
    assert timeline.seconds_per_iteration == 12.75
    # Rank 2: 1 s of reward.infer, 0.25 s of the critic's move, 3 s of critic.train.
    assert timeline.idle_share(2) == pytest.approx(1 - 4.25 / 12.75)


def test_the_next_generation_starts_during_an_independent_training() -> None:
    slow_critic = SECONDS | {"actor.train": 3.0, "critic.train": 6.0}
    answers = FixedEstimator(PPO_FLOW, slow_critic, MOVES)
    timeline = simulate(plan_of(SPLIT), answers, iterations=2, overlap="iterations")
    assert times(timeline, 0)["actor.train"] == (6.75, 9.75)
    assert times(timeline, 0)["critic.train"] == (6.75, 12.75)
    assert times(timeline, 1)["-> actor.generate"] == (9.75, 10.25)
    assert times(timeline, 1)["reward.infer"][0] == pytest.approx(14.25)  # generation has ended


def test_fused_inference_starts_with_the_first_chunk_and_ends_after_the_last() -> None:
    layouts = SPLIT | {"reference.infer": "dp1@2"}
    timeline = simulate(
        plan_of(layouts),
        FixedEstimator(PPO_FLOW, SECONDS, MOVES),
        iterations=2,
        overlap="calls",
        generation_chunks=2,
    )
    first = [(entry.phase, entry.start, entry.end) for entry in timeline.entries if entry.iteration == 0]
    # Samples finish from 2.5 on, so chunks exist at 3.5 and 4.5. On rank 2, reward.infer and reference.infer take 0.5 s
    # and 1 s per chunk. On rank 3, critic.infer takes 0.5 s per chunk; its weights move from 0 to 0.25 on ranks 2 and
    # 3.
    by_call = {name: [(start, end) for phase, start, end in first if phase == name] for name, _, _ in first}
    assert by_call["actor.generate"] == [(0.5, 4.5)]
    assert by_call["-> critic.infer"] == [(0.0, 0.25)]
    assert by_call["reward.infer"] == [(3.5, 4.0), (5.0, 5.5)]
    assert by_call["reference.infer"] == [(4.0, 5.0), (5.5, 6.5)]
    assert by_call["critic.infer"] == [(3.5, 4.0), (4.5, 5.0)]
    assert by_call["actor.train"] == [(6.5, 12.5)]
    alone = simulate(plan_of(layouts), FixedEstimator(PPO_FLOW, SECONDS, MOVES), overlap="none", generation_chunks=2)
    assert alone.entries == simulate(plan_of(layouts), FixedEstimator(PPO_FLOW, SECONDS, MOVES), overlap="none").entries


def test_a_replica_moves_once_between_two_trainings() -> None:
    timeline = simulate(plan_of(SPLIT), FixedEstimator(PPO_FLOW, SECONDS, MOVES), iterations=3)
    moved = [(entry.phase, entry.iteration) for entry in timeline.entries if entry.phase.startswith(MOVE_PREFIX)]
    assert moved == [(f"-> {call}", i) for i in range(3) for call in ("actor.generate", "critic.infer")]


SCORED_TWICE = Dataflow(
    (
        ModelFunctionCall("judge.infer", "infer", "judge", "judge", ("batch",), ("first",)),
        ModelFunctionCall("judge.check", "infer", "judge", "check", ("first",), ("second",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("second",)),
    )
)


def test_a_frozen_role_moves_once_and_an_offloaded_one_every_time() -> None:
    layouts = {"judge.infer": "tp2@0-1", "judge.check": "dp2@0-1", "actor.train": "fsdp2@0-1"}
    answers = FixedEstimator(SCORED_TWICE, dict.fromkeys(layouts, 1.0), {"judge": 0.5})
    kept = simulate(plan_of(layouts), answers, iterations=4)
    freed = simulate(plan_of(layouts, ("judge",)), answers, iterations=4)
    assert kept.seconds_per_iteration == pytest.approx(3.0)
    assert freed.seconds_per_iteration == pytest.approx(3.5)


def test_an_offloaded_role_costs_the_transfer_of_its_weights_back() -> None:
    @dataclass(frozen=True)
    class Sized(FixedEstimator):
        def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
            return 3 << 30 if is_home else 0

        def offload_seconds(self, num_bytes: float) -> float:
            return num_bytes / 2**31

    layouts = {"judge.infer": "tp2@0-1", "judge.check": "tp2@0-1", "actor.train": "fsdp2@0-1"}
    prices = Sized(SCORED_TWICE, dict.fromkeys(layouts, 1.0))
    kept, offloaded = (simulate(plan_of(layouts, names), prices) for names in ((), ("judge",)))
    assert kept.seconds_per_iteration == pytest.approx(3.0)
    assert offloaded.seconds_per_iteration == pytest.approx(3.0 + 2 * 1.5)  # the judge is offloaded after each call
    optimizer = simulate(plan_of(layouts, ("actor.optimizer",)), prices)
    assert optimizer.seconds_per_iteration == pytest.approx(3.0)


SCORED_BY_BASE = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("rollout", "ref")),
    )
)


@pytest.mark.parametrize(
    ("infer", "moves"),
    [("dp1@1", "first"), ("dp2@0-1", "never"), ("fsdp2@0-1", "never")],
    ids=["of its own", "with the generation's", "at home"],
)
def test_a_shared_base_moves_once_and_trained_weights_every_time(infer: str, moves: str) -> None:
    layouts = {"actor.generate": "dp2@0-1", "reference.infer": infer, "actor.train": "fsdp2@0-1"}
    answers = FixedEstimator(
        SCORED_BY_BASE, dict.fromkeys(layouts, 1.0), {"actor": 0.25, "reference": 8.0}, sharers={"reference": "actor"}
    )
    timeline = simulate(plan_of(layouts), answers, iterations=4)
    moved = [(entry.phase, entry.iteration) for entry in timeline.entries if entry.phase.startswith(MOVE_PREFIX)]
    first = [("-> reference.infer", 0)] if moves == "first" else []
    assert sorted(moved) == sorted([*(("-> actor.generate", i) for i in range(4)), *first])
    assert timeline.seconds_per_iteration == pytest.approx(3.25)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExecutionPlan, FixedEstimator]:
    layouts = {}
    for call in PPO_FLOW.model_calls:
        size = draw(st.sampled_from((1, 2, 4)))
        first = size * draw(st.integers(0, 4 // size - 1))
        axis = draw(st.sampled_from(("dp", "fsdp", "tp")))
        layouts[call.name] = f"{axis}{size}@{first}-{first + size - 1}"
    seconds = {name: draw(st.integers(1, 9)) for name in layouts}
    moves = {role: draw(st.integers(0, 3)) for role in PPO_FLOW.roles}
    return plan_of(layouts), FixedEstimator(PPO_FLOW, seconds, moves)


@given(case=cases(), overlap=st.sampled_from(OVERLAPS))
@settings(max_examples=150, deadline=None)
def test_ranks_run_one_task_at_a_time_after_its_inputs_exist(
    case: tuple[ExecutionPlan, FixedEstimator], overlap: Overlap
) -> None:
    timeline = simulate(case[0], case[1], iterations=3, overlap=overlap)
    for rank in timeline.ranks:
        own = sorted((e.start, e.end) for e in timeline.entries if rank in e.ranks)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
        assert sum(end - start for start, end in own) <= timeline.makespan
        assert 0 <= timeline.idle_share(rank) <= 1
    ends = {(e.phase, e.iteration): e.end for e in timeline.entries}
    producers = {name: call for call in PPO_FLOW.calls for name in call.produces}
    for entry in timeline.entries:
        if entry.phase.startswith(MOVE_PREFIX):
            continue
        needs = [producers[name] for name in PPO_FLOW.call(entry.phase).needs if name in producers]
        needs += [producers[name] for call in needs if call.kind == "compute" for name in call.needs]
        assert all(ends[call.name, entry.iteration] <= entry.start for call in needs if call.role is not None)
        assert ends.get((f"-> {entry.phase}", entry.iteration), 0) <= entry.start


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_overlap_is_never_slower(case: tuple[ExecutionPlan, FixedEstimator]) -> None:
    spans = [simulate(*case, iterations=4, overlap=overlap).makespan for overlap in OVERLAPS]
    assert spans == sorted(spans)
    in_turn = simulate(*case, iterations=4, overlap="none")
    assert in_turn.makespan == pytest.approx(sum(entry.seconds for entry in in_turn.entries))


SCORED_ONCE = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref_logprobs",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("rollout", "ref_logprobs")),
    )
)


@given(case=cases(), overlap=st.sampled_from(OVERLAPS), parts=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_more_chunks_for_one_call_are_never_slower(
    case: tuple[ExecutionPlan, FixedEstimator], overlap: Overlap, parts: int
) -> None:
    # Several such calls can be slower: two calls on the same ranks alternate by chunk, and one of them ends later.
    estimator = FixedEstimator(SCORED_ONCE, case[1].seconds, case[1].moves)
    few, many = (
        simulate(case[0], estimator, iterations=4, overlap=overlap, generation_chunks=count)
        for count in (parts, parts + 1)
    )
    assert many.makespan <= few.makespan * (1 + 1e-9)
    for timeline in (few, many):
        for rank in timeline.ranks:
            busy = sum(entry.seconds for entry in timeline.entries if rank in entry.ranks)
            assert busy <= timeline.makespan * (1 + 1e-9)
    for call in SCORED_ONCE.calls:  # chunks are parts of the same work
        took = [sum(e.seconds for e in timeline.entries if e.phase == call.name) for timeline in (few, many)]
        assert took[0] == pytest.approx(took[1])


def test_invalid_requests_are_refused() -> None:
    plan = ExecutionPlan.static(PPO_FLOW, Layout.parse("fsdp4"))
    answers = FixedEstimator(PPO_FLOW, SECONDS)
    with pytest.raises(PlanError, match="iterations=0 must be at least 1"):
        simulate(plan, answers, iterations=0)
    with pytest.raises(PlanError, match="overlap='all' must be one of iterations, calls, none"):
        simulate(plan, answers, overlap="all")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="rank 9 takes part in no call; the timeline has ranks 0-3"):
        simulate(plan, answers).idle_share(9)
