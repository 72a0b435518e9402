"""Run optimizers, learning-rate schedules, autocast and backward of a training call with Lightning's hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.strategies.checkpoints.optimizer_settings import record_given


class LightningOptimizers:
    """The optimizers of all roles, for training calls."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return int(self._module.trainer.global_step)

    def count_iteration(self) -> None:
        """Count one step, however many optimizers stepped, and advance learning-rate schedules."""
        trainer = self._module.trainer
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        step_schedules(
            trainer.lr_scheduler_configs,
            iteration=self.iteration,
            epoch=trainer.current_epoch + 1,
            is_last_batch=trainer.is_last_batch,
        )

    @property
    def schedules(self) -> list[LRSchedulerConfig]:
        """Learning-rate schedules of all roles."""
        return self._strategy.lr_scheduler_configs

    def forget(self) -> None:
        """Drop optimizers and schedules, whose weights are replaced."""
        self._strategy.optimizers, self._strategy.lr_scheduler_configs = [], []

    def by_role(self) -> dict[str, Optimizer]:
        """Return role -> optimizer, by the name of each optimizer's first parameter group."""
        return {str(optimizer.param_groups[0].get("name")): optimizer for optimizer in self._strategy.optimizers}

    def optimizer_of(self, role: str) -> Optimizer:
        """Return the optimizer whose parameter groups are named after ``role``. Raises ConfigError without one."""
        optimizers = self.by_role()
        if role not in optimizers:
            raise ConfigError(
                f"no optimizer's parameter group is named {role!r}, only {list(optimizers)}; name groups after roles"
            )
        return optimizers[role]

    def forward_context(self, wrapped: bool) -> Any:
        """Return autocast under ``bf16-mixed``, unless FSDP wraps the model: then it gathers bfloat16 weights."""
        plugin = self._strategy.precision_plugin
        is_mixed = str(plugin.precision).endswith("-mixed")
        return plugin.forward_context() if is_mixed and not wrapped else nullcontext()

    def backward_loss(self, loss: Tensor) -> None:
        """Run backward with Lightning's hooks."""
        self._module.manual_backward(loss)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer with Lightning's hooks, without counting an iteration."""
        with naming_missing_state(optimizer, resumed_from=self._module.trainer.ckpt_path):
            self._strategy.optimizer_step(optimizer, lambda: None)


@contextmanager
def naming_missing_state(optimizer: Optimizer, *, resumed_from: object) -> Iterator[None]:
    """Name the checkpoint whose optimizer state lacks an entry. Only a step tells which ones an optimizer needs.

    Raises:
        CheckpointError: instead of the KeyError of such an entry, in a run that was resumed.
    """
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if resumed_from is None or all(key in state for state in optimizer.state.values()):
            raise
        raise CheckpointError(
            f"{resumed_from} lacks {key!r} of the state that {type(optimizer).__name__} keeps for each parameter, so "
            f"training cannot continue from it; resume from another checkpoint, or start anew from its weights, which "
            f"'lightning-realloc export' writes"
        ) from error


def prepare_optimizers(optimizers: Sequence[Optimizer], configs: Sequence[LRSchedulerConfig]) -> None:
    """Record the settings that optimizers are given, and refuse schedules that step by a metric.

    An iteration's metrics exist only after it.

    Raises:
        ConfigError: for such a schedule.
    """
    record_given(optimizers)
    for config in configs:
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"{type(config.scheduler).__name__} steps by a metric, which is not known inside an iteration; return "
                f"another schedule from configure_optimizers(), or step this one in on_validation_epoch_end()"
            )


def step_schedules(configs: Sequence[LRSchedulerConfig], *, iteration: int, epoch: int, is_last_batch: bool) -> None:
    """Step the schedules that are due after an iteration, as Lightning does after an optimizer step.

    Args:
        configs: Schedules, with their interval and frequency.
        iteration: Iterations done, this one included.
        epoch: Epochs done, this one included.
        is_last_batch: Whether this was the epoch's last iteration.
    """
    for config in configs:
        # Suppress torch's warning that the optimizer never stepped: its role may train on other ranks, or later.
        config.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        count = iteration if config.interval == "step" else epoch if is_last_batch else None
        if count is not None and count % config.frequency == 0:
            config.scheduler.step()  # type: ignore[call-arg]
