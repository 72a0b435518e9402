"""Training with compiled blocks gives the same losses and tokens in every layout; generation is not compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool

PLANS = {
    train: {"calls": {"actor.generate": generate, "reference.infer": "dp2", "actor.train": train}}
    for generate, train in (("tp2", "fsdp2"), ("dp2", "tp2"), ("dp2", "pp2"), ("dp2.ep2", "fsdp2.ep2"))
} | {"one rank": "static"}


def run(plans: Sequence[Any], backend: str | None) -> list[Outcome]:
    """Train GRPO under each plan."""
    world_size, found = runs.world_size(), []
    for plan in plans:
        # Every block is compiled on its own, so one is enough unless two stages share them.
        blocks, family = 2 if "pp2" in str(plan) else 1, "mixtral" if "ep2" in str(plan) else "llama"
        actor, reference = (tiny_model(family, seed=seed, num_hidden_layers=blocks) for seed in (0, 1))
        module = runs.grpo(
            actor=actor, reference=reference, optimizer=partial(SGD, lr=1.0),
            train_options=runs.options(compile=backend),
        )  # fmt: skip
        found.append(runs.train(module, plan, world_size, Batches(2)))
    return found


@pytest.mark.parametrize("train", matrix(PLANS))
def test_compiled_training_gives_the_same_results_in_every_layout(workers: WorkerPool, train: str) -> None:
    # aot_eager traces forward and backward as inductor does, without its minute of C++ compilation.
    ranks = 1 if train == "one rank" else 2
    plain, compiled = (
        workers.run(run, [PLANS[train]], backend, world_size=ranks, init_process_group=False, deadline_s=240.0)[0]
        for backend in (None, "aot_eager")
    )
    assert_same(compiled, plain)


@pytest.mark.inductor
def test_inductor_gives_the_same_results(workers: WorkerPool) -> None:
    plain, compiled = (
        workers.run(
            run, [PLANS["fsdp2"], PLANS["tp2"]], backend, world_size=2, init_process_group=False, deadline_s=170.0
        )[0]
        for backend in (None, "inductor")
    )
    assert_same(compiled, plain)


def assert_same(compiled: Sequence[Outcome], plain: Sequence[Outcome]) -> None:
    """Compare tokens, losses and weights, up to rounding."""
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.tokens == theirs.tokens
        for now, before in zip(ours.logged, theirs.logged, strict=True):
            assert now["actor/loss"] == pytest.approx(before["actor/loss"], abs=1e-6)
            assert now["actor/grad_norm"] == pytest.approx(before["actor/grad_norm"], rel=1e-4)
        assert runs.largest_difference(ours.weights, theirs.weights) <= 2e-6
