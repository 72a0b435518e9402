"""Measures the most memory that each call, and each transition between calls, takes on this rank."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.runtime.measure.memory_stats import MemoryMeter, memory_meter


class MemoryMonitor(PhaseCallback):
    """Keeps the peak bytes of every call and of every transition to it, over all iterations, on this rank.

    On CUDA it reads the allocator and costs nothing. On CPU it looks at every operation, which slows a run down: for
    benchmarks and for comparing a plan's prediction with what happens.
    """

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}
        """Call -> peak bytes between its layout's being real and its end."""
        self.transitions: dict[str, int] = {}
        """Call -> peak bytes from the end of the call before until its layout is real."""
        self._meter: MemoryMeter | None = None
        self._is_running = False

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Begin to measure an iteration."""
        if self._meter is None:
            self._meter = memory_meter(trainer.strategy.root_device)
        self._meter.start()
        self._is_running = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """End the iteration."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing switched on."""
        self._stop()

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Note what the way into a call took."""
        self._note(self.transitions, trainer, phase)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Note what a call took."""
        self._note(self.phases, trainer, phase)

    def _note(self, peaks: dict[str, int], trainer: Trainer, phase: str) -> None:
        if self._meter is None or not self._is_running:
            return  # a sanity check, or evaluation
        shared = trainer.strategy.pool.shared_bytes  # type: ignore[attr-defined]
        peaks[phase] = max(peaks.get(phase, 0), self._meter.take_peak() + shared)

    def _stop(self) -> None:
        if self._meter is not None and self._is_running:
            self._is_running = False
            self._meter.stop()


def cheap_peak(trainer: Trainer) -> int | None:
    """Return this rank's peak bytes since the plan was installed, where counting them is free."""
    device = trainer.strategy.root_device
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if device.type != "cuda" or any(isinstance(callback, MemoryMonitor) for callback in callbacks):
        return None  # the monitor sets the allocator's peak back at every call
    return int(torch.cuda.max_memory_allocated(device))
