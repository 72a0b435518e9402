"""Keep a role's weights as a moving average of a trained role's.

One step reallocates the trained weights to the layout of the average, and takes a weighted mean there.
"""

from __future__ import annotations

import torch

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.model.choice_biases import copy_biases
from lightning_realloc.runtime.parallel.shards import local_tensors, reshard
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica, prove_biases, sync_biases


class AveragedRoles:
    """Updates the moving averages, and keeps the reallocations that they need.

    Raises:
        PlanError: for an average of a role that is not trained.
    """

    def __init__(self, dataflow: Dataflow, options: PoolOptions) -> None:
        self._options = options
        self._reallocations: dict[str, Reallocation] = {}
        for role, average in options.averages.items():
            if average.average_of not in dataflow.trained_roles:
                raise PlanError(
                    f"role {role!r} is the average of {average.average_of!r}, which is not trained; trained are "
                    f"{', '.join(dataflow.trained_roles) or 'none'}"
                )

    def forget(self) -> None:
        """Drop all reallocations: layouts changed."""
        self._reallocations.clear()

    def take_step(self, average: Replica, trained: Replica, rate: float) -> float:
        """Set the average to ``rate * trained + (1 - rate) * average``; return the seconds of the move.

        Collective over all ranks.

        Source: ReaL, arXiv:2406.14088: a reallocation with ``target = rate * source + (1 - rate) * target``.
        """
        for model in (average.model, trained.model):
            reshard(model)
        if average.role not in self._reallocations:
            self._reallocations[average.role] = self._connect(trained, average)
        reallocation = self._reallocations[average.role]
        report = reallocation.run(trained.version)
        if average.is_inside:
            ours = local_tensors(average.model)
            torch._foreach_lerp_(list(ours.values()), [reallocation.target_tensors[name] for name in ours], rate)
        reallocation.release()
        sync_biases(trained, self._options)
        prove_biases(trained, trained, self._options)
        copy_biases(trained.model, average.model, rate=rate)
        return report.seconds + report.check_s

    def _connect(self, trained: Replica, average: Replica) -> Reallocation:
        """Return the reallocation from the trained role's layout to the average's."""
        if trained.model_layout.model != average.model_layout.model:
            raise PlanError(
                f"role {average.role!r} is the average of {trained.role!r}, whose parameters have other names or "
                f"shapes; build both from the same model"
            )
        return self._options.reallocation(
            trained.model_layout,
            trained.held_tensors(),
            average.model_layout,
            role=trained.role,
            dtype=next(average.model.parameters()).dtype,
        )
