"""Phase hooks: additional callback hooks around every call of a dataflow, and their dispatch.

Lightning's dispatcher cannot be used. It requires every callback to define a hook, and it renames the running hook,
which would forbid ``self.log``. This dispatcher calls only objects that define the hook, and keeps the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler

from lightning_realloc.runtime.transfer.executor import ReallocationReport

if TYPE_CHECKING:
    from lightning_realloc.strategies.realloc import ReallocStrategy


class PhaseCallback(Callback):
    """Callback with hooks for every call of an iteration, a phase; override the hooks you need.

    The module's ``self.log`` works in all of them, except in prediction, where Lightning logs nothing. Any other
    callback may define the same methods.

    Example:
        >>> from lightning_realloc import PhaseCallback
        >>> class PrintPhases(PhaseCallback):
        ...     def on_phase_start(self, trainer, pl_module, phase):
        ...         print(phase)  # "actor.generate", "reward.infer", "actor.train", ...
    """

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank before the call ``phase``, such as ``"actor.generate"``, also if it takes no part."""

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank after the call ``phase``."""

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Called on every rank after weights were moved for the call ``phase``."""


def realloc_strategy(trainer: Trainer) -> ReallocStrategy:
    """Return the Trainer's strategy, which callbacks of this package require to be ``"realloc"``."""
    return cast("ReallocStrategy", trainer.strategy)


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of callbacks, which Lightning sets without declaring it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def planned_iterations(trainer: Trainer) -> int | None:
    """Return the number of iterations of a whole run, by its steps and epochs; None if the Trainer sets no end."""
    steps = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if epochs is not None and epochs >= 0 and batches != float("inf"):
        steps.append(int(epochs * batches))
    return min(steps, default=None)


def dispatch(trainer: Trainer, hook: str, *args: Any) -> None:
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
