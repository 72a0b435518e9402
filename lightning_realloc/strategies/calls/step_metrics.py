"""Log every iteration's metrics once, in steps that have those of several iterations and in steps without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_realloc.strategies.exchange.iteration_report import IterationResult


def log_results(module: LightningModule, results: Sequence[IterationResult], trained_roles: Set[str]) -> None:
    """Log the metrics of all batches that one step trained on. Those of the last one are the step's for callbacks.

    Lightning keeps one value of a name in a step, and repeats it in later steps of the epoch that log none. So earlier
    values go to the loggers at once, and those of training calls without a new value are forgotten.
    """
    found = [metrics for result in results for metrics in (result.overdue, result.metrics) if metrics]
    if not found:
        return
    for earlier in found[:-1]:
        log_now(module.trainer, earlier)
    latest = dict(found[-1])
    logged = module.trainer._results
    for kept in logged.values() if logged is not None else ():
        is_of_training = kept.meta.name.partition("/")[0] in trained_roles and not kept.meta.on_epoch
        if is_of_training and kept.meta.name not in latest:
            kept.reset()
    module.log_dict(latest, batch_size=1)


def log_now(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Log metrics of an earlier iteration next to those of this step, in the steps that the Trainer logs."""
    if trainer._logger_connector.should_update_logs:
        trainer._logger_connector.log_metrics(dict(metrics))
