"""Callback that keeps every iteration's reward and seconds, and every switch of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning.pytorch import LightningModule, Trainer

from lightning_realloc import PhaseCallback
from lightning_realloc.runtime.transfer.executor import ReallocationReport

CALLS = {"generate": "actor.generate", "infer": "reference.infer", "train": "actor.train"}
"""Kind of call -> GRPO's call of that kind."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of training."""

    reward: float
    """Mean over the responses of the iteration that are trained on."""
    seconds: dict[str, float]
    """Kind of call -> wall seconds, with switches of layout."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One reallocation of weights."""

    call: str
    """Call that needed the new layout."""
    bytes_moved: int
    """Bytes that all ranks moved."""
    bytes_minimum: int
    """Bytes that ranks of the new layout needed and did not hold."""
    seconds: float
    """Wall time."""


class Recorder(PhaseCallback):
    """Keeps the figures that the demo shows at its end."""

    def __init__(self) -> None:
        self.iterations: list[Iteration] = []
        self.switches: list[Switch] = []

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Keep the figures of a switch; this hook is the strategy's, not Lightning's."""
        self.switches.append(Switch(phase, report.bytes_moved, report.bytes_minimum, report.seconds))

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """Keep the logged metrics."""
        logged = trainer.callback_metrics
        seconds = {kind: float(logged[f"seconds/{call}"]) for kind, call in CALLS.items()}
        self.iterations.append(Iteration(float(logged["reward"]), seconds))

    def switches_by_call(self) -> dict[str, list[Switch]]:
        """Return call -> its switches."""
        return {call: [s for s in self.switches if s.call == call] for call in {s.call: None for s in self.switches}}


def mean_seconds(iterations: Sequence[Iteration]) -> dict[str, float]:
    """Return kind of call -> mean seconds of one."""
    return {kind: fmean(iteration.seconds[kind] for iteration in iterations) for kind in CALLS}
