"""Announce calls to callbacks, with the weights in the layout of each call.

Lightning's dispatcher cannot be used. It requires every callback to define a hook, and it renames the running hook,
which would forbid ``self.log``. This dispatcher calls only objects that define the hook, and keeps the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.trainers import trainer_callbacks


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


def dispatch(trainer: Trainer, hook: str, *args: object) -> None:
    """Call ``hook(trainer, module, *args)`` on every callback that has it, then ``hook(*args)`` on the module."""
    module = trainer.lightning_module
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    for callback in trainer_callbacks(trainer):
        method = getattr(callback, hook, None)
        if callable(method):
            with profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                method(trainer, module, *args)
    method = getattr(module, hook, None)
    if callable(method):
        with profiler.profile(f"[LightningModule]{type(module).__name__}.{hook}"):
            method(*args)
