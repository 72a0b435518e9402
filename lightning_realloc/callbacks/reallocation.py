"""Callback that reallocates weights to each call's layout, and sums up bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from lightning_realloc.callbacks.phase import PhaseCallback, dispatch, realloc_strategy, trainer_callbacks
from lightning_realloc.runtime.transfer.executor import ReallocationReport


@dataclass(slots=True)
class SwitchTotals:
    """Totals of the reallocations before one call, by this rank's clock."""

    count: int = 0
    """Number of reallocations."""
    bytes_moved: int = 0
    """Transferred bytes over all ranks."""
    bytes_minimum: int = 0
    """Minimum transfer over all ranks: the target's bytes minus those that its ranks already held."""
    seconds: float = 0.0
    """Seconds from the first rank's start to the last rank's end."""

    def add(self, report: ReallocationReport) -> None:
        """Add one reallocation."""
        self.count += 1
        self.bytes_moved += report.bytes_moved
        self.bytes_minimum += report.bytes_minimum
        self.seconds += report.seconds

    @property
    def bytes_per_s(self) -> float:
        """Mean throughput; 0 if nothing was moved."""
        return self.bytes_moved / self.seconds if self.seconds else 0.0


class ParameterReallocation(PhaseCallback):
    """Move a role's weights to the layout of each call before the call starts.

    The ``realloc`` strategy adds one itself. Pass ``ParameterReallocation(enabled=False)`` to run every call in its
    role's training layout, as a static baseline.

    Args:
        enabled: Whether to reallocate; False keeps every role in its training layout.
        free_after: Whether to free a replica's memory after its call. This saves memory and costs time, on CPU more
            than the reallocation itself.

    Example:
        >>> from lightning_realloc import ParameterReallocation
        >>> callback = ParameterReallocation(free_after=True)  # Trainer(strategy="realloc", callbacks=[callback])
    """

    def __init__(self, *, enabled: bool = True, free_after: bool = False) -> None:
        self.enabled = enabled
        self.free_after = free_after
        self.switches: dict[str, SwitchTotals] = {}

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> ParameterReallocation:
        """Return the Trainer's last callback of this class; if there is none, insert one before its other callbacks."""
        callbacks = trainer_callbacks(trainer)
        if not any(isinstance(callback, cls) for callback in callbacks):
            callbacks.insert(0, cls())
        return [callback for callback in callbacks if isinstance(callback, cls)][-1]

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Reallocate weights to the replica for ``phase``."""
        if not self.enabled:
            return
        report = realloc_strategy(trainer).pool.realize(phase)
        if report is not None:
            self.switches.setdefault(phase, SwitchTotals()).add(report)
            dispatch(trainer, "on_reallocate", phase, report)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Release the replica."""
        if self.enabled:
            realloc_strategy(trainer).pool.relinquish(phase, free=self.free_after)

    def summary(self) -> Mapping[str, SwitchTotals]:
        """Return the totals per call since the start of the run."""
        return dict(self.switches)
