"""How do a role's weights move towards a trained one's, as a moving average of them does?

A step is a reallocation of the leader's weights to where the follower's lie, and a weighted mean of both there.
"""

from __future__ import annotations

import torch

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.parallel.shards import local_tensors, reshard
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica


class AveragedRoles:
    """Takes followers' steps, and keeps the ways of the weights between them.

    Raises:
        PlanError: for a role that follows one which is not trained.
    """

    def __init__(self, dataflow: Dataflow, options: PoolOptions) -> None:
        self._options = options
        self._ways: dict[str, Reallocation] = {}
        for role, following in options.followers.items():
            if following.role not in dataflow.trained_roles:
                raise PlanError(
                    f"role {role!r} follows {following.role!r}, which is not trained; trained are "
                    f"{', '.join(dataflow.trained_roles) or 'none'}"
                )

    def forget(self) -> None:
        """Note that weights lie elsewhere from now on."""
        self._ways.clear()

    def take_step(self, follower: Replica, leader: Replica, rate: float) -> float:
        """Set a follower's weights to ``rate * leader + (1 - rate) * follower``; return the seconds of the move.

        Collective over all ranks.

        Source: ReaL, arXiv:2406.14088: a reallocation with ``target = rate * source + (1 - rate) * target``.
        """
        for model in (follower.model, leader.model):
            reshard(model)
        if follower.role not in self._ways:
            self._ways[follower.role] = self._way(leader, follower)
        way = self._ways[follower.role]
        seconds = way.run().seconds
        if self._options.rank in follower.layout:
            ours = local_tensors(follower.model)
            torch._foreach_lerp_(list(ours.values()), [way.target_tensors[name] for name in ours], rate)
        way.release()
        return seconds

    def _way(self, leader: Replica, follower: Replica) -> Reallocation:
        """Return the way of the leader's weights to where the follower's lie."""
        if leader.model_layout.model != follower.model_layout.model:
            raise PlanError(
                f"role {follower.role!r} follows {leader.role!r}, whose parameters have other names or shapes; build "
                f"both from the same model"
            )
        options = self._options
        return Reallocation(
            leader.model_layout, local_tensors(leader.model) if options.rank in leader.layout else {},
            follower.model_layout, rank=options.rank, world_size=options.world_size,
            dtype=next(follower.model.parameters()).dtype, device=options.device, cluster=options.cluster,
            transport=options.transport,
        )  # fmt: skip
