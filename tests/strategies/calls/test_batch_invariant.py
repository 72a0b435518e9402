"""Runs with ``batch_invariant`` end with the same bits, however their responses were generated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Speculation
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool

DRAFTS = Speculation(drafter="history", num_draft_tokens=2)
INVARIANT = GenerationOptions(batch_invariant=True)


def run_grpo(layout: str, max_slots: int, drafts: Speculation | None, options: GenerationOptions) -> Outcome:
    """Train for two iterations, with samples that move at random where they may."""
    actor, reference = (tiny_model("llama", seed=seed, hidden_size=128) for seed in (0, 1))
    module = runs.grpo(actor=actor, reference=reference, speculation=drafts, generation=options)
    plan = runs.plan_of(module, layout)
    plan["calls"]["actor.generate"] = {"layout": layout, "max_slots": max_slots}
    with moving(every=1, plan_balance=at_random):
        return runs.train(module, plan, runs.world_size(), Batches(2))


@pytest.mark.parametrize("layout", matrix(["dp2", "tp2"], "dp2"))
def test_trained_weights_are_equal_to_the_bit_with_other_batches_drafts_and_moves(
    workers: WorkerPool, layout: str
) -> None:
    # Drafts, samples that move and a bounded cache generate the same tokens in other batches and steps.
    options = GenerationOptions(sample_reallocation="all" if layout == "dp2" else False, max_cache_bytes=200_000)
    plain, other = (
        workers.run(run_grpo, layout, *arguments, world_size=2, init_process_group=False)[0]
        for arguments in ((64, None, INVARIANT), (3, DRAFTS, replace(options, batch_invariant=True)))
    )
    assert other.tokens == plain.tokens
    assert all(torch.equal(other.weights[name], weight) for name, weight in plain.weights.items())
    if layout == "dp2":  # without the setting there is a difference
        varying = workers.run(run_grpo, layout, 3, DRAFTS, options, world_size=2, init_process_group=False)[0]
        assert varying.tokens == plain.tokens
        assert runs.largest_difference(varying.weights, plain.weights) > 0.0


def run_refused(layout: str) -> str:
    """Return the error of a layout."""
    with pytest.raises(GenerationError) as error:
        run_grpo(layout, 8, None, INVARIANT)
    return str(error.value)


def test_layouts_whose_forwards_are_collective_are_refused(workers: WorkerPool) -> None:
    for message in workers.run(run_refused, "fsdp2", world_size=2, init_process_group=False):
        assert message.startswith("actor.generate runs in the layout fsdp2@0-1")
        assert "cannot generate with batch_invariant=True; give it a layout with fsdp=1" in message
