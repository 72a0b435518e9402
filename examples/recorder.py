"""Callback that writes every iteration's reward and seconds, and every switch of layouts, to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Recording:
    """Figures of a run."""

    iterations: tuple[Iteration, ...]
    """In order."""
    switches: tuple[Switch, ...]
    """In order."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Recording:
        """Return the figures that `dataclasses.asdict` made a dictionary of, such as the file of a `Recorder`."""
        return cls(
            tuple(Iteration(**each) for each in stored["iterations"]),
            tuple(Switch(**each) for each in stored["switches"]),
        )

    def switches_by_call(self) -> dict[str, list[Switch]]:
        """Return call -> its switches."""
        return {call: [s for s in self.switches if s.call == call] for call in {s.call: None for s in self.switches}}


class Recorder(PhaseCallback):
    """Writes the figures that the demo shows at its end; on Ray, its ranks are other processes than the demo's.

    Args:
        path: File that the first rank writes when training ends.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.iterations: list[Iteration] = []
        self.switches: list[Switch] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the figures for a checkpoint: a run that goes on from it has those from before, too."""
        return asdict(Recording(tuple(self.iterations), tuple(self.switches)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the figures of a checkpoint."""
        stored = Recording.from_dict(state_dict)
        self.iterations, self.switches = list(stored.iterations), list(stored.switches)

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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all figures."""
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(self.state_dict()) + "\n")


def mean_seconds(iterations: Sequence[Iteration]) -> dict[str, float]:
    """Return kind of call -> mean seconds of one."""
    return {kind: fmean(iteration.seconds[kind] for iteration in iterations) for kind in CALLS}
