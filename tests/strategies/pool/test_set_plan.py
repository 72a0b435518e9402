"""Changing the plan during training moves weights and optimizer state, and changes no result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import SGD, AdamW

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.strategies import ReallocStrategy
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.strategies.test_realloc import on_ranks
from tests.workers import WorkerPool

MOVES = {
    1: calls(actor_train="tp2@2-3", actor_infer="dp2@0-1"), 2: calls(actor_train="dp2.fsdp2"),
    3: calls(actor_train="fsdp2.tp2@0,2,1,3"), 4: calls(actor_train="pp2.fsdp2@0,2,1,3"),
    5: calls(actor_train="pp2@2,0", actor_infer="dp2@1,3"), 6: calls(actor_train="dp1@1", actor_infer="dp4"),
}  # fmt: skip
GRPO_MOVES = {
    1: calls(actor_train="fsdp2@0-1", actor_generate="dp2@2-3", reference_infer="tp2@2-3"),
    2: calls(actor_train="dp2.tp2", actor_generate="dp4", reference_infer="dp1@3"),
    3: calls(actor_train="dp4", actor_generate="dp4", reference_infer="dp1@3"),  # generates where the home lies now
    4: calls(actor_train="dp2.tp2", actor_generate="tp4", reference_infer="fsdp4"),
}


class Move(Callback):
    """Changes the plan after given iterations."""

    def __init__(self, plans: Mapping[int, Any]) -> None:
        self.plans = plans
        self.parameters: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Set the plan of this iteration."""
        if trainer.global_step in self.plans:
            strategy: Any = trainer.strategy
            strategy.set_plan(self.plans[trainer.global_step])
            expected = ExecutionPlan.from_mapping(self.plans[trainer.global_step]).completed(strategy.dataflow)
            assert strategy.plan == expected


def run_sft(moves: Sequence[Mapping[int, Any]], settings: dict[str, Any], batches: Batches) -> list[Outcome]:
    """Train tied weights with AdamW, a schedule, and changing plans; without changes under one plan for all ranks."""
    optimizer = partial(AdamW, lr=1e-2, eps=1e-4)  # with the default eps the last bit of a tiny gradient decides
    return [
        runs.train(
            runs.sft(actor=tiny_model("qwen2"), optimizer=optimizer, **settings),
            # With other settings, metrics of only some ranks are logged an iteration late.
            ReallocStrategy(calls(actor_train="fsdp4") if plans else "static", overlap="calls"),
            runs.world_size(),
            batches,
            callbacks=[Move(plans)],
        )
        for plans in moves
    ]


def run_grpo(moves: Sequence[Mapping[int, Any]], settings: dict[str, Any], batches: Batches) -> list[Outcome]:
    """Train with momentum and changing plans; without changes under one plan for all ranks."""
    plan = calls(actor_train="fsdp4", actor_generate="dp4", reference_infer="tp2@0-1")
    return [
        runs.train(
            runs.grpo(optimizer=partial(SGD, lr=1.0, momentum=0.9), **settings), plan if plans else "static",
            runs.world_size(), batches, callbacks=[Move(plans)],
        )
        for plans in moves
    ]  # fmt: skip


@pytest.mark.exhaustive  # below, and Adam: test_optimizers.py
def test_weights_and_optimizer_state_move_and_training_continues(workers: WorkerPool) -> None:
    (moved,) = on_ranks(workers, run_sft, [MOVES], {}, Batches(7, responses=True), 4)
    (stayed,) = on_ranks(workers, run_sft, [{}], {}, Batches(7, responses=True), 1)
    assert moved.steps == stayed.steps == [1, 2, 3, 4, 5, 6, 7]
    for ours, theirs in zip(moved.logged, stayed.logged, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-6)
    assert (
        runs.largest_difference(moved.weights, stayed.weights) <= 3e-6
    )  # seven steps of 1e-2, each rounded differently


def test_every_role_may_move_between_iterations_of_grpo(workers: WorkerPool) -> None:
    (moved,) = on_ranks(workers, run_grpo, [GRPO_MOVES], {}, Batches(5), 4)
    (stayed,) = on_ranks(workers, run_grpo, [{}], {}, Batches(5), 1)
    assert moved.tokens == stayed.tokens
    assert moved.rewards == stayed.rewards
    assert runs.largest_difference(moved.weights, stayed.weights) <= 1e-5


class Losses(DummyLogger):
    """Keeps every loss that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the loss."""
        self.logged += [metrics["actor/loss"]] if "actor/loss" in metrics else []


class Stop(Callback):
    """Ends the run after its fifth iteration."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Stop there."""
        trainer.should_stop = trainer.global_step == 5


def logged_losses(plan: Any, moves: Mapping[int, Any], stops: bool) -> tuple[list[float], float]:
    """Return the losses of two epochs of four iterations as a logger gets them, and the last one for callbacks."""
    losses = Losses()
    callbacks: list[Callback] = [Move(moves), *([Stop()] if stops else [])]
    outcome = runs.train(
        runs.sft(), ReallocStrategy(plan), 2, Batches(4, responses=True), callbacks=callbacks, logger=losses,
        log_every_n_steps=1, max_epochs=2,
    )  # fmt: skip
    return losses.logged, outcome.logged[-1]["actor/loss"]


@pytest.mark.exhaustive  # losses under changing plans: above
def test_every_iteration_logs_its_loss_once_whatever_plans_follow(workers: WorkerPool) -> None:
    on_all = calls(actor_train="dp2")
    on_first, on_second = (calls(actor_train=f"dp1@{rank}", actor_infer=f"dp1@{1 - rank}") for rank in (0, 1))
    run = partial(workers.run, logged_losses, world_size=2, init_process_group=False)
    expected, last = run(on_all, {}, False)[0]
    assert len(set(expected)) == 8 and last == expected[-1]
    # On one rank a loss appears an iteration later; plans change to, from and between such layouts.
    for logged, latest in run(on_all, {1: on_first, 2: on_second, 5: on_all, 6: on_first}, False):
        assert logged == pytest.approx(expected, abs=1e-5)
        assert latest == pytest.approx(last, abs=1e-5)
    # A run that ends within an epoch logs the last loss, too.
    assert run(on_first, {}, True)[0][0] == pytest.approx(expected[:5], abs=1e-5)


def _ask_for(plan: Any, *, engine: str | None = None) -> tuple[str, str]:
    class Ask(Callback):
        message = ""

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            try:
                trainer.strategy.set_plan(plan)  # type: ignore[attr-defined]
            except PlanError as error:
                self.message = str(error)

    ask = Ask()
    module = runs.sft() if engine is None else runs.grpo(engine=engine, kl_coef=0.0)
    home = calls(actor_train="fsdp2") if engine is None else calls(actor_train="fsdp2", actor_generate="dp2")
    outcome = runs.train(module, home, 2, Batches(2, responses=engine is None), callbacks=[ask])
    return ask.message, str(outcome.steps)


def _ask_hf_for_stages() -> tuple[str, str]:
    return _ask_for(calls(actor_train="fsdp2", actor_generate="pp2"), engine="hf")


def _ask_too_early() -> str:
    class Ask(PhaseCallback):
        def on_phase_start(self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str) -> None:
            trainer.strategy.set_plan("static")  # type: ignore[attr-defined]

    with pytest.raises(ConfigError) as caught:
        runs.train(runs.sft(), calls(actor_train="dp2"), 2, Batches(1, responses=True), callbacks=[Ask()])
    return str(caught.value)


def test_the_plan_cannot_change_during_a_call(workers: WorkerPool) -> None:
    answers = workers.run(_ask_too_early, world_size=2, init_process_group=False, deadline_s=60.0)
    assert answers == [answers[0]] * 2
    assert "calls are running; use it between iterations" in answers[0]


def test_an_invalid_plan_is_refused_and_the_old_one_is_kept(workers: WorkerPool) -> None:
    answers = workers.run(_ask_for, calls(actor_train="fsdp4"), world_size=2, init_process_group=False)
    assert answers == [answers[0]] * 2
    assert "this run has 2 ranks" in answers[0][0] and answers[0][1] == "[1, 2]"


def test_a_plan_that_an_option_of_generation_cannot_follow_is_refused_as_a_plan(workers: WorkerPool) -> None:
    answers = workers.run(_ask_hf_for_stages, world_size=2, init_process_group=False)
    assert answers == [answers[0]] * 2
    assert "engine='hf' needs all layers on a rank" in answers[0][0] and answers[0][1] == "[1, 2]"
