"""Announce calls to callbacks, with the weights in the layout of each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer

from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.trainers import dispatch


class ReallocationPolicy:
    """Where a role's weights are during and after a call; the callback ``ParameterReallocation`` is one."""

    enabled: bool = True
    """Whether weights move to the layout of each call; False keeps every role in its training layout."""
    free_after: bool = False
    """Whether a replica's memory is freed after its call."""


@contextmanager
def announced(call: str, trainer: Trainer, pool: ModelPool, policy: ReallocationPolicy) -> Iterator[None]:
    """Surround a call with its hooks. Weights move to its layout before them, and are released after it."""
    report = pool.realize(call) if policy.enabled else None
    if report is not None:
        dispatch(trainer, "on_reallocate", call, report)
    dispatch(trainer, "on_phase_start", call)
    yield
    if policy.enabled:
        pool.relinquish(call, free=policy.free_after)
    dispatch(trainer, "on_phase_end", call)
