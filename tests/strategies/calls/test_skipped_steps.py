"""Steps with a gradient norm that is not finite are skipped on all ranks and counted; many in a row end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.parallel.shards import local_tensor
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2")
MAKERS: dict[str, Callable[..., Any]] = {
    "sft": runs.sft, "dpo": preferences.dpo, "grpo": runs.grpo, "ppo": runs.ppo,
}  # fmt: skip
OTHER_CALLS: dict[str, dict[str, str]] = {
    "sft": {},
    "dpo": {"reference_infer": "dp2"},
    "grpo": {"reference_infer": "dp2", "actor_generate": "dp2"},
    "ppo": {"reference_infer": "dp2", "actor_generate": "dp2", "critic_infer": "dp2", "critic_train": "fsdp2"},
}
NORM = "model.norm.weight"


class Watch(Callback):
    """Records weights and optimizer state of this rank around every iteration, and puts NaN into some gradients.

    Args:
        iterations: Iterations whose gradients get a NaN, in one element of this rank's part of the last norm.
        rank: Rank that gets the NaN.
    """

    def __init__(self, iterations: Sequence[int] = (), rank: int = 1) -> None:
        self.iterations, self.rank = iterations, rank
        self.moved: list[bool] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Keep the weights."""
        self._before = self._state(trainer)

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        """Put NaN into a gradient on one rank only."""
        if trainer.global_step in self.iterations and trainer.global_rank == self.rank:
            gradient = trainer.strategy.pool.home("actor").model.get_parameter(NORM).grad
            local_tensor(gradient)[0] = math.nan

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Compare the weights bit by bit."""
        pairs = zip(self._before, self._state(trainer), strict=False)
        self.moved.append(not all(torch.equal(before, after) for before, after in pairs))

    def _state(self, trainer: Any) -> list[Tensor]:
        model = trainer.strategy.pool.home("actor").model
        state = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
        assert all(bool(tensor.isfinite().all()) for tensor in state)
        kept = trainer.strategy.optimizer_of("actor").state.values()
        return state + [local_tensor(each).clone() for entry in kept for each in entry.values()]


class Warnings(logging.Handler):
    """Collects this package's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("lightning_realloc").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.texts.append(record.getMessage())


def spoil_sample(module: Any, sample_id: int) -> None:
    """Make the actor's loss infinite through one sample of one data-parallel rank."""
    loss_of = module.actor_loss

    def actor_loss(model: Any, batch: Any, totals: Any) -> Any:
        loss = loss_of(model, batch, totals)
        return replace(loss, value=loss.value * (math.inf if sample_id in batch.ids.tolist() else 1.0))

    module.actor_loss = actor_loss


Fitted = tuple[list[bool], list[dict[str, float]], list[str], str]
"""Whether weights changed, the logged metrics, the warnings, and the error."""


def fit(module: Any, plan: Any, world_size: int, data: Any, watch: Watch) -> Fitted:
    """Train, and return this rank's results."""
    record, warnings, told = runs.Record(), Warnings(), ""
    try:
        runs.trainer(ReallocStrategy(plan), world_size, callbacks=[watch, record]).fit(module, data)
    except ReallocError as error:
        told = str(error)
    finally:
        logging.getLogger("lightning_realloc").removeHandler(warnings)
    return watch.moved, record.logged, warnings.texts, told


def spoilt_in_layouts(layouts: Sequence[str], max_grad_norm: float | None) -> list[Fitted]:
    """Put NaN into the gradient of the second iteration of three on rank 1, under each layout."""
    world_size, found = runs.world_size(), []
    for layout in layouts:
        module = runs.sft(train_options=runs.options(max_grad_norm=max_grad_norm))
        found.append(fit(module, calls(actor_train=layout), world_size, Batches(3, responses=True), Watch([1])))
    return found


@pytest.mark.parametrize(("layouts", "max_grad_norm"), [(LAYOUTS, 1.0), (["fsdp2"], None)])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    workers: WorkerPool, layouts: Sequence[str], max_grad_norm: float | None
) -> None:
    ranks = workers.run(spoilt_in_layouts, layouts, max_grad_norm, world_size=2, init_process_group=False)
    for rank, found in enumerate(ranks):
        for moved, logged, texts, told in found:
            assert told == "" and moved == [True, False, True]
            assert [metrics["actor/skipped_steps"] for metrics in logged] == [0.0, 1.0, 0.0]
            assert all(math.isfinite(metrics["actor/loss"]) for metrics in logged)
            if max_grad_norm is not None:
                assert [math.isnan(metrics["actor/grad_norm"]) for metrics in logged] == [False, True, False]
            assert texts == [] if rank else len(texts) == 1
            assert all(
                text.startswith("actor: skipped the optimizer step of iteration 1, mini-batch 1:") for text in texts
            )
            assert all(f"the first bad parameter is {NORM}" in text for text in texts)


def spoilt_sample(name: str, layout: str) -> Fitted:
    """Train on a first batch that has a sample with an infinite loss, in one of two mini-batches."""
    plan = calls(actor_train=layout, **OTHER_CALLS[name])
    module = MAKERS[name](train_options=runs.options(num_minibatches=2))
    spoil_sample(module, 0)
    data = preferences.pairs(2) if name == "dpo" else Batches(2, responses=name == "sft")
    return fit(module, plan, runs.world_size(), data, Watch())


@pytest.mark.parametrize(
    ("name", "layout"),
    matrix([("sft", "fsdp2"), ("dpo", "dp2"), ("grpo", "tp2"), ("ppo", "fsdp2")], ("ppo", "fsdp2")),
)
def test_other_mini_batches_are_trained_on(workers: WorkerPool, name: str, layout: str) -> None:
    ranks = workers.run(spoilt_sample, name, layout, world_size=2, init_process_group=False)
    assert [metrics["actor/skipped_steps"] for metrics in ranks[0][1]] == [1.0, 0.0]
    for moved, logged, _, told in ranks:
        assert told == "" and moved == [True, True]
        assert all(math.isfinite(metrics["actor/grad_norm"]) for metrics in logged)
        assert not math.isfinite(logged[0]["actor/loss"]) and math.isfinite(logged[1]["actor/loss"])
    assert len(ranks[0][2]) == 1 and ranks[1][2] == []


def spoilt_for_long(name: str, plan: Any, spoilt: Sequence[int], limit: int | None) -> Fitted:
    """Train six iterations, with NaN gradients in these."""
    module = MAKERS[name](train_options=runs.options(max_skipped_steps=limit))
    world_size = runs.world_size()
    watch = Watch(spoilt, rank=world_size - 1)
    return fit(module, plan, world_size, Batches(6, responses=name == "sft"), watch)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("sft", calls(actor_train="fsdp2")),
        ("grpo", calls(actor_train="dp1@1", actor_generate="dp1@0", reference_infer="dp1@0")),
    ],
)
def test_too_many_skipped_steps_in_a_row_stop_the_run_on_all_ranks(workers: WorkerPool, name: str, plan: Any) -> None:
    # Two bad steps, a good one, and then three bad ones in a row, which is the limit.
    ranks = workers.run(spoilt_for_long, name, plan, [0, 1, 3, 4, 5], 3, world_size=2, init_process_group=False)
    for *_, told in ranks:
        assert told.startswith("actor: the gradient norm was not finite in 3 optimizer steps in a row")
        assert "iteration 5, mini-batch 1" in told and NORM in told and "max_skipped_steps" in told


def test_a_run_without_a_limit_skips_any_number(workers: WorkerPool) -> None:
    ((moved, *_, told),) = workers.run(
        spoilt_for_long, "sft", "heuristic", [0, 2, 3], None, world_size=1, init_process_group=False
    )
    assert told == "" and moved == [False, True, False, False, True, True]


class ChangePlan(Watch):
    """Trains on both ranks after the second iteration."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Change the plan."""
        super().on_train_batch_end(trainer)
        if trainer.global_step == 2:
            trainer.strategy.set_plan(calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2"))


def spoilt_around_a_change() -> Fitted:
    """Train four iterations with NaN gradients: two on rank 0 only, then two on both ranks."""
    module = runs.grpo(train_options=runs.options(max_skipped_steps=3))
    plan = calls(actor_train="dp1@0", actor_generate="dp2", reference_infer="dp2")
    return fit(module, plan, runs.world_size(), Batches(4), ChangePlan([0, 1, 2, 3], rank=0))


def test_ranks_that_join_a_role_have_the_same_count_as_the_others(workers: WorkerPool) -> None:
    for _, logged, _, told in workers.run(spoilt_around_a_change, world_size=2, init_process_group=False):
        assert told == "" and [metrics["actor/skipped_steps"] for metrics in logged[1:]] == [1.0] * 3


def nan_model(role: str) -> Fitted:
    """Train PPO or GRPO with a critic or reference that computes NaN from the beginning."""
    options = runs.options(max_skipped_steps=2)
    if role == "critic":
        module = runs.ppo(train_options=options)
    else:
        module = runs.grpo(train_options=options, kl=KL(0.1, place="reward"))
    module.configure_model()
    model = getattr(module, role)
    with torch.no_grad():
        (model.score if role == "critic" else model.lm_head).weight.fill_(math.nan)
    return fit(module, "heuristic", 1, Batches(3), Watch())


def test_a_reference_that_computes_nan_ends_the_run_before_a_step(workers: WorkerPool) -> None:
    ((moved, logged, _, told),) = workers.run(nan_model, "reference", world_size=1, init_process_group=False)
    assert moved == logged == []
    assert "ref_logprobs of reference are not finite for sample ids [" in told


def test_trained_weights_that_are_not_finite_stop_the_run_at_once(workers: WorkerPool) -> None:
    ((moved, _, _, told),) = workers.run(nan_model, "critic", world_size=1, init_process_group=False)
    assert moved == []
    assert "the weights of critic are not finite in iteration 0, the first in score.weight" in told
