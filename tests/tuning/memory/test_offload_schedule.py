"""Offloaded parts are on the device in the calls that need them, and in the call before each."""

from __future__ import annotations

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.tuning.memory.offload_schedule import OffloadSchedule


def _call(name: str, needs: str, produces: str = "") -> ModelFunctionCall:
    role, kind = name.split(".")
    return ModelFunctionCall(
        name=name, kind=kind, role=role, method=kind, needs=tuple(needs.split()), produces=tuple(produces.split())
    )  # type: ignore[arg-type]


FLOW = Dataflow(
    (
        _call("actor.generate", "batch", "samples"),
        _call("reference.infer", "samples", "logprobs"),
        _call("reward.infer", "samples", "scores"),
        _call("critic.infer", "samples", "values"),
        _call("actor.train", "logprobs scores values"),
        _call("critic.train", "scores values"),
    )
)
LAYOUTS = {
    "actor.generate": "dp2.tp2@0-3",
    "reference.infer": "tp2@0-1",
    "reward.infer": "fsdp2@2-3",
    "critic.infer": "tp2@2-3",
    "actor.train": "fsdp2.tp2@0-3",
    "critic.train": "fsdp4@0-3",
}
OFFLOAD = ["reference", "reward", "actor.optimizer"]


def _present(rank: int, offload: list[str], average_of: dict[str, str] | None = None) -> dict[str, set[str]]:
    plan = ExecutionPlan.from_mapping({"calls": LAYOUTS, "offload": offload})
    plan.check(FLOW, 4)
    schedule = OffloadSchedule(FLOW, plan, rank, average_of or {})
    return {call.name: set(schedule.present(call.name)) for call in FLOW.calls}


def test_a_part_is_present_in_its_calls_and_in_the_previous_call() -> None:
    # Rank 0 takes no part in reward.infer. For critic.infer it only sends weights, which are not offloaded.
    assert _present(0, OFFLOAD) == {
        "actor.generate": {"reference"},
        "reference.infer": {"reference", "actor.optimizer"},
        "reward.infer": set(),
        "critic.infer": set(),
        "actor.train": {"actor.optimizer"},
        "critic.train": set(),
    }
    assert _present(3, OFFLOAD) == {
        "actor.generate": {"reward"},
        "reference.infer": set(),
        "reward.infer": {"reward"},
        "critic.infer": {"actor.optimizer"},
        "actor.train": {"actor.optimizer"},
        "critic.train": set(),
    }


def test_the_last_call_of_an_iteration_prefetches_for_the_next_iteration() -> None:
    flow = Dataflow((_call("reward.infer", "batch", "scores"), _call("actor.train", "scores")))
    plan = ExecutionPlan.from_mapping(
        {"calls": {"reward.infer": "dp1@0", "actor.train": "dp1@0"}, "offload": ["reward"]}
    )
    assert OffloadSchedule(flow, plan, 0).present("actor.train") == {"reward"}


def test_an_averaging_role_is_present_when_its_source_trains() -> None:
    present = _present(0, ["reference"], {"reference": "actor"})
    assert present["actor.train"] == {"reference"}
    assert present["critic.train"] == set()


def test_evaluation_uses_its_own_parts_and_prefetches_nothing() -> None:
    flow = Dataflow((*FLOW.calls, _call_evaluation()))
    plan = ExecutionPlan.from_mapping({"calls": LAYOUTS, "offload": ["reward"]}).completed(flow)
    schedule = OffloadSchedule(flow, plan, 3)
    assert schedule.needed("reward.judge") == {"reward"}
    assert schedule.prefetched("reward.judge") == set()


def _call_evaluation() -> ModelFunctionCall:
    return ModelFunctionCall(
        name="reward.judge", kind="infer", role="reward", method="judge", needs=("samples",), produces=("verdicts",)
    )


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (["actor"], "offload names 'actor', which is trained and stays on the device; .* write actor.optimizer"),
        (
            ["judge"],
            "offload names 'judge', which this algorithm cannot offload; it can actor.optimizer, reference, "
            "reward, critic.optimizer",
        ),
        (["reward.optimizer"], "offload names 'reward.optimizer', which this algorithm cannot"),
        (["reward", "reward"], "offload names everything once; got reward, reward"),
        ("reward", "offload is 'reward'; write a list of roles"),
        ([3], "write a list of roles"),
    ],
)
def test_parts_that_cannot_be_offloaded_are_refused_by_name(offload: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExecutionPlan.from_mapping({"calls": LAYOUTS, "offload": offload}).check(FLOW, 4)


def test_a_plan_is_saved_with_its_offloaded_parts() -> None:
    plan = ExecutionPlan.from_mapping({"calls": LAYOUTS, "offload": OFFLOAD})
    assert ExecutionPlan.from_mapping(plan.to_mapping()) == plan
    assert plan.digest != ExecutionPlan.from_mapping({"calls": LAYOUTS}).digest
    assert plan.table().splitlines()[-1].split(maxsplit=1) == ["offload", "actor.optimizer, reference, reward"]
