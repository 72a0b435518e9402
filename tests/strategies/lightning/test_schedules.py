"""Learning-rate schedules step at their configured interval and frequency."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.lightning.optimizer_hooks import prepare_optimizers, step_schedules
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool


def halving() -> LRScheduler:
    """Return a schedule that halves the rate, which starts at 1, at every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    return schedule


def rates(config: LRSchedulerConfig) -> list[float]:
    """Return the rate after each of six iterations, three to an epoch."""
    found = []
    for iteration in range(1, 7):
        epoch = 1 + (iteration - 1) // 3
        step_schedules([config], iteration=iteration, epoch=epoch, is_last_batch=iteration % 3 == 0)
        found.append(config.scheduler.get_last_lr()[0])
    return found


def test_schedules_step_at_their_interval_and_frequency() -> None:
    assert rates(LRSchedulerConfig(halving(), interval="step")) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64]
    assert rates(LRSchedulerConfig(halving(), interval="step", frequency=2)) == [1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8]
    assert rates(LRSchedulerConfig(halving())) == [1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 4]
    assert rates(LRSchedulerConfig(halving(), frequency=2)) == [1, 1, 1, 1, 1, 1 / 2]


def test_a_schedule_that_waits_for_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = LRSchedulerConfig(ReduceLROnPlateau(optimizer), reduce_on_plateau=True, monitor="val/loss")
    with pytest.raises(ConfigError, match="ReduceLROnPlateau steps by a metric, which is not known inside"):
        prepare_optimizers([], [plateau])
    with pytest.raises(ConfigError, match="ReduceLROnPlateau steps by a metric"):
        prepare_optimizers(
            [], [LRSchedulerConfig(ReduceLROnPlateau(optimizer))]
        )  # from lr_scheduler=, without an interval
    prepare_optimizers([], [LRSchedulerConfig(halving())])


class Epochal(SFT):
    """An algorithm with its own optimizers, and Lightning's default interval."""

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
        """Halve the rate every epoch."""
        optimizer = torch.optim.SGD([{"params": list(self.actor.parameters()), "name": "actor"}], lr=1.0)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def fit_two_epochs() -> float:
    """Return the rate after two epochs of three iterations."""
    trainer = runs.trainer("realloc", 1, max_epochs=2)
    trainer.fit(Epochal(tiny_model("llama"), tokenizer=byte_tokenizer()), Batches(3, responses=True))
    rate: float = trainer.optimizers[0].param_groups[0]["lr"]
    return rate


def test_a_users_own_schedule_steps_with_the_epochs(workers: WorkerPool) -> None:
    assert workers.run(fit_two_epochs, world_size=1, init_process_group=False) == [0.25]
