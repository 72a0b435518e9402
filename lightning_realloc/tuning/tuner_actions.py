"""Values that a `Tuner` exchanges with the run: its settings, measured iterations, trials and requested actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError
from lightning_realloc.layout.dims import is_count

MIN_BUDGET_S = 2.0
"""Seconds for all tuning below which a run is not tuned: measuring passes, a search and two changes of plans take as
long even for tiny models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """Limits on the cost of tuning, and the thresholds of its decisions."""

    max_trials: int = 4
    """Most plans tried in one tuning."""
    max_overhead: float = 0.05
    """Most seconds that all tuning may cost, as a fraction of the run's."""
    search_seconds: float = 10.0
    """Most seconds of one search."""
    profile_seconds: float = 30.0
    """Approximate limit on the seconds of measuring passes."""
    drift_threshold: float | None = 0.3
    """Relative change of the seconds, or of the work, of an iteration that starts another tuning; None: never."""
    margin: float = 0.05
    """Fraction of the start plan's seconds that a plan must save to replace it."""

    def budget_s(self, num_iterations: int | None, seconds: float) -> float:
        """Return the seconds that all tuning may cost in a run of iterations of so many seconds each."""
        return math.inf if num_iterations is None else self.max_overhead * num_iterations * seconds

    def __post_init__(self) -> None:
        for name in ("max_overhead", "search_seconds", "profile_seconds", "margin", "drift_threshold"):
            value = getattr(self, name)
            if not _is_number(value) and not (name == "drift_threshold" and value is None):
                raise ConfigError(f"{name}={value!r} must be a number, as in 0.05")
        if not is_count(self.max_trials):
            raise ConfigError(f"max_trials={self.max_trials!r} must be a whole number, at least 1; or use no AutoTuner")
        for name in ("max_overhead", "search_seconds", "profile_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} must be positive and finite; or use no AutoTuner")
        if self.max_overhead > 1:
            raise ConfigError(f"max_overhead={self.max_overhead} is a share of the run; use one in (0, 1], as in 0.05")
        if self.drift_threshold is not None and not 0 < self.drift_threshold < math.inf:
            raise ConfigError(
                f"drift_threshold={self.drift_threshold} must be positive, as in 0.3; use None to never tune again"
            )
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin} is a share of the start's seconds; use one in [0, 1), as in 0.02")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurement of one iteration, the same on all ranks."""

    seconds: float
    work: float
    """Estimated seconds of the iteration's lengths under a fixed plan, relative to the first measured iterations."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that a search proposes."""

    plan: ExecutionPlan
    predicted_s: float
    """Estimated seconds of an iteration."""


@dataclass(slots=True)
class Trial:
    """A plan that the run has used, with its measurements."""

    plan: ExecutionPlan
    predicted_s: float | None = None
    """Estimated seconds of an iteration; None before the first search."""
    scores: list[float] = field(default_factory=list)
    """Seconds over work of each counted iteration."""

    @property
    def score(self) -> float:
        """Median seconds of an iteration with work 1; infinite without a counted iteration."""
        return median(self.scores) if self.scores else math.inf

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, which :meth:`from_mapping` reads."""
        return {"plan": self.plan.to_mapping(), "predicted_s": self.predicted_s, "scores": list(self.scores)}

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> Trial:
        """Return the trial that :meth:`to_mapping` was called on."""
        return cls(ExecutionPlan.from_mapping(entry["plan"]), entry["predicted_s"], list(entry["scores"]))


SETTLED_RATIO = 0.85
"""Seconds of a baseline's last iteration over those of its first, below which the run is still warming up."""
MAX_EXTRA_ITERATIONS = 10
"""Most further iterations of a baseline. They cost nothing, but tuning begins later."""


class Baseline:
    """Iterations of the start plan until they have settled.

    Libraries may load and caches may fill for longer than the iterations that are never counted. A baseline of such
    iterations would hide slow candidates, and allow more seconds of tuning than the run has.

    Args:
        num_counted: Number of iterations that count, the last ones.
    """

    def __init__(self, num_counted: int) -> None:
        self._num_counted = num_counted
        self._readings: list[Reading] = []

    def add(self, readings: Sequence[Reading]) -> None:
        """Add iterations."""
        self._readings += readings

    @property
    def scores(self) -> list[float]:
        """Seconds over work of the iterations that count."""
        return [reading.seconds / reading.work for reading in self._readings[-self._num_counted :]]

    @property
    def work(self) -> float:
        """Median work of the iterations that count."""
        return median(reading.work for reading in self._readings[-self._num_counted :])

    @property
    def has_settled(self) -> bool:
        """Whether the last iteration took about as long as the first one that counts, or waiting has a limit."""
        is_level = self.scores[-1] >= SETTLED_RATIO * self.scores[0]
        return is_level or len(self._readings) >= self._num_counted + MAX_EXTRA_ITERATIONS


# ---- actions
@dataclass(frozen=True, slots=True)
class Measure:
    """Run ``skip + count`` iterations, then report all of them to `Tuner.measured`."""

    skip: int
    """Iterations that do not count."""
    count: int
    """Iterations that count."""


@dataclass(frozen=True, slots=True)
class Search:
    """Measure passes, search plans, then report the candidates to `Tuner.searched`."""

    seconds: float
    """Limit of the search, in seconds."""
    profile_seconds: float
    """Limit of measuring passes, in seconds."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Install a plan, then call `Tuner.switched`; call `Tuner.failed` if that fails and the previous plan is kept."""

    plan: ExecutionPlan
    is_trial: bool
    """Whether installing may fail; a plan that ran before may not."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Report the result to the user, then call `Tuner.committed`."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Report every iteration to `Tuner.watched`."""


Action = Measure | Search | Switch | Commit | Watch
