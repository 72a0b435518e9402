"""Merged measurements and targets of the iteration benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import BenchmarkReport
from benchmarks.iteration import (
    ARMS,
    CALLS,
    Arm,
    Readings,
    Turn,
    compare,
    fill,
    judge,
    merge,
)

TURN = Turn(
    seconds=8.0, cpu_s=16.0, seconds_per_call=dict.fromkeys(CALLS, 2.0), switch_s=0.1, lasting_bytes=100,
    passing_bytes=10, rollouts=(((1, 2), (3,)),), losses=(0.5,), grad_norms=(2.0,), num_weights=7,
)  # fmt: skip


def _arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_every_arm_has_a_layout_for_every_call_and_only_realloc_arms_move() -> None:
    for arm in ARMS:
        assert tuple(arm.plan["calls"]) == CALLS
        assert arm.moves == arm.name.startswith("realloc")


def test_an_iteration_lasts_as_long_as_its_slowest_rank_and_the_first_is_left_out() -> None:
    def rank(seconds: list[float], generate: list[float], live: int) -> Readings:
        calls = [dict.fromkeys(CALLS, 0.5) | {"actor.generate": s} for s in generate]
        return Readings(seconds=seconds, cpu_s=[9.0, 1.0, 2.0], calls=calls, lasting_bytes=live, losses=[0.1, 0.2, 0.3])

    turn = merge([rank([50, 4, 6], [40, 1, 1], 30), rank([60, 5, 5], [40, 2, 3], 20)])
    assert turn.seconds == 5.5  # the slower ranks take 5 and 6
    assert turn.cpu_s == 3.0  # 1 + 1 and 2 + 2
    assert turn.seconds_per_call["actor.generate"] == 2.5
    assert turn.lasting_bytes == 30
    assert turn.losses == (0.1, 0.2, 0.3)


def test_responses_losses_and_norms_are_compared_with_the_reference() -> None:
    other = replace(TURN, rollouts=(((1, 2), (4,)),), losses=(0.5 + 2**-20,), grad_norms=(2.5,))
    assert compare(TURN, TURN) == {"equal_tokens": 1.0, "loss_diff": 0.0, "norm_diff": 0.0}
    assert compare(other, TURN) == {"equal_tokens": 0.5, "loss_diff": 2**-20, "norm_diff": 0.25}


def _judged(turns: dict[str, Turn]) -> dict[str, Any]:
    report = BenchmarkReport("iteration")
    named = {_arm(name): [turn] for name, turn in turns.items()}
    fill(report, named)
    judge(report, named)
    assert [row["arm"] for row in report.rows] == list(turns)
    return {target.name: (target.value, target.met) for target in report.targets}


def test_the_fastest_realloc_arm_is_compared_with_static_arms_within_its_memory() -> None:
    targets = _judged(
        {
            "fsdp4": replace(TURN, seconds=40.0),
            "fsdp4 unshard()": replace(TURN, seconds=7.0, passing_bytes=11),  # faster, but needs a byte more
            "dp4": replace(TURN, seconds=10.0, lasting_bytes=90),
            "realloc dp4": TURN,
            "realloc dp2.tp2": replace(TURN, seconds=9.0),
        }
    )
    assert targets["seconds of fsdp4 over realloc dp4"] == (5.0, True)
    assert targets["seconds of realloc dp4 over dp4, the fastest that fits its memory"] == (0.8, True)
    assert targets["share of equal responses"] == (1.0, True)


def test_one_different_token_or_a_different_loss_misses_a_target() -> None:
    wrong = replace(TURN, rollouts=(((1, 2), (9,)),), losses=(0.50002,))
    targets = _judged({"fsdp4": replace(TURN, seconds=40.0), "realloc dp4": wrong})
    assert targets["share of equal responses"] == (0.5, False)
    assert not targets["largest difference of losses"][1]
