"""The hooks that calls of a dataflow add to Lightning's own, and how they are called.

Lightning's dispatcher cannot be used: it requires every callback to define a hook, and it renames the running hook,
which would forbid ``self.log``. Here only objects that define the hook are called, and the name is left alone.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.runtime.transfer.executor import ReallocationReport


class PhaseCallback(Callback):
    """A callback that also sees every call of an iteration as a phase. Override what you need.

    ``self.log`` of the module may be used in all of them but while predicting, where Lightning logs nothing. Any other
    callback may define the same methods.
    """

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank before the call ``phase``, e.g. ``"actor.generate"``, whether or not it takes part."""

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank after the call ``phase``."""

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Called on every rank after weights were moved for the call ``phase``."""


def dispatch(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call ``hook(trainer, module, *args)`` on every callback that has it, then ``hook(*args)`` on the module."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        method = getattr(callback, hook, None)
        if callable(method):
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):  # type: ignore[attr-defined]
                method(trainer, module, *args)
    method = getattr(module, hook, None)
    if callable(method):
        with trainer.profiler.profile(f"[LightningModule]{type(module).__name__}.{hook}"):  # type: ignore[attr-defined]
            method(*args)
