"""When do learning-rate schedules step? Lightning leaves that to whoever optimizes by hand, as an algorithm does."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_realloc.errors import ConfigError


def check_schedules(configs: Sequence[LRSchedulerConfig]) -> None:
    """Refuse a schedule that waits for a metric: an iteration's metrics exist only after it.

    Raises:
        ConfigError: naming the schedule.
    """
    for config in configs:
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"{type(config.scheduler).__name__} steps by a metric, which is not known inside an iteration; return "
                f"another schedule from configure_optimizers(), and step this one in on_validation_epoch_end()"
            )


def step_schedules(configs: Sequence[LRSchedulerConfig], *, iteration: int, epoch: int, is_last_batch: bool) -> None:
    """Step what is due after an iteration, as Lightning does after an optimizer step.

    Args:
        iteration: Iterations done, this one included.
        epoch: Epochs done, this one included.
        is_last_batch: Whether this was the epoch's last iteration.
    """
    for config in configs:
        # A role may be trained on other ranks only, or not yet: no reason to warn that its optimizer never stepped.
        config.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        count = iteration if config.interval == "step" else epoch if is_last_batch else None
        if count is not None and count % config.frequency == 0:
            config.scheduler.step()  # type: ignore[call-arg]
