"""Calls on separate ranks give the same results as on one rank, with and without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import Part, contents, differences, run_parts
from tests.strategies.runs import Batches, Outcome, calls
from tests.strategies.test_realloc import DESCENT, assert_same, on_ranks, run_grpo
from tests.workers import WorkerPool

PLANS = (
    calls(actor_train="fsdp2@0-1", actor_generate="dp4", reference_infer="tp2@2-3"),
    calls(actor_train="tp2@2-3", actor_generate="dp2@0-1", reference_infer="dp1@3"),
    calls(actor_train="dp1@3", actor_generate="fsdp2.tp2", reference_infer="fsdp2@1-2"),
    calls(actor_train="dp2.fsdp2", actor_generate="tp2@1,0", reference_infer="dp2@3,2"),
)


def run_overlapping(plans: Sequence[Any], settings: dict[str, Any], batches: Batches) -> list[Outcome]:
    """Train a fresh model under each pair of a plan and an overlap setting."""
    world_size = runs.world_size()
    return [
        runs.train(runs.grpo(optimizer=DESCENT), ReallocStrategy(plan, overlap=overlap), world_size, batches)
        for plan, overlap in plans
    ]


@pytest.mark.parametrize("number", matrix(range(len(PLANS)), 2))
def test_training_on_some_ranks_gives_the_same_results_as_on_one(
    workers: WorkerPool, number: int, alone: Outcome
) -> None:
    (outcome,) = on_ranks(workers, run_overlapping, [(PLANS[number], "calls")], {}, Batches(2), 4)
    assert_same(outcome, alone, weights=1e-5)


@pytest.fixture(scope="module")
def alone(workers: WorkerPool) -> Outcome:
    """The outcome on one rank."""
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], {}, Batches(2), 1)
    return one


def _delayed(outcome: Outcome) -> list[dict[str, float]]:
    """Return the metrics of training calls, which may come an iteration late."""
    return [{name: value for name, value in logged.items() if name.startswith("actor/")} for logged in outcome.logged]


def test_overlapping_calls_and_iterations_changes_no_result(workers: WorkerPool) -> None:
    plan = calls(actor_train="dp1@0", actor_generate="dp2", reference_infer="dp1@1")
    pairs = [(plan, overlap) for overlap in ("iterations", "calls", "none")]
    free, calls_only, one_by_one = on_ranks(workers, run_overlapping, pairs, {}, Batches(3), 2)
    assert calls_only.logged == one_by_one.logged
    assert free.rewards == calls_only.rewards == one_by_one.rewards
    assert runs.largest_difference(free.weights, one_by_one.weights) == 0.0
    assert runs.largest_difference(calls_only.weights, one_by_one.weights) == 0.0
    # No rank waits for metrics of training on other ranks: they come an iteration late, and in the last one at once.
    assert _delayed(free)[1] == _delayed(one_by_one)[0]
    assert _delayed(free)[2] == _delayed(one_by_one)[2]
    assert free.steps == [1, 2, 3]


@pytest.mark.parametrize("failing_rank", matrix([0, 3], 3))
def test_a_failure_reaches_ranks_that_take_no_part_in_the_call(workers: WorkerPool, failing_rank: int) -> None:
    layout = "dp1@0" if failing_rank == 0 else "dp2@3,0"
    messages = workers.run(_fail_to_infer, calls(actor_train="dp1@1", actor_generate="dp2@2,3", reference_infer=layout),
                           world_size=4, init_process_group=False, deadline_s=60.0)  # fmt: skip
    assert messages == [messages[0]] * 4
    assert "no logprobs today" in messages[0]


class Moody(Exception):
    """An exception of a user's method."""


def _fail_to_infer(plan: Any) -> str:
    module = runs.grpo()

    def score_reference(*_: Any) -> Any:
        raise Moody("no logprobs today")

    module.score_reference = score_reference  # type: ignore[method-assign]
    try:
        runs.train(module, plan, runs.world_size(), Batches(1))
    except Exception as error:
        return str(error).removeprefix("rank 0 failed with Moody: ").removeprefix("rank 3 failed with Moody: ")
    return ""


ROLES_APART = {
    "actor.generate": "dp2@0-1", "reference.infer": "dp1@2", "critic.infer": "dp1@3", "actor.train": "fsdp2@1-2",
    "critic.train": "tp2@0,3",
}  # fmt: skip
"""No rank has every role: the first one trains no actor, so of its optimizer it writes only settings."""


@pytest.mark.exhaustive  # other plans: tests/strategies/checkpoints
def test_a_run_resumes_if_no_rank_has_every_role_and_under_another_plan(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part(
        {"calls": ROLES_APART}, 4, save=tmp_path / "straight", save_at=(2,), algorithm="ppo", optimizer="sgd"
    )
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)
    moved = replace(resumed, plan="heuristic", save=tmp_path / "moved")
    workers.run(run_parts, [straight, resumed], 4, world_size=4, init_process_group=False, deadline_s=150.0)
    workers.run(run_parts, [moved], 1, world_size=1, init_process_group=False, deadline_s=60.0)

    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}
    apart = differences(contents(tmp_path / "moved"), contents(tmp_path / "straight"))
    assert max(apart.values(), default=0.0) <= 1e-5
