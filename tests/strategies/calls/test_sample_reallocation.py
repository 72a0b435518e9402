"""Iterations give the same results if samples move between ranks during generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_realloc.algorithms.base.generation_options import GenerationOptions, SampleReallocation
from lightning_realloc.generation import Speculation
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.models import UNEVEN_HEADS, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool


@dataclass
class Moved(Callback):
    """Counts the samples that moved between ranks, in every iteration."""

    counts: list[float] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        self.counts.append(float(trainer.logged_metrics.get("moved_samples/actor.generate", -1.0)))


def run_algorithm(
    layout: str,
    world_size: int,
    moves: SampleReallocation,
    drafter: str | None,
    max_slots: int = 64,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Outcome, list[float]]:
    """Return the results of two iterations, and the number of samples that moved in each."""
    drafting = None if drafter is None else Speculation(drafter=drafter, num_draft_tokens=2)
    actor, reference = (tiny_model("llama", seed=seed, **sizes) for seed in (0, 1))
    generation = GenerationOptions(sample_reallocation=moves)
    module = runs.grpo(actor=actor, reference=reference, speculation=drafting, generation=generation)
    moved = Moved()
    with moving(every=1, plan_balance=at_random):
        plan = runs.plan_of(module, layout)
        plan["calls"]["actor.generate"] = {"layout": layout, "max_slots": max_slots}
        outcome = runs.train(module, plan, world_size, Batches(2), callbacks=[moved])
    return outcome, moved.counts


@pytest.mark.parametrize(
    ("layout", "world_size", "moves", "drafter"),
    matrix(
        [
            ("dp2", 2, "all", None),
            ("dp2", 2, "all", "history"),
            ("dp2.tp2", 4, "all", None),
            ("pp2.dp2", 4, "all", "history"),
        ],
        ("pp2.dp2", 4, "all", "history"),
    ),
    ids=["dp2", "dp2, drafting", "dp2.tp2", "pp2.dp2, drafting"],
)
def test_iterations_give_the_same_results_with_and_without_moves(
    workers: WorkerPool, layout: str, world_size: int, moves: SampleReallocation, drafter: str | None
) -> None:
    sizes = dict(UNEVEN_HEADS["9/3"]) if "tp" in layout else {}  # counterparts hold equally many heads

    def run(moves: SampleReallocation) -> tuple[Outcome, list[float]]:
        first: tuple[Outcome, list[float]] = workers.run(
            run_algorithm, layout, world_size, moves, drafter, 64, sizes, world_size=world_size,
            init_process_group=False,
        )[0]  # fmt: skip
        return first

    (stayed, none), (moved, counts) = run(False), run(moves)
    assert none == [-1.0, -1.0]  # nothing is logged where samples cannot move
    assert sum(counts) >= 1.0
    assert moved.tokens == stayed.tokens
    assert moved.rewards == stayed.rewards
    assert runs.mean_difference(moved.weights, stayed.weights) < 1e-6


def test_no_sample_moves_between_ranks_that_step_together(workers: WorkerPool) -> None:
    outcome, counts = workers.run(run_algorithm, "fsdp2", 2, True, None, world_size=2, init_process_group=False)[0]
    assert counts == [-1.0, -1.0]
    assert outcome.tokens


@pytest.mark.exhaustive  # of the engine: tests/generation/rebalance/test_protocol.py; running samples move: above
@pytest.mark.parametrize("setting", [True, "queued"])
def test_queued_samples_move_under_true_and_queued(workers: WorkerPool, setting: SampleReallocation) -> None:
    (stayed, _), (moved, counts) = (
        workers.run(run_algorithm, "dp2", 2, moves, None, 1, world_size=2, init_process_group=False)[0]
        for moves in (False, setting)
    )
    assert sum(counts) >= 1.0
    assert moved.tokens == stayed.tokens
    assert runs.mean_difference(moved.weights, stayed.weights) < 1e-6
