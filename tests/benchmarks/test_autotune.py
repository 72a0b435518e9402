"""Targets and rows of the tuning benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.autotune import SETTINGS, STARTS, STATIC, Found, describe, fill, judge, key, overhead
from benchmarks.autotune_runs import Log, Tuned
from benchmarks.harness import BenchmarkReport

MIXED: dict[str, Any] = {"calls": STATIC["dp4"]["calls"] | {"actor.train": {"layout": "fsdp2@0-1", "max_slots": 8}}}
LOSSES = {("actor", 0): 0.5, ("critic", 0): 1.0}
RUN = Tuned(
    start=STATIC["fsdp4"], committed=MIXED, start_s=4.0, committed_s=1.0,
    costs={"search": 3.0, "switch": 1.0, "slower": 2.0}, trials=(), num_tried=4, iterations=20,
    losses=LOSSES, scores=((0.5,),),
)  # fmt: skip
SECONDS = {key(plan): [2.0, 4.0, 3.0] for plan in STATIC.values()} | {
    key(STATIC["dp4"]): [1.5] * 3, key(MIXED): [1.0, 9.0, 1.0],
}  # fmt: skip
FOUND = Found(SETTINGS[0], {"fsdp4": RUN}, SECONDS, LOSSES, ((0.5,), (0.25,)))


def targets(found: Found) -> dict[str, tuple[float, bool]]:
    """Return the targets of one setting with their values."""
    report = BenchmarkReport("autotune")
    judge(report, [found])
    return {target.name: (target.value, target.met) for target in report.targets}


def test_a_fast_cell_with_little_overhead_meets_every_target() -> None:
    assert targets(FOUND) == {
        "speed over the best static plan, worst cell": (1.5, True),
        "speed over the start, worst cell": (3.0, True),
        "overhead in 200 iterations, worst cell": (pytest.approx(6 / 216), True),  # of 6 s + 5 x 3 s + 195 x 1 s
        "largest difference of losses and scores": (0.0, True),
    }
    assert overhead(FOUND, "fsdp4") == pytest.approx(6 / 216) and FOUND.best_static == "dp4"


def test_a_slow_costly_or_wrong_cell_misses_its_target() -> None:
    slow = replace(FOUND, seconds=SECONDS | {key(MIXED): [1.6] * 3})
    assert not targets(slow)["speed over the best static plan, worst cell"][1]
    costly = replace(FOUND, tuned={"fsdp4": replace(RUN, costs={"search": 12.0})})
    assert not targets(costly)["overhead in 200 iterations, worst cell"][1]
    for other in ({"losses": LOSSES | {("actor", 0): 0.6}}, {"scores": ((0.6,),)}):
        wrong = replace(FOUND, tuned={"fsdp4": replace(RUN, **other)})
        assert targets(wrong)["largest difference of losses and scores"] == (pytest.approx(0.1), False)


def test_a_loss_is_assigned_to_its_own_iteration() -> None:
    log = Log()
    for number, ranks in enumerate((4, 4, 2, 2, 2, 4)):
        log.num_ranks.append({"actor": ranks, "critic": 4})
        log.metrics.append({"actor/loss": float(number), "critic/loss": float(number)})
    losses = log.losses()
    # On 2 ranks a loss is logged one iteration late; across a change of plans its iteration is unknown.
    assert {at: loss for (role, at), loss in losses.items() if role == "actor"} == {
        0: 0.0,
        1: 1.0,
        2: 3.0,
        3: 4.0,
        5: 5.0,
    }
    assert {at: loss for (role, at), loss in losses.items() if role == "critic"} == {n: float(n) for n in range(6)}


def test_rows_show_plans_as_short_text() -> None:
    assert describe(STATIC["dp4"]) == "dp4@0-3"
    assert describe(MIXED) == "dp4@0-3: generate, reference, reward, values, critic; fsdp2@0-1 8: actor"
    report = BenchmarkReport("autotune")
    fill(report, FOUND)
    assert [(row["start"], row["gain"], row["best_static"]) for row in report.rows] == [("fsdp4", 3.0, "dp4")]
    assert len(SETTINGS) * len(STARTS) == 12
