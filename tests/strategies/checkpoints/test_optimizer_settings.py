"""Settings of optimizers after a resume: the ones that are given again go on, new ones apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR, StepLR

from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.optimizer_settings import (
    follow_given_rates,
    record_given,
    restore_settings,
    stored_settings,
)
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import BATCH_SIZE, table
from tests.workers import WorkerPool


def _adam(lr: float, **settings: Any) -> Optimizer:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr, **settings)
    optimizer.param_groups[0]["name"] = "actor"
    return optimizer


def _step(optimizer: Optimizer, schedule: Any, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "chained": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "closed form": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "in parts": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), LambdaLR(optimizer, lambda step: 0.9**step)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_new_rate_scales_the_schedule_from_the_resume_on(name: str, factor: float) -> None:
    whole = _adam(0.8)
    expected = _step(whole, SCHEDULES[name](whole), 7)

    first = _adam(0.8)
    schedule = SCHEDULES[name](first)
    record_given([first])
    assert _step(first, schedule, 3) == expected[:3]
    meta = {"optimizer_states": [stored_settings(first)], "lr_schedulers": [schedule.state_dict()]}

    resumed = _adam(0.8 * factor)
    schedule = SCHEDULES[name](resumed)
    record_given([resumed])
    restore_settings(resumed, meta["optimizer_states"][0]["param_groups"], "actor")
    follow_given_rates(meta, [resumed])
    schedule.load_state_dict(meta["lr_schedulers"][0])
    rates = _step(resumed, schedule, 4)
    assert rates == pytest.approx([rate * factor for rate in expected[3:]], rel=1e-12)
    if factor == 1.0:
        assert rates == expected[3:]


def test_only_settings_that_are_given_anew_apply() -> None:
    first = _adam(1e-3, eps=1e-8, weight_decay=0.1)
    record_given([first])
    group = first.param_groups[0]
    group["lr"], group["betas"] = 7e-4, (0.5, 0.6)  # as a callback may

    resumed = _adam(1e-3, eps=1e-6, weight_decay=0.1)
    record_given([resumed])
    restore_settings(resumed, stored_settings(first)["param_groups"], "actor")
    found = resumed.param_groups[0]
    assert (found["lr"], found["betas"], found["eps"], found["weight_decay"]) == (7e-4, (0.5, 0.6), 1e-6, 0.1)

    again = _adam(1e-3, eps=1e-6, weight_decay=0.1)
    record_given([again])
    restore_settings(again, stored_settings(resumed)["param_groups"], "actor")
    assert stored_settings(again) == stored_settings(resumed)


def test_a_rate_of_zero_and_checkpoints_of_earlier_versions() -> None:
    for before, recorded, expected in ((0.0, True, 0.3), (0.5, False, 0.5)):
        first, resumed = _adam(before), _adam(0.3)
        record_given([first, resumed] if recorded else [resumed])
        restore_settings(resumed, stored_settings(first)["param_groups"], "actor")
        assert resumed.param_groups[0]["lr"] == expected


# ---- runs
class _Lower(Callback):
    """Halves the rate after the second iteration."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] /= 2


def _train(
    lr: float, max_steps: int, folder: Path, *, resume: bool = False, lowers: bool = False, precision: Any = "32-true"
) -> list[float]:
    """Train with a decaying rate, save, and return the losses."""
    record = runs.Record()
    trainer = runs.trainer(
        ReallocStrategy(runs.calls(actor_train="fsdp2")), 2, max_steps=max_steps, max_epochs=-1, precision=precision,
        callbacks=[record, *([_Lower()] if lowers else [])],
    )  # fmt: skip
    module = runs.sft(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-4),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
    )
    loader = BatchLoader(table(responses=True), batch_size=BATCH_SIZE, seed=5)
    trainer.fit(module, loader, ckpt_path=folder if resume else None)
    if not resume:
        trainer.save_checkpoint(folder)
    return [float(logged["actor/loss"]) for logged in record.logged]


def _resume_with_half_the_rate(folder: Path) -> tuple[list[float], list[float]]:
    changed = _train(1e-2, 4, folder / "changed", lowers=True)
    _train(1e-2, 2, folder / "half")
    return changed[2:], _train(5e-3, 4, folder / "half", resume=True)


def test_a_run_resumes_with_the_rate_that_is_given(workers: WorkerPool, tmp_path: Path) -> None:
    for changed, resumed in workers.run(_resume_with_half_the_rate, tmp_path, world_size=2, init_process_group=False):
        assert len(resumed) == 2 and resumed == changed


def _resume_in_another_precision(folder: Path) -> tuple[list[float], list[list[float]]]:
    """Return the losses of a whole run, and those of runs that resume in the other precision."""
    resumed = []
    for first, then in (("32-true", "bf16-true"), ("bf16-true", "32-true")):
        _train(1e-2, 2, folder / first, precision=first)
        resumed.append(_train(1e-2, 4, folder / first, resume=True, precision=then))
    return _train(1e-2, 4, folder / "whole"), resumed


@pytest.mark.exhaustive
def test_a_run_resumes_in_another_precision(workers: WorkerPool, tmp_path: Path) -> None:
    whole, resumed = workers.run(_resume_in_another_precision, tmp_path, world_size=2, init_process_group=False)[0]
    for losses in resumed:
        assert len(losses) == 2 and all(map(math.isfinite, losses))
        assert losses == pytest.approx(whole[2:], rel=0.05)
