"""Timing of iterations on one rank, and aggregation over all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer

from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.callbacks.tuning_report import Measured
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.tuning.shapes.lengths import Lengths


@dataclass(frozen=True, slots=True)
class TimedIteration:
    """Measurements of one iteration on this rank."""

    seconds: float
    """Duration of the iteration."""
    lengths: Lengths
    """Token counts of its samples."""
    calls: Mapping[str, float]
    """Call -> seconds of this rank's part, without waiting."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Generating call whose environments ask models -> its seconds over those without the models' replies."""


class IterationClock:
    """Clock for iterations on this rank."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._steps = 0
        self._calls: dict[str, float] = {}

    def start(self, trainer: Trainer) -> None:
        """Start the clock before an iteration."""
        self._steps = trainer.global_step
        self._calls = dict(run_view(trainer).runner.seconds)
        self._begin = time.perf_counter()

    def stop(self, trainer: Trainer) -> TimedIteration | None:
        """Return the iteration's measurements; None if it took no optimizer step, as when dynamic sampling lacks
            groups.

        Such an iteration has no training calls and no shared lengths, so it cannot be compared with others.

        Raises:
            ConfigError: for a module that runs its calls itself.
        """
        seconds, run = time.perf_counter() - self._begin, run_view(trainer)
        if trainer.global_step == self._steps:
            return None
        if run.lengths is None:
            raise ConfigError(
                f"AutoTuner needs iterations whose calls the strategy runs, with prompt_ids and response_ids; "
                f"{type(trainer.lightning_module).__name__} has none: keep its inherited training_step, or remove the "
                f"callback"
            )
        calls = {name: total - self._calls.get(name, 0.0) for name, total in run.runner.seconds.items()}
        return TimedIteration(seconds, run.lengths, calls, _factors(trainer.callback_metrics))


def _factors(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the `TimedIteration.factors` of an iteration with these metrics, which all ranks know."""
    asking = [name.removeprefix("partner_s/") for name in metrics if name.startswith("partner_s/")]
    times = {call: (float(metrics[f"seconds/{call}"]), float(metrics[f"partner_s/{call}"])) for call in asking}
    # Both are of the slowest rank, which may be another one for replies.
    return {call: whole / max(whole - replies, 0.01 * whole) for call, (whole, replies) in times.items()}


def mean_factors(iterations: Sequence[TimedIteration]) -> dict[str, float]:
    """Return the mean factors of iterations of one plan."""
    return {call: sum(one.factors[call] for one in iterations) / len(iterations) for call in iterations[-1].factors}


def gather_measurements(
    iterations: Sequence[TimedIteration], *, skip: int, peak_bytes: int | None
) -> tuple[list[float], Measured]:
    """Return the seconds of iterations, and the plan's measurements without the first ``skip``. Collective.

    Seconds are means over ranks, because ranks see the same iterations end one after the other. A call's seconds are
    the slowest rank's.
    """
    counted = iterations[skip:]
    calls = {name: sum(one.calls.get(name, 0.0) for one in counted) / len(counted) for name in counted[-1].calls}
    everyone = gather_objects(([one.seconds for one in iterations], calls, peak_bytes))
    names = set().union(*(made for _, made, _ in everyone))
    slowest = {name: max(made.get(name, 0.0) for _, made, _ in everyone) for name in names}
    peaks = tuple(peak for _, _, peak in everyone if peak is not None)
    seconds = [sum(row) / len(row) for row in zip(*(times for times, _, _ in everyone), strict=True)]
    return seconds, Measured(slowest, peaks)
