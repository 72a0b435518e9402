"""Callback that measures peak memory per call, and per transition between calls, on this rank."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.runtime.measure.memory_stats import MemoryMeter, memory_meter


class MemoryMonitor(PhaseCallback):
    """Peak memory of every call and of every transition to it, over all iterations, on this rank.

    On CUDA it reads the allocator's statistics at no cost. On CPU it inspects every operation and slows training down;
    use it there for benchmarks and to compare a plan's predicted memory with the measured one.

    Example:
        >>> from lightning_realloc import MemoryMonitor
        >>> monitor = MemoryMonitor()  # Trainer(strategy="realloc", callbacks=[monitor])
        >>> monitor.phases
        {}
    """

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}
        """Call -> peak bytes from the end of its reallocation to the end of the call."""
        self.transitions: dict[str, int] = {}
        """Call -> peak bytes from the end of the previous call to the end of this call's reallocation."""
        self._meter: MemoryMeter | None = None
        self._is_running = False

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Start measuring an iteration."""
        if self._meter is None:
            self._meter = memory_meter(run_view(trainer).runner.peak_memory)
        self._meter.start()
        self._is_running = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Stop measuring."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._stop()

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Record the peak of the transition into a call."""
        self._record_peak(self.transitions, trainer, phase)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Record the peak of a call."""
        self._record_peak(self.phases, trainer, phase)

    def _record_peak(self, peaks: dict[str, int], trainer: Trainer, phase: str) -> None:
        if self._meter is None or not self._is_running:
            return  # a sanity check or an evaluation
        shared = run_view(trainer).pool.shared_bytes
        peaks[phase] = max(peaks.get(phase, 0), self._meter.take_peak() + shared)

    def _stop(self) -> None:
        if self._meter is not None and self._is_running:
            self._is_running = False
            self._meter.stop()
