"""Lightning's side of a training call: a role's optimizer, autocast, the hooks around backward and steps.

What is done between them is ``trainer_step``'s, which knows of Lightning only what `Stepper` says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.lightning.checkpoint_hooks import CheckpointStrategy
from lightning_realloc.strategies.lightning.schedules import step_schedules


class SteppingStrategy(CheckpointStrategy):
    """Trains roles by optimizers of Lightning's; a `Stepper`."""

    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return int(self.lightning_module.trainer.global_step)  # type: ignore[union-attr]

    def count_iteration(self) -> None:
        """Count one step, however many optimizers stepped in it, and advance learning-rate schedules."""
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        step_schedules(
            trainer.lr_scheduler_configs, iteration=self.iteration, epoch=trainer.current_epoch + 1,
            is_last_batch=trainer.is_last_batch,
        )  # fmt: skip

    def optimizer_of(self, role: str) -> torch.optim.Optimizer:
        """Return the optimizer whose parameter groups are named after ``role``."""
        for optimizer in self.optimizers:
            if optimizer.param_groups[0].get("name") == role:
                return optimizer
        names = [str(optimizer.param_groups[0].get("name")) for optimizer in self.optimizers]
        raise ConfigError(
            f"no optimizer's parameter group is named {role!r}, there are {names}; name groups after roles"
        )

    def forward_context(self, *, wrapped: bool) -> Any:
        """Autocast under ``bf16-mixed``, unless FSDP wraps the model and gathers its weights in bfloat16 already."""
        is_mixed = str(self.precision_plugin.precision).endswith("-mixed")
        return self.precision_plugin.forward_context() if is_mixed and not wrapped else nullcontext()

    def backward_loss(self, loss: Tensor) -> None:
        """Run backward with Lightning's hooks."""
        self.lightning_module.manual_backward(loss)  # type: ignore[union-attr]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer with Lightning's hooks; the iteration is counted once, in ``run_iteration``."""
        self.optimizer_step(optimizer, lambda: None)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step, and note that copies of the weights it changed are stale; a hand-written step comes here too."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.dataflow is not None:
            named = {str(group.get("name")).partition("/")[0] for group in optimizer.param_groups}  # actor, actor/1
            trained = self.pool.dataflow.trained_roles
            for role in named if named.issubset(trained) else trained:
                self.pool.weights_trained(role)
        return result
