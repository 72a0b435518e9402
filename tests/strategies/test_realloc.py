"""All layouts, ranks and options give the same tokens, rewards, losses and weights as one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from lightning_realloc.callbacks import ParameterReallocation
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-6
TRAINING_LAYOUTS = ("tp4", "dp2.fsdp2", "fsdp2.cp2")
"""Of SFT on four ranks; the tests below train it in others."""
GRPO_PLANS = [
    ("fsdp4", "dp2.tp2"), ("tp4", "dp2.tp2"), ("fsdp2.tp2", "dp4"), ("dp2.tp2", "tp2@2-3"), ("dp4", "fsdp4"),
    ("dp2.fsdp2", "dp2.tp2@0,2,1,3"),
]  # fmt: skip
"""Layouts of training and of generation. Other tests train and generate in those that are no boundaries."""

# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
DESCENT = partial(SGD, lr=1.0)


def run_sft(plans: Sequence[Any], settings: dict[str, Any], batches: Batches) -> list[Outcome]:
    """Train a fresh model under each plan on all ranks of this run."""
    world_size = runs.world_size()
    return [runs.train(runs.sft(**{"optimizer": DESCENT, **settings}), plan, world_size, batches) for plan in plans]


def run_grpo(plans: Sequence[Any], settings: dict[str, Any], batches: Batches) -> list[Outcome]:
    """Train a fresh model under each plan on all ranks of this run."""
    world_size = runs.world_size()
    return [runs.train(runs.grpo(**{"optimizer": DESCENT, **settings}), plan, world_size, batches) for plan in plans]


def run_switched(switches: Sequence[dict[str, Any]], plan: Any) -> list[tuple[Outcome, list[str], int]]:
    """Train with each reallocation setting; also return the calls that weights moved for, and the bytes."""
    world_size = runs.world_size()
    found = []
    for settings in switches:
        reallocation = ParameterReallocation(**settings)
        module = runs.grpo(optimizer=DESCENT)
        outcome = runs.train(module, plan, world_size, Batches(2), callbacks=[reallocation])
        totals = reallocation.summary()
        found.append((outcome, sorted(totals), sum(total.bytes_moved for total in totals.values())))
    return found


def on_ranks(
    workers: WorkerPool,
    function: Any,
    plans: Sequence[Any],
    settings: dict[str, Any],
    batches: Batches,
    world_size: int,
) -> list[Outcome]:
    """Return rank 0's outcomes, after checking that all ranks have the same metrics and step."""
    everyone = workers.run(
        function, list(plans), settings, batches, world_size=world_size, init_process_group=False, deadline_s=120.0
    )
    for outcomes in everyone[1:]:
        for ours, first in zip(outcomes, everyone[0], strict=True):
            assert ours.logged == first.logged
            assert ours.steps == first.steps
            assert ours.tokens == first.tokens
    return everyone[0]


def assert_same(ours: Outcome, theirs: Outcome, *, weights: float = WEIGHT_TOLERANCE) -> None:
    """Compare all results of two runs."""
    assert ours.tokens == theirs.tokens
    assert ours.rewards == theirs.rewards
    assert ours.steps == theirs.steps
    for one, other in zip(ours.logged, theirs.logged, strict=True):
        assert one == pytest.approx(other, abs=LOSS_TOLERANCE, rel=LOSS_TOLERANCE)
    assert runs.largest_difference(ours.weights, theirs.weights) <= weights


def test_sft_gives_the_same_results_in_every_layout_and_on_1_2_and_4_ranks(workers: WorkerPool) -> None:
    batches = Batches(2, responses=True)
    (one,) = on_ranks(workers, run_sft, ["heuristic"], {}, batches, 1)
    assert one.steps == [1, 2]
    assert one.logged[1]["actor/loss"] < one.logged[0]["actor/loss"]
    two = on_ranks(workers, run_sft, [calls(actor_train="tp2")], {}, batches, 2)
    plans = [calls(actor_train=layout) for layout in TRAINING_LAYOUTS]
    four = on_ranks(workers, run_sft, ["heuristic", *plans], {}, batches, 4)
    for outcome in (*two, *four):
        assert_same(outcome, one)


@pytest.fixture(scope="module")
def grpo_alone(workers: WorkerPool) -> Outcome:
    """The outcome of GRPO on one rank."""
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], {}, Batches(2), 1)
    return one


@pytest.mark.exhaustive  # SFT on as many: above; GRPO on four: below
def test_grpo_gives_the_same_results_on_1_2_and_4_ranks(workers: WorkerPool, grpo_alone: Outcome) -> None:
    assert grpo_alone.tokens[0] != grpo_alone.tokens[1]
    assert len({len(response) for response in grpo_alone.tokens[0]}) > 2
    assert grpo_alone.logged[1]["actor/kl"] != grpo_alone.logged[0]["actor/kl"]
    for world_size in (2, 4):
        (outcome,) = on_ranks(workers, run_grpo, ["heuristic"], {}, Batches(2), world_size)
        assert_same(outcome, grpo_alone, weights=1e-5)


@pytest.mark.parametrize(("train", "generate"), matrix(GRPO_PLANS, ("dp2.tp2", "tp2@2-3")))
def test_grpo_gives_the_same_results_in_every_layout(
    workers: WorkerPool, grpo_alone: Outcome, train: str, generate: str
) -> None:
    plan = calls(actor_train=train, actor_generate=generate, reference_infer="tp2@0-1")
    (outcome,) = on_ranks(workers, run_grpo, [plan], {}, Batches(2), 4)
    assert_same(outcome, grpo_alone, weights=1e-5)


@pytest.mark.parametrize("layout", matrix(["fsdp2.tp2", "dp2.fsdp2"], "fsdp2.tp2"))
def test_layouts_agree_for_mini_batches_epochs_and_micro_batches(workers: WorkerPool, layout: str) -> None:
    # A smaller rate for four steps, or rounding in the first grows beyond the tolerance.
    slow = partial(SGD, lr=0.2)
    many = {"optimizer": slow, "train_options": runs.options(num_epochs=2, num_minibatches=2, micro_batch_tokens=18)}
    few = {"optimizer": slow, "train_options": runs.options(num_epochs=2, num_minibatches=2)}
    batches = Batches(1, size=5)
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], few, batches, 1)
    # Two epochs of two mini-batches are four optimizer steps and one iteration.
    assert one.steps == [1]
    (packed_apart,) = on_ranks(workers, run_grpo, ["heuristic"], many, batches, 1)
    plan = calls(actor_train=layout, actor_generate="dp2.tp2", reference_infer="fsdp4")
    for outcome in (packed_apart, *on_ranks(workers, run_grpo, [plan], many, batches, 4)):
        assert_same(outcome, one, weights=1e-4)


@pytest.mark.parametrize("layout", matrix(["fsdp4", "fsdp2.tp2", "tp4"], "fsdp2.tp2"))
def test_clipping_scales_gradients_by_the_same_factor_in_every_layout(workers: WorkerPool, layout: str) -> None:
    batches = Batches(2, responses=True)
    clipped = {"train_options": runs.options(max_grad_norm=0.05)}
    unclipped = {"train_options": runs.options(max_grad_norm=None)}
    (one,) = on_ranks(workers, run_sft, ["heuristic"], clipped, batches, 1)
    (free,) = on_ranks(workers, run_sft, ["heuristic"], unclipped, batches, 1)
    assert "actor/grad_norm" not in free.logged[0]
    assert one.logged[0]["actor/grad_norm"] > 0.05
    assert runs.largest_difference(one.weights, free.weights) > 0.01
    (four,) = on_ranks(workers, run_sft, [calls(actor_train=layout)], clipped, batches, 4)
    assert_same(four, one)


@pytest.mark.parametrize(
    ("size", "train", "others"), matrix([(1, "dp4", "fsdp4"), (3, "fsdp4", "dp4")], (1, "dp4", "fsdp4"))
)
def test_ranks_may_have_no_samples(workers: WorkerPool, size: int, train: str, others: str) -> None:
    plan = calls(actor_train=train, actor_generate=others, reference_infer=others)
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], {}, Batches(1, size=size), 1)
    (outcome,) = on_ranks(workers, run_grpo, [plan], {}, Batches(1, size=size), 4)
    assert_same(outcome, one)


@pytest.mark.parametrize("layouts", matrix(["fsdp4", "dp4 dp2.tp2"], "fsdp4"))
def test_empty_responses_do_not_change_results_between_layouts(workers: WorkerPool, layouts: str) -> None:
    # The longest sequence has a rank to itself; at least two of four ranks have only empty responses.
    batches = Batches(2, size=4, responses=True, silent=3)
    (one,) = on_ranks(workers, run_sft, ["heuristic"], {}, batches, 1)
    plans = [calls(actor_train=layout) for layout in layouts.split()]
    for outcome in on_ranks(workers, run_sft, plans, {}, batches, 4):
        assert_same(outcome, one)


def test_a_static_layout_moves_no_weights_and_gives_the_same_results(workers: WorkerPool) -> None:
    plan = calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="dp2")
    switches = [{}, {"enabled": False}, {"free_after": True}]
    everyone = workers.run(run_switched, switches, plan, world_size=2, init_process_group=False, deadline_s=120.0)
    moving, staying, freeing = everyone[0]
    assert moving[1] == freeing[1] == ["actor.generate"]
    assert moving[2] == freeing[2] > 0
    assert staying[1:] == ([], 0)
    for outcome, _, _ in (staying, freeing):
        assert_same(outcome, moving[0], weights=1e-5)


def read_registered_names() -> dict[str, list[str]]:
    """Return, per registered name, the layouts that a default run chooses, and the calls that weights moved for."""
    found = {}
    for name in ("realloc", "realloc-static"):
        moved = ParameterReallocation()
        module = runs.grpo()
        trainer = runs.trainer(name, 2, callbacks=[moved])
        trainer.fit(module, Batches(1))
        layouts = sorted({str(layout) for layout in trainer.strategy.plan.layouts})
        found[name] = [*layouts, *moved.summary()]
    return found


def test_both_registered_names_choose_their_default_plan(workers: WorkerPool) -> None:
    first, second = workers.run(read_registered_names, world_size=2, init_process_group=False)
    assert first == second
    assert first["realloc"] == ["dp2@0-1", "fsdp2@0-1", "actor.generate"]
    assert first["realloc-static"] == ["fsdp2@0-1"]
