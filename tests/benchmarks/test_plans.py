"""Merged measurements and targets of the benchmark of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness import BenchmarkReport
from benchmarks.plan_data import DataTurn, move_data
from benchmarks.plan_memory import PeakBytes
from benchmarks.plan_turn import CALLS, Arm, Readings, Turn, losses_by_iteration, make_module, merge, run_arm
from benchmarks.plans import ARMS, BY_HAND, IN_TURN, OVERLAPPING, STATIC, TINY, compare, fill, judge
from tests.workers import WorkerPool

LOSSES = [{"actor/loss": 0.5, "critic/loss": 1.0}, {"actor/loss": 0.25, "critic/loss": 2.0}]
PLAN = {"calls": dict.fromkeys(CALLS, "fsdp4@0-3")}
TURN = Turn(
    seconds=8.0, cpu_s=16.0, seconds_per_call=dict.fromkeys(CALLS, 2.0), idle_shares=(0.1, 0.2, 0.3, 0.2),
    bytes_moved=100, bytes_minimum=100, peak_bytes=(4, 3, 2, 1), rollouts=(((1, 2), (3,)),), scores=((0.5, 0.75),),
    losses={("actor", 0): 0.5, ("critic", 0): 1.0}, plan=PLAN, num_weights={"actor": 7},
)  # fmt: skip


CLOSE = PeakBytes(105, 100)


def _arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_the_overlapping_and_the_sequential_arm_have_the_same_plan() -> None:
    side_by_side, in_turn = _arm(OVERLAPPING), _arm(IN_TURN)
    assert side_by_side.plan is in_turn.plan is BY_HAND
    assert (side_by_side.overlap, in_turn.overlap) == ("iterations", "none")
    assert side_by_side.measured == in_turn.measured


def test_seconds_per_iteration_are_those_of_the_slowest_rank() -> None:
    def rank(span_s: float, critic_s: float | None, made: dict[int, list[int]]) -> Readings:
        calls = {"actor.generate": 3.0} | ({} if critic_s is None else {"critic.train": critic_s})
        return Readings(span_s=span_s, cpu_s=6.0, idle_s=3.0, calls=calls, bytes_moved=30, bytes_minimum=15,
                        rollouts=[made], scores=[[0.5, 0.25]], logged=LOSSES, plan=PLAN)  # fmt: skip

    arm = replace(_arm(OVERLAPPING), measured=3)
    turn = merge([rank(12.0, None, {1: [7]}), rank(15.0, 9.0, {0: [8]})], arm)
    assert turn.seconds == 5.0  # 15 seconds for three
    assert turn.cpu_s == 4.0
    assert turn.idle_shares == (0.25, 0.2)
    assert turn.seconds_per_call["critic.train"] == 3.0  # the rank that takes part in the call
    assert (turn.bytes_moved, turn.bytes_minimum) == (10, 5)
    assert turn.rollouts == ([[8], [7]],)


def test_losses_that_are_logged_late_are_assigned_to_the_iteration_before() -> None:
    halves = {"calls": PLAN["calls"] | {"critic.train": "fsdp2@2-3"}}
    logged = [{"actor/loss": 0.0}, {"actor/loss": 1.0, "critic/loss": 10.0}, {"actor/loss": 2.0, "critic/loss": 12.0}]
    actor = {("actor", 0): 0.0, ("actor", 1): 1.0, ("actor", 2): 2.0}
    # The last iteration logs its own loss, 12; that of iteration 1 was never logged.
    assert losses_by_iteration(logged, halves, "iterations") == actor | {("critic", 0): 10.0, ("critic", 2): 12.0}
    prompt = [metrics | {"critic/loss": 10.0 + index} for index, metrics in enumerate(logged)]
    critic = {("critic", 0): 10.0, ("critic", 1): 11.0, ("critic", 2): 12.0}
    assert losses_by_iteration(prompt, halves, "none") == actor | critic


def test_tokens_scores_and_losses_are_compared_where_both_arms_have_them() -> None:
    other = replace(
        TURN, rollouts=(((1, 2), (4,)), ((5,), (6,))), scores=((0.5, 0.25), (9.0, 9.0)),
        losses={("actor", 0): 0.5, ("critic", 0): 1.0 + 2**-20, ("critic", 1): 9.0},
    )  # fmt: skip
    assert compare(TURN, TURN) == {"equal": 1.0, "score_diff": 0.0, "loss_diff": 0.0}
    assert compare(other, TURN) == {"equal": 0.5, "score_diff": 0.5, "loss_diff": 2**-20}


def _judged(peak: PeakBytes = CLOSE, **turns: Turn) -> dict[str, Any]:
    named = {name.replace("_", " "): [turn] for name, turn in turns.items()}
    report = BenchmarkReport("plans")
    peaks = {name: [PeakBytes(100, 100), peak] for name in named}
    fill(report, named, peaks)
    judge(report, named, peaks)
    assert [row["arm"] for row in report.rows] == list(named)
    return {target.name: (target.value, target.met) for target in report.targets}


def test_the_fastest_plan_is_compared_with_static_and_overlap_with_none() -> None:
    targets = _judged(
        static=replace(TURN, seconds=40.0, cpu_s=72.0, bytes_moved=0, bytes_minimum=0),
        heuristic=replace(TURN, seconds=9.0),
        overlapping=TURN,
        in_turn=replace(TURN, seconds=10.0, idle_shares=(0.4,) * 4),
    )
    assert targets["seconds of static over overlapping"] == (5.0, True)
    assert targets["CPU seconds of static over overlapping"] == (4.5, True)
    assert targets["seconds of overlapping over in turn"] == (0.8, True)
    assert targets["idle share of overlapping over in turn"] == (pytest.approx(0.5), True)
    assert all(met for _, met in targets.values())


def test_one_different_token_or_loss_misses_a_target() -> None:
    wrong = replace(TURN, rollouts=(((1, 2), (9,)),), losses={("actor", 0): 0.50002, ("critic", 0): 1.0})
    targets = _judged(static=TURN, heuristic=TURN, overlapping=TURN, in_turn=wrong)
    assert targets["share of equal responses"] == (0.5, False)
    assert not targets["largest difference of losses"][1]


def test_a_predicted_peak_that_is_too_low_misses_its_target() -> None:
    arms = {"static": TURN, "heuristic": TURN, "overlapping": TURN, "in_turn": TURN}
    assert _judged(**arms)["largest error of a predicted peak"] == (pytest.approx(0.05), True)
    low = _judged(PeakBytes(88, 100), **arms)
    assert low["largest error of a predicted peak"] == (pytest.approx(0.12), False)


def run_tiny_arms() -> tuple[list[Turn], DataTurn]:
    """Run the static and the manual plan with small models for one measured iteration, and move data."""
    work = replace(TINY, new_tokens=4)
    turns = [run_arm(replace(_arm(name), measured=1), work) for name in (STATIC, OVERLAPPING)]
    return turns, move_data(make_module(work, Readings()).dataflow.calls, BY_HAND, num_samples=8, turns=1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tiny_run_measures_every_call_and_samples_the_same_tokens(workers: WorkerPool) -> None:
    (static, overlapping), moved = workers.run(run_tiny_arms, deadline_s=120.0)[0]
    assert moved.bytes_minimum <= moved.bytes_sent <= 1.05 * moved.bytes_minimum  # plus names, ids and lengths
    assert min(moved.seconds, moved.floor_s) > 0
    assert all(seconds > 0 for turn in (static, overlapping) for seconds in turn.seconds_per_call.values())
    assert compare(overlapping, static)["equal"] == 1.0
    assert compare(overlapping, static)["loss_diff"] <= 1e-5
    assert static.bytes_moved == 0 < overlapping.bytes_moved == overlapping.bytes_minimum
    assert all(0 <= share < 1 for share in overlapping.idle_shares)
    assert set(overlapping.plan["calls"]) == set(CALLS)
