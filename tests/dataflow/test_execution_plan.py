"""Execution plans: YAML round trips, layouts of calls, and errors that state what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout.cuts import TensorParallelCut, sharded
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from tests.dataflow.test_dataflow import EVALUATE, GENERATE, JUDGE, SCORE, TRAIN, call

FLOW = Dataflow((GENERATE, SCORE, JUDGE, TRAIN))
ENTRIES: dict[str, Any] = {
    "actor.train": {"layout": "fsdp4@0-3", "micro_batch_tokens": 512, "gradient_checkpointing": True},
    "actor.generate": {"layout": "dp2.tp2@0,2,1,3", "max_slots": 8},
    "reference.infer": "tp2@2-3",
}
PLAN = ExecutionPlan.from_mapping({"calls": ENTRIES})


def test_a_saved_plan_loads_unchanged(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    again = ExecutionPlan.load(tmp_path / "plan.yaml")
    (tmp_path / "marked.yaml").write_text("\ufeff" + (tmp_path / "plan.yaml").read_text(), encoding="utf-8")
    assert ExecutionPlan.load(tmp_path / "marked.yaml") == again
    assert again == PLAN
    assert again.digest == PLAN.digest
    assert again.to_mapping() == {"calls": ENTRIES}


def test_a_plan_does_not_depend_on_the_order_of_its_calls() -> None:
    turned = ExecutionPlan.from_mapping({"calls": dict(reversed(ENTRIES.items()))})
    assert turned == PLAN
    assert turned.digest == PLAN.digest
    other = ExecutionPlan.from_mapping({"calls": {**ENTRIES, "reference.infer": "tp2@0-1"}})
    assert other.digest != PLAN.digest


def test_a_plan_gives_the_layout_and_options_of_every_call() -> None:
    assert PLAN.layout("actor.generate") == Layout.parse("dp2.tp2@0,2,1,3")
    assert PLAN.call("actor.generate").max_slots == 8
    assert PLAN.call("reference.infer") == CallPlan(Layout.parse("tp2@2-3"))
    assert [str(layout) for layout in PLAN.layouts] == ["dp2.tp2@0,2,1,3", "fsdp4@0-3", "tp2@2-3"]
    with pytest.raises(PlanError, match=r"no layout for 'critic\.train'; it names actor\.generate, actor\.train"):
        PLAN.call("critic.train")


def test_the_table_has_a_line_per_call() -> None:
    lines = PLAN.table().splitlines()
    assert [line.split()[0] for line in lines] == ["actor.generate", "actor.train", "reference.infer"]
    assert lines[2].endswith("tp2@2-3")


def test_a_static_plan_gives_every_model_call_the_same_layout() -> None:
    layout = Layout.parse("fsdp2@0-1")
    plan = ExecutionPlan.static(FLOW, layout)
    assert [name for name, _ in plan.calls] == ["actor.generate", "actor.train", "reference.infer"]
    assert plan.layouts == (layout,)


def test_calls_that_only_serve_evaluation_default_to_the_home_layout() -> None:
    flow = Dataflow((GENERATE, SCORE, JUDGE, TRAIN, EVALUATE, call("critic.train", ("rewards",))))
    entries = {**ENTRIES, "critic.train": "fsdp2.tp2@0-3"}
    plan = ExecutionPlan.from_mapping({"calls": entries}).completed(flow)
    assert plan.layout("critic.infer") == Layout.parse("fsdp2.tp2@0-3")
    plan.check(flow, 4)
    # Calls of the iteration have no default layout.
    assert ExecutionPlan.from_mapping({"calls": {"actor.train": "fsdp4"}}).completed(FLOW).calls == (
        ("actor.train", CallPlan(Layout.parse("fsdp4@0-3"))),
    )


def test_an_error_names_the_call_of_the_plan_rather_than_one_that_copies_its_layout() -> None:
    flow = Dataflow((GENERATE, SCORE, JUDGE, TRAIN, EVALUATE, call("critic.train", ("rewards",))))
    plan = ExecutionPlan.from_mapping({"calls": {**ENTRIES, "critic.train": "tp4@2-5"}}).completed(flow)
    with pytest.raises(PlanError, match=r"^calls\.critic\.train: layout tp4@2-5 uses rank 4"):
        plan.check(flow, 4)
    with pytest.raises(LayoutError, match=r"^calls\.critic\.train: q: tp=4 must not exceed the number of heads"):
        plan.check_models(flow, {"actor": heads(4), "reference": heads(2), "critic": heads(2)})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"call": {}}, r"an execution plan has the key 'calls', with a layout for every call, .* got \['call'\]"),
        (
            {"trainer": {}, "model": {}},
            r"got \['trainer', 'model'\]; `plan --config` reads .* elsewhere, save its plan in a file of its own",
        ),
        (0.5, r"an execution plan has the key 'calls', .* got 0\.5"),
        ([{"calls": {}}], r"an execution plan has the key 'calls', .* got \[{'calls'"),
        ({"calls": {"a": 4}}, r"calls\.a is 4; write a layout such as 'fsdp4@0-3'"),
        ({"calls": {"a": {"micro_batch_tokens": 4}}}, r"calls\.a is .*; write a layout such as"),
        ({"calls": {"a": {"layout": "tp2", "slots": 4}}}, r"calls\.a has no option 'slots'; it has activation_off"),
        ({"calls": {"a": "tp2@0-2"}}, r"calls\.a: "),
        ({"calls": {"a": "zp2"}}, r"calls\.a: "),
        (
            {"calls": {"a": {"layout": "tp2", "max_slots": 0}}},
            r"calls\.a: max_slots=0 must be a whole number, at least 1",
        ),
        (
            {"calls": {"a": {"layout": "tp2", "micro_batch_tokens": 0}}},
            r"calls\.a: micro_batch_tokens=0 must be",
        ),
        (
            {"calls": {"a": {"layout": "pp2", "pipeline_schedule": "gpipe"}}},
            r"calls\.a: pipeline_schedule='gpipe' must be one of 1f1b, zero_bubble; interleaved stages are vpp",
        ),
        (
            {"calls": {"a": {"layout": "tp2", "pipeline_schedule": "zero_bubble"}}},
            r"calls\.a: pipeline_schedule='zero_bubble' orders .* layout tp2@0-1 has one stage; leave it out",
        ),
    ],
)
def test_entries_that_cannot_be_read_are_named(mapping: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExecutionPlan.from_mapping(mapping)


def test_a_plan_names_every_call_once() -> None:
    entry = ("a", CallPlan(Layout.parse("tp2")))
    with pytest.raises(PlanError, match="a plan names every call once; got a, a"):
        ExecutionPlan((entry, entry))


def test_an_option_of_the_wrong_type_is_named() -> None:
    for option, value in (("max_slots", "many"), ("micro_batch_tokens", 1.5), ("activation_offload", "yes")):
        with pytest.raises(PlanError, match=rf"calls\.a: {option}={value!r} must be "):
            ExecutionPlan.from_mapping({"calls": {"a": {"layout": "tp2", option: value}}})


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("calls:\n  a: tp2\n  b: tp2\n  a: dp2\n")
    with pytest.raises(PlanError, match=r"plan file .*: the key a is given in line"):
        ExecutionPlan.load(path)


def test_a_layout_that_does_not_fit_its_model_is_named_with_its_call() -> None:
    PLAN.check_models(FLOW, {"actor": heads(4), "reference": heads(2)})
    with pytest.raises(LayoutError, match=r"^calls\.reference\.infer: q: tp=2 must not exceed the number of heads"):
        PLAN.check_models(FLOW, {"actor": heads(4), "reference": heads(1)})


def heads(count: int) -> ModelSpec:
    """Return a model of one matrix with this number of attention heads."""
    return ModelSpec(
        (ParamSpec("q", (16 * count, 8), sharded(TensorParallelCut(0, num_units=count)), "block", 0),), num_blocks=1
    )


@pytest.mark.parametrize("text", ["calls: [", "- a", "calls: {a: zp2}", ""])
def test_errors_of_a_file_name_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"^plan file .*broken\.yaml: "):
        ExecutionPlan.load(path)


def test_a_missing_file_is_reported_with_similar_names_and_the_command_that_writes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").touch()
    with pytest.raises(PlanError) as caught:
        ExecutionPlan.load("plann.yaml")
    assert str(caught.value) == (
        f"plan file plann.yaml: there is no such file in {tmp_path} (did you mean plan.yaml?); give a file that "
        f"`lightning-realloc plan ... --save plann.yaml` writes"
    )
    with pytest.raises(PlanError, match=r"^plan file nowhere/absent\.yaml: there is no such file in .*; give a file"):
        ExecutionPlan.load("nowhere/absent.yaml")


def test_messages_use_the_singular_for_one_rank() -> None:
    with pytest.raises(PlanError, match=r"uses rank 1, but this run has 1 rank \(0\); use 2 devices, or a plan for 1"):
        ExecutionPlan.static(FLOW, Layout.parse("dp2@0-1")).check(FLOW, 1)
    with pytest.raises(PlanError, match=r"and this run has 2 ranks; use 1 device, or a plan for 2"):
        ExecutionPlan.static(FLOW, Layout.parse("dp1@0")).check(FLOW, 2)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"actor.train": "fsdp4"}, r"no layout for actor\.generate, reference\.infer; add a line for each under"),
        (
            {**ENTRIES, "critic.train": "tp2"},
            r"names critic\.train, which this algorithm does not have; it has act",
        ),
        (
            {**ENTRIES, "reference.infer": {"layout": "tp2@2-3", "gradient_checkpointing": True}},
            r"calls\.reference\.infer: gradient_checkpointing applies only to calls that train; remove",
        ),
        (
            {**ENTRIES, "actor.generate": {"layout": "dp4", "micro_batch_tokens": 8}},
            r"micro_batch_tokens applies only to calls that infer or train",
        ),
        ({**ENTRIES, "actor.generate": "pp2.vpp2.dp2"}, r"vpp=2, and generation .*; leave vpp out of this call"),
        (
            {"actor.gen": "dp4", "actor.train": "fsdp4", "reference.infer": "tp4"},
            r"names actor\.gen, which this algorithm does not have \(did you mean actor\.generate\?\); it has act",
        ),
        ({**ENTRIES, "reference.infer": "tp2@4-5"}, r"uses rank 4, but this run has 4 ranks \(0-3\); use 6 devices"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExecutionPlan.from_mapping({"calls": entries}).check(FLOW, 4)
