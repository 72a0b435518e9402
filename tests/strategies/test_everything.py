"""Speculative decoding and sample reallocation leave training bitwise unchanged.

Tokens are equal in any case. Log-probabilities recorded by the engine differ in their last bits, and change the weights
unless ratios are taken to the trained model's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_realloc import GenerationOptions
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation import Speculation
from lightning_realloc.strategies import ReallocStrategy
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_sample_reallocation import Moved
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerFailure, WorkerPool

LONGER = replace(runs.SAMPLING, n=3, max_new_tokens=16)


def run_epochs(world_size: int, everything: bool, ratio_to: str, num_minibatches: int) -> tuple[Outcome, float]:
    """Train two epochs over the same prompts; return the outcome, and the number of moved samples."""
    features: dict[str, Any] = {}
    if everything:
        moves = GenerationOptions(sample_reallocation="all")
        features = {"speculation": Speculation(num_draft_tokens=3), "generation": moves}
    options = TrainOptions(num_minibatches=num_minibatches)
    module = runs.grpo(ratio_to=ratio_to, train_options=options, sampling=LONGER, learning_rate=1e-3, **features)
    plan = {"calls": {call.name: f"dp{world_size}" for call in module.dataflow.model_calls}}
    strategy, moved = ReallocStrategy(plan), Moved()
    with moving(every=1, plan_balance=at_random):
        outcome = runs.train(module, strategy, world_size, Batches(2), max_epochs=2, callbacks=[moved])
    return outcome, sum(count for count in moved.counts if count > 0)


def first_rank(workers: WorkerPool, world_size: int, *args: Any) -> tuple[Outcome, float]:
    """Return the first rank's results."""
    answers = workers.run(run_epochs, world_size, *args, world_size=world_size, init_process_group=False)
    outcome: tuple[Outcome, float] = answers[0]
    return outcome


def without_engine(logged: dict[str, float]) -> dict[str, float]:
    """Return the metrics without those that compare the engine's and the trained model's rounding."""
    return {name: value for name, value in logged.items() if not name.startswith("actor/engine_")}


@pytest.mark.parametrize(("world_size", "num_minibatches"), matrix([(1, 1), (2, 1), (2, 2)], (2, 2)))
def test_all_features_together_give_the_same_bits_as_none(
    workers: WorkerPool, world_size: int, num_minibatches: int
) -> None:
    plain, _ = first_rank(workers, world_size, False, "proximal", num_minibatches)
    full, moved = first_rank(workers, world_size, True, "proximal", num_minibatches)
    assert (moved > 0) == (world_size > 1)
    assert full.tokens == plain.tokens
    assert full.rewards == plain.rewards
    assert [without_engine(logged) for logged in full.logged] == [without_engine(logged) for logged in plain.logged]
    assert all(torch.equal(full.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.exhaustive  # drafts and moves keep weights up to rounding: in tests/strategies/calls, each on its own
def test_with_ratios_to_behaviour_logprobs_weights_are_equal_up_to_rounding(workers: WorkerPool) -> None:
    plain, _ = first_rank(workers, 2, False, "behaviour", 2)
    full, _ = first_rank(workers, 2, True, "behaviour", 2)
    assert full.tokens == plain.tokens
    assert 0 < runs.largest_difference(full.weights, plain.weights) < 1e-4


def test_over_several_steps_proximal_ratios_use_the_weights_before_the_first(workers: WorkerPool) -> None:
    """The engine's log-probabilities come from the same weights."""
    by_engine, _ = first_rank(workers, 1, False, "behaviour", 3)
    by_trainer, _ = first_rank(workers, 1, False, "proximal", 3)
    assert by_trainer.tokens == by_engine.tokens
    assert runs.largest_difference(by_trainer.weights, by_engine.weights) < 1e-4


def run_stale() -> None:
    module = runs.grpo(ratio_to="proximal")
    plan = {"calls": {call.name: "dp1" for call in module.dataflow.model_calls}}
    runs.train(module, ReallocStrategy(plan, max_staleness=1), 1, Batches(1))


def test_proximal_ratios_are_refused_if_generation_runs_ahead(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="max_staleness=1 draws responses from older weights"):
        workers.run(run_stale, world_size=1, init_process_group=False)
