"""Callback that decides whether weights are reallocated to each call's layout, and sums up bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.pool.phase_hooks import ReallocationPolicy


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
    num_checked: int = 0
    """Tensors of this rank that were compared with the home replica's afterwards."""
    check_s: float = 0.0
    """Seconds of comparing them on this rank, which ``seconds`` leaves out."""

    def add(self, report: ReallocationReport) -> None:
        """Add one reallocation."""
        self.count += 1
        self.bytes_moved += report.bytes_moved
        self.bytes_minimum += report.bytes_minimum
        self.seconds += report.seconds
        self.num_checked += report.num_checked
        self.check_s += report.check_s

    @property
    def bytes_per_s(self) -> float:
        """Mean throughput; 0 if nothing was moved."""
        return self.bytes_moved / self.seconds if self.seconds else 0.0


class ParameterReallocation(ReallocationPolicy, PhaseCallback):
    """Move a role's weights to the layout of each call before the call starts.

    The ``realloc`` strategy does so without this callback, too. Pass ``ParameterReallocation(enabled=False)`` to run
    every call in its role's training layout, as a static baseline.

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

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Add a reallocation to the totals."""
        self.switches.setdefault(phase, SwitchTotals()).add(report)

    def summary(self) -> Mapping[str, SwitchTotals]:
        """Return the totals per call since the start of the run."""
        return dict(self.switches)
