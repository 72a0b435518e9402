"""Dataflow: the order of an iteration's calls follows from their inputs and outputs; contradictions are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.dataflow.dataflow import CallKind, Dataflow, ModelFunctionCall
from lightning_realloc.errors import PlanError


def call(name: str, needs: tuple[str, ...] = ("batch",), produces: tuple[str, ...] = ()) -> ModelFunctionCall:
    """Return a call as the decorators do: ``role.kind``, or a computation for a name without a dot."""
    role, _, kind = name.rpartition(".")
    kinds: dict[str, CallKind] = {"generate": "generate", "infer": "infer", "train": "train"}
    return ModelFunctionCall(name, kinds.get(kind, "compute"), role or None, kind, needs, produces)


GENERATE = call("actor.generate", produces=("rollout",))
SCORE = call("reference.infer", ("rollout",), ("ref_logprobs",))
JUDGE = call("judge", ("rollout",), ("rewards",))
TRAIN = call("actor.train", ("rollout", "ref_logprobs", "rewards"))
EVALUATE = call("critic.infer", ("rollout",), ("values",))


def test_calls_run_after_their_inputs_and_otherwise_in_the_given_order() -> None:
    assert Dataflow((TRAIN, JUDGE, SCORE, GENERATE)).calls == (GENERATE, JUDGE, SCORE, TRAIN)
    assert Dataflow((GENERATE, SCORE, JUDGE, TRAIN)).calls == (GENERATE, SCORE, JUDGE, TRAIN)


def test_an_iteration_leaves_out_calls_that_no_training_depends_on() -> None:
    flow = Dataflow((GENERATE, EVALUATE, SCORE, JUDGE, TRAIN))
    assert flow.iteration_calls == (GENERATE, SCORE, JUDGE, TRAIN)
    assert flow.calls == (GENERATE, EVALUATE, SCORE, JUDGE, TRAIN)
    # Dependencies through another call count too.
    advantages = call("advantages", ("values",), ("advantages",))
    train = call("actor.train", ("advantages",))
    assert Dataflow((GENERATE, EVALUATE, advantages, train)).iteration_calls == (GENERATE, EVALUATE, advantages, train)


def test_roles_and_home_calls_follow_from_the_calls() -> None:
    flow = Dataflow((GENERATE, SCORE, JUDGE, TRAIN))
    assert flow.roles == ("actor", "reference")
    assert flow.trained_roles == ("actor",)
    assert flow.model_calls == (GENERATE, SCORE, TRAIN)
    assert flow.calls_of("actor") == (GENERATE, TRAIN)
    assert flow.home_call("actor") == TRAIN
    assert flow.home_call("reference") == SCORE
    assert flow.call("judge") == JUDGE
    with pytest.raises(PlanError, match=r"no call is named 'critic\.train'; this algorithm has actor\.generate"):
        flow.call("critic.train")
    with pytest.raises(PlanError, match="role 'critic' takes part in no call; known roles: actor, reference"):
        flow.home_call("critic")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((GENERATE, GENERATE), r"two calls 'actor\.generate'; keep one"),
        ((GENERATE, call("again", produces=("rollout",))), r"two producer of 'rollout'|two producers of 'rollout'"),
        ((call("actor.train"), ModelFunctionCall("more", "train", "actor", "more")), "training"),
        ((SCORE,), r"call 'reference\.infer' needs 'rollout', which nothing produces; the loader supplies batch"),
        ((call("a", ("y",), ("x",)), call("b", ("x",), ("y",))), "need each other's products in a cycle: a, b"),
    ],
)
def test_contradictions_are_refused(calls: tuple[ModelFunctionCall, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Dataflow(calls)


def test_only_computations_have_no_role() -> None:
    with pytest.raises(PlanError, match=r"only 'compute' calls have no role"):
        ModelFunctionCall("judge", "infer", None, "judge")
    with pytest.raises(PlanError, match=r"only 'compute' calls have no role"):
        ModelFunctionCall("judge", "compute", "actor", "judge")
    with pytest.raises(PlanError, match=r"only 'compute' calls can ask for it, a model's call gets its data-parallel"):
        ModelFunctionCall("actor.infer", "infer", "actor", "score", whole_batch=True)
    with pytest.raises(PlanError, match=r"kind 'dream'; use one of \('generate', 'infer', 'train', 'compute'\)"):
        ModelFunctionCall("actor.dream", "dream", "actor", "dream")  # type: ignore[arg-type]


def test_partners_are_roles_whose_home_is_the_call_that_asks_them() -> None:
    asking = replace(GENERATE, partners=("actor", "seller"))
    flow = Dataflow((asking, SCORE, JUDGE, TRAIN))
    assert flow.roles == ("actor", "seller", "reference") and flow.trained_roles == ("actor",)
    assert flow.home_call("seller") == asking and flow.calls_of("actor") == (asking, TRAIN)
    with pytest.raises(PlanError, match=r"'reference\.infer' of kind 'infer' has partners=\('seller',\)"):
        replace(SCORE, partners=("seller",))
