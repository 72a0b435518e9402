"""Run optimizers, autocast and backward of a training call with Lightning's hooks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.lightning.data_parallel import DataParallelStrategy
from lightning_realloc.strategies.lightning.schedules import step_schedules


class LightningOptimizers:
    """Gives training calls the optimizers of their roles; a `Stepper`.

    Args:
        strategy: The running strategy, which holds the optimizers and Lightning's hooks.
    """

    def __init__(self, strategy: DataParallelStrategy) -> None:
        self._strategy = strategy

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer  # type: ignore[union-attr]

    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return int(self._trainer.global_step)

    def count_iteration(self) -> None:
        """Count one step, however many optimizers stepped in it, and advance learning-rate schedules."""
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        step_schedules(
            trainer.lr_scheduler_configs,
            iteration=self.iteration,
            epoch=trainer.current_epoch + 1,
            is_last_batch=trainer.is_last_batch,
        )

    def by_role(self) -> dict[str, torch.optim.Optimizer]:
        """Return role -> optimizer, by the name of each optimizer's first parameter group."""
        return {str(optimizer.param_groups[0].get("name")): optimizer for optimizer in self._strategy.optimizers}

    def optimizer_of(self, role: str) -> torch.optim.Optimizer:
        """Return the optimizer whose parameter groups are named after ``role``.

        Raises:
            ConfigError: if there is none.
        """
        optimizers = self.by_role()
        if role not in optimizers:
            raise ConfigError(
                f"no optimizer's parameter group is named {role!r}, there are {list(optimizers)}; "
                f"name groups after roles"
            )
        return optimizers[role]

    def forward_context(self, *, wrapped: bool) -> Any:
        """Return autocast under ``bf16-mixed``, unless FSDP wraps the model and gathers bfloat16 weights already."""
        plugin = self._strategy.precision_plugin
        is_mixed = str(plugin.precision).endswith("-mixed")
        return plugin.forward_context() if is_mixed and not wrapped else nullcontext()

    def backward_loss(self, loss: Tensor) -> None:
        """Run backward with Lightning's hooks."""
        self._strategy.lightning_module.manual_backward(loss)  # type: ignore[union-attr]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer with Lightning's hooks. `count_iteration` counts the iteration, once."""
        self._strategy.optimizer_step(optimizer, lambda: None)
