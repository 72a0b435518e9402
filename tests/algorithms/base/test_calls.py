"""Calls that a class declares: order, inheritance, overriding methods and calls that a subclass leaves out."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from lightning_realloc.algorithms.base.calls import (
    compute,
    declared_calls,
    generate,
    infer,
    train,
    with_experts,
)
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.errors import PlanError


class Base:
    """Generates, scores and trains."""

    @train("actor", needs=("rollout", "rewards"))
    def learn(self) -> str:
        """The base's loss."""
        return "base"

    @generate("actor", produces="rollout")
    def roll_out(self) -> None:
        """Generate."""

    @compute(needs="rollout", produces="rewards")
    def judge(self) -> None:
        """Judge."""

    def helper(self) -> None:
        """Not a call."""


class Extended(Base):
    """Overrides two calls and adds one."""

    def learn(self) -> str:
        """Another loss, without repeating the decorator."""
        return "extended"

    @infer("reference", needs="rollout", produces=("ref_logprobs", "entropies"))
    def score(self) -> None:
        """Score."""

    @compute(needs=("rollout", "ref_logprobs"), produces="rewards")
    def judge(self) -> None:
        """Judge with the reference's log-probabilities."""


class Silent(Extended):
    """Leaves the reference's call out."""

    score: Any = None
    judge = Base.judge


def test_a_class_declares_its_calls_in_the_order_they_are_written() -> None:
    assert declared_calls(Base) == (
        ModelFunctionCall("actor.train", "train", "actor", "learn", ("rollout", "rewards"), ()),
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("judge", "compute", None, "judge", ("rollout",), ("rewards",)),
    )


def test_a_subclass_adds_calls_and_changes_their_needs() -> None:
    calls = {call.name: call for call in declared_calls(Extended)}
    assert list(calls) == ["actor.train", "actor.generate", "judge", "reference.infer"]
    assert calls["judge"].needs == ("rollout", "ref_logprobs")
    assert calls["reference.infer"].produces == ("ref_logprobs", "entropies")


def test_an_overriding_method_stays_the_call_it_overrides() -> None:
    call = next(call for call in declared_calls(Extended) if call.kind == "train")
    assert call.needs == ("rollout", "rewards")
    assert getattr(Extended(), call.method)() == "extended"


def test_a_call_can_be_left_out() -> None:
    assert [call.name for call in declared_calls(Silent)] == ["actor.train", "actor.generate", "judge"]
    assert Dataflow(declared_calls(Silent)).roles == ("actor",)


def test_a_computation_may_ask_for_the_whole_batch() -> None:
    class Whole(Base):
        @compute(needs="rewards", produces="advantages", whole_batch=True)
        def compare(self) -> None:
            """Compare all rewards."""

    asked = {call.name: call.whole_batch for call in declared_calls(Whole)}
    assert asked == {"actor.train": False, "actor.generate": False, "judge": False, "compare": True}


def test_two_methods_cannot_be_the_same_call() -> None:
    class Twice(Base):
        @generate("actor", produces="more")
        def again(self) -> None:
            """Generate too."""

    with pytest.raises(PlanError, match=r"one iteration has two calls 'actor\.generate'; keep one"):
        Dataflow(declared_calls(Twice))


def test_the_cache_of_calls_keeps_no_class_alive() -> None:
    class Again(Base):
        """A class that a notebook defines again and again."""

    assert declared_calls(Again) == declared_calls(Base)
    ended = weakref.ref(Again)
    del Again
    gc.collect()
    assert ended() is None


def test_experts_go_from_a_role_s_generation_to_its_later_calls_alone() -> None:
    changed = {call.name: call for call in with_experts(declared_calls(Extended))}
    assert changed["actor.generate"].produces == ("rollout", "experts")
    assert changed["actor.train"].needs == ("rollout", "rewards", "experts")
    assert changed["reference.infer"].needs == ("rollout",)
    assert "experts" not in changed["judge"].needs
