"""Log every iteration's metrics once, in steps that have those of several iterations and in steps without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_realloc.strategies.exchange.iteration_report import IterationResult
from lightning_realloc.trainers import forget_metrics


def log_results(module: LightningModule, results: Sequence[IterationResult], trained_roles: Set[str]) -> None:
    """Log the metrics of all batches that one step trained on. Those of the last one are the step's for callbacks.

    Lightning keeps one value of a name in a step. So earlier values go to the loggers at once, and those of training
    calls without a new value are forgotten.
    """
    found = [metrics for result in results for metrics in (result.overdue, result.metrics) if metrics]
    if not found:
        return
    for earlier in found[:-1]:
        log_now(module.trainer, earlier)
    latest = dict(found[-1])
    forget_metrics(module.trainer, latest, trained_roles)
    module.log_dict(latest, batch_size=1)


def log_now(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Log metrics of an earlier iteration next to those of this step, in the steps that the Trainer logs."""
    if trainer._logger_connector.should_update_logs:
        trainer._logger_connector.log_metrics(dict(metrics))
