"""Makes the layout of the coming call real, and keeps account of what that moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.callbacks.phase import PhaseCallback, dispatch
from lightning_realloc.runtime.transfer.executor import ReallocationReport


@dataclass(slots=True)
class SwitchTotals:
    """What all reallocations before one call added up to, on this rank's clock."""

    count: int = 0
    """How often weights were moved."""
    bytes_moved: int = 0
    """Over all ranks, as carried."""
    bytes_minimum: int = 0
    """Over all ranks: what the target needs less what its ranks already held."""
    seconds: float = 0.0
    """From the first rank's readiness to the last one's end."""

    def add(self, report: ReallocationReport) -> None:
        """Count one more reallocation."""
        self.count += 1
        self.bytes_moved += report.bytes_moved
        self.bytes_minimum += report.bytes_minimum
        self.seconds += report.seconds

    @property
    def bytes_per_s(self) -> float:
        """Mean throughput; 0 where nothing was moved."""
        return self.bytes_moved / self.seconds if self.seconds else 0.0


class ParameterReallocation(PhaseCallback):
    """Moves a role's weights into the layout of each call before it starts.

    The ``realloc`` strategy adds one by itself. Pass ``ParameterReallocation(enabled=False)`` to run every call in the
    role's training layout instead: how a static layout is measured.

    Args:
        enabled: False leaves every role where it is.
        free_after: Give a replica's storage back when its call ends. Saves memory, costs time: on CPU more than
            the reallocation itself.
    """

    def __init__(self, *, enabled: bool = True, free_after: bool = False) -> None:
        self.enabled = enabled
        self.free_after = free_after
        self.switches: dict[str, SwitchTotals] = {}

    @classmethod
    def of(cls, trainer: Trainer) -> ParameterReallocation:
        """Return the Trainer's, of several the last; where there is none, add one before its other callbacks."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, cls) for callback in callbacks):
            callbacks.insert(0, cls())
        return [callback for callback in callbacks if isinstance(callback, cls)][-1]

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Fill the replica that ``phase`` works on."""
        if not self.enabled:
            return
        report = trainer.strategy.pool.realize(phase)  # type: ignore[attr-defined]
        if report is not None:
            self.switches.setdefault(phase, SwitchTotals()).add(report)
            dispatch(trainer, "on_reallocate", phase, report)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Give the replica back."""
        if self.enabled:
            trainer.strategy.pool.relinquish(phase, free=self.free_after)  # type: ignore[attr-defined]

    def summary(self) -> Mapping[str, SwitchTotals]:
        """Return the totals per call since the beginning."""
        return dict(self.switches)
