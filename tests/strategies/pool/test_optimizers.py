"""Optimizers with several groups, or different ones per role, train the same in every layout, moved and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_realloc.algorithms.base.optimizers import RoleOptimizer
from lightning_realloc.strategies import ReallocStrategy
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.pool.test_set_plan import Move
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

# With the default eps the last bit of a tiny gradient decides the step.
DECAYING = {"optimizer": partial(AdamW, lr=1e-2, eps=1e-4), "weight_decay": 5.0, "no_decay": ("norms", "embeddings")}


def run_decaying(plans: list[Any], save: Path | None) -> list[Outcome]:
    """Train three iterations under each plan, a tuple of every iteration's layouts."""
    found, world_size = [], runs.world_size()
    for layouts in plans:
        first, *later = [calls(actor_train=layout) for layout in layouts] or ["heuristic"]
        strategy, record = ReallocStrategy(first, overlap="calls"), runs.Record()
        trainer = runs.trainer(strategy, world_size, callbacks=[record, Move(dict(enumerate(later, start=1)))])
        trainer.fit(runs.sft(actor=tiny_model("llama", attention_bias=True), **DECAYING), Batches(3, responses=True))
        found.append(Outcome(record.logged, record.steps, strategy.full_weights("actor")))
        if later:
            trainer.save_checkpoint(save)
    return found


def test_weight_decay_groups_apply_in_every_layout_and_after_plan_changes(workers: WorkerPool, tmp_path: Path) -> None:
    plans = [("fsdp2",), ("fsdp2", "tp2", "pp2")]
    (alone,) = workers.run(run_decaying, [()], None, world_size=1, init_process_group=False, deadline_s=60.0)
    together = workers.run(
        run_decaying, plans, tmp_path / "run.ckpt", world_size=2, init_process_group=False, deadline_s=120.0
    )[0]
    for outcome in together:
        losses, expected = ([entry["actor/loss"] for entry in run.logged] for run in (outcome, alone[0]))
        assert losses == pytest.approx(expected, abs=1e-5)
        assert runs.largest_difference(outcome.weights, alone[0].weights) <= 1e-5
    # Each of three steps decays by a twentieth; Adam's own steps are at most 0.01.
    before, after = tiny_model("llama", attention_bias=True).state_dict(), alone[0].weights
    for name, kept in (("lm_head.weight", 0.95**3), ("model.embed_tokens.weight", 1.0)):
        assert float((after[name] - before[name] * kept).abs().max()) < 0.031
        assert float((after[name] - before[name] * (1.95 - kept)).abs().max()) > 0.05 * float(before[name].abs().max())
    (settings,) = torch.load(tmp_path / "run.ckpt" / "meta.pt", weights_only=False)["optimizer_states"]
    assert [group["weight_decay"] for group in settings["param_groups"]] == [5.0, 0.0]
    assert [group["name"] for group in settings["param_groups"]] == ["actor", "actor/1"]


class Rates(Callback):
    """Records the learning rate of every role's groups after each iteration."""

    def __init__(self) -> None:
        self.rates: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Read the learning rates."""
        groups = [group for optimizer in trainer.strategy.optimizers for group in optimizer.param_groups]
        self.rates.append({group["name"]: group["lr"] for group in groups})


def run_apart() -> list[dict[str, float]]:
    """Train PPO with a rate and a schedule only for the critic; return the rates in every iteration."""
    critic = RoleOptimizer(learning_rate=0.5, lr_scheduler=partial(StepLR, step_size=1, gamma=0.5))
    module, rates = runs.ppo(optimizers={"critic": critic}, weight_decay=0.1, learning_rate=1e-3), Rates()
    runs.trainer(ReallocStrategy("heuristic"), 1, callbacks=[rates]).fit(module, Batches(3))
    return rates.rates


def test_a_schedule_of_the_critic_changes_only_its_rate(workers: WorkerPool) -> None:
    (rates,) = workers.run(run_apart, world_size=1, init_process_group=False, deadline_s=60.0)
    actor = {"actor": 1e-3, "actor/1": 1e-3}
    assert rates == [{**actor, "critic": rate, "critic/1": rate} for rate in (0.5, 0.25, 0.125)]
