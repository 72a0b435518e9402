"""What does an iteration take? First on this rank, between two of Lightning's hooks; then as all ranks saw it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_realloc.callbacks.tuning_report import Measured
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.tuning.shapes.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Timed:
    """One iteration, as this rank saw it."""

    seconds: float
    lengths: Lengths
    calls: Mapping[str, float]
    """Call -> seconds of this rank's part in it, waiting left out."""


class IterationClock:
    """Times iterations on this rank."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._steps = 0
        self._calls: dict[str, float] = {}

    def start(self, strategy: Any) -> None:
        """Begin; the strategy is about to run an iteration."""
        self._steps = strategy.iteration
        self._calls = dict(strategy.runner.seconds)
        self._begin = time.perf_counter()

    def stop(self, strategy: Any) -> Timed | None:
        """Return what the iteration took; None where it took no step, as while dynamic sampling lacks groups.

        Such a batch has no training calls, and lengths that nobody is told of: it compares with no other.

        Raises:
            ConfigError: for a module that runs its calls itself.
        """
        seconds = time.perf_counter() - self._begin
        if strategy.iteration == self._steps:
            return None
        if strategy.lengths is None:
            raise ConfigError(
                f"AutoTuner needs iterations whose calls the strategy runs, with prompt_ids and response_ids; "
                f"{type(strategy.lightning_module).__name__} has none. Use its training_step as it is, or leave the "
                f"callback out"
            )
        calls = {name: took - self._calls.get(name, 0.0) for name, took in strategy.runner.seconds.items()}
        return Timed(seconds, strategy.lengths, calls)


def seen_by_all(iterations: Sequence[Timed], *, skip: int, peak_bytes: int | None) -> tuple[list[float], Measured]:
    """Return the seconds of iterations, and what those behind the first ``skip`` say of their plan. Collective.

    Seconds are means over ranks, which see the same iterations end in turn; a call's are the slowest rank's.
    """
    counted = iterations[skip:]
    calls = {name: sum(one.calls.get(name, 0.0) for one in counted) / len(counted) for name in counted[-1].calls}
    everyone = gather_objects(([one.seconds for one in iterations], calls, peak_bytes))
    names = set().union(*(made for _, made, _ in everyone))
    slowest = {name: max(made.get(name, 0.0) for _, made, _ in everyone) for name in names}
    peaks = tuple(peak for _, _, peak in everyone if peak is not None)
    seconds = [sum(row) / len(row) for row in zip(*(times for times, _, _ in everyone), strict=True)]
    return seconds, Measured(slowest, peaks)
