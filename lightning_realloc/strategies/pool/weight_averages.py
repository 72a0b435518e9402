"""Exponential moving averages of trained weights, which lie in the optimizer's state of each parameter.

They are divided, moved by plan changes, offloaded, saved and resumed with that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX
from lightning_realloc.runtime.parallel.shards import local_tensor, reshard
from lightning_realloc.strategies.pool.model_pool import ModelPool

AVERAGE = "ema"
"""Key of the average in an optimizer's state of a parameter."""


class AveragingPolicy:
    """Roles whose trained weights are averaged; the callback ``EMA`` is one."""

    roles: tuple[str, ...] | None
    """Roles to average; None: all trained ones."""
    validate: bool
    """Whether averages are evaluated instead of the weights."""


@dataclass(frozen=True, slots=True)
class WeightAverages:
    """The averages of a running algorithm. All methods are collective over all ranks."""

    pool: ModelPool
    """Models of all roles."""
    optimizer_of: Callable[[str], Optimizer]
    """Trained role -> its optimizer."""
    bring_back: Callable[[], None]
    """Fetches everything that the plan offloads."""

    def update(self, role: str, decay: float, *, may_begin: bool) -> None:
        """Update the averages of a role's weights; see `update_averages`."""
        self.bring_back()
        home, optimizer = self.pool.home(role), self.optimizer_of(role)
        if home.is_inside:
            reshard(home.model)
            update_averages(optimizer, decay, may_begin=may_begin)
        if {role, role + OPTIMIZER_SUFFIX} & set(self.pool.plan.offload):
            self.pool.weights_trained(role)  # the offloaded copy is outdated

    @contextmanager
    def in_place_of_weights(self, role: str) -> Iterator[bool]:
        """Context manager in which a role's model holds the averages that exist.

        Yields whether this rank has any. Meanwhile, the weights are kept in host memory.
        """
        kept: list[tuple[nn.Parameter, Tensor]] = []
        self.bring_back()
        reshard(self.pool.home(role).model)
        if self.pool.home(role).is_inside:
            optimizer = self.optimizer_of(role)
            for parameter in _parameters(optimizer):
                average = optimizer.state.get(parameter, {}).get(AVERAGE)
                if average is not None:
                    there = local_tensor(parameter)
                    kept.append((parameter, there.to("cpu", copy=True)))
                    there.copy_(local_tensor(average))
        self.pool.weights_replaced(role)
        try:
            yield bool(kept)
        finally:
            self.bring_back()
            reshard(self.pool.home(role).model)
            for parameter, before in kept:
                local_tensor(parameter).copy_(before)
            self.pool.weights_replaced(role)


def update_averages(optimizer: Optimizer, decay: float, *, may_begin: bool) -> None:
    """Update the averages; if there are none and ``may_begin``, start them from the weights.

    Weights that never had a gradient have no optimizer state, and are skipped if the optimizer keeps state for others.
    """
    keeps_state = any(set(state) - {AVERAGE} for state in optimizer.state.values())
    for parameter in _parameters(optimizer):
        known = optimizer.state.get(parameter, {})
        if AVERAGE in known:
            local_tensor(known[AVERAGE]).lerp_(local_tensor(parameter).float(), 1.0 - decay)
        elif may_begin and (known or not keeps_state):
            optimizer.state[parameter][AVERAGE] = parameter.detach().to(torch.float32, copy=True)


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
