"""Phase hooks: additional callback hooks around every call of a dataflow."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.runtime.transfer.executor import ReallocationReport


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
