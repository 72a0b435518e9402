"""What a tuner is told, what it remembers of a plan, and what it asks for. Values; ``tuner`` has what follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """How much may be tried, and what counts as better."""

    max_trials: int = 4
    """Plans tried in one tuning."""
    max_overhead: float = 0.05
    """What all tuning may cost, as a share of the run's seconds."""
    search_seconds: float = 10.0
    """Of one search, at most."""
    profile_seconds: float = 30.0
    """Of measuring passes on the ranks, about at most."""
    drift_threshold: float | None = 0.3
    """Tune again when seconds, or work, have changed by this share; None: never."""
    margin: float = 0.05
    """A plan must save this share of the start's seconds to replace it."""

    def __post_init__(self) -> None:
        for name in ("max_overhead", "search_seconds", "profile_seconds", "margin", "drift_threshold"):
            value = getattr(self, name)
            if not _is_number(value) and not (name == "drift_threshold" and value is None):
                raise ConfigError(f"{name}={value!r} must be a number, as in 0.05")
        if not isinstance(self.max_trials, int) or isinstance(self.max_trials, bool) or self.max_trials < 1:
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
    """One iteration, as all ranks saw it."""

    seconds: float
    work: float
    """1 for the lengths of the first measured iterations."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that a search proposes."""

    plan: ExecutionPlan
    predicted_s: float
    """Of an iteration."""


@dataclass(slots=True)
class Trial:
    """A plan that was run."""

    plan: ExecutionPlan
    predicted_s: float | None = None
    scores: list[float] = field(default_factory=list)
    """Seconds over work of the iterations that count."""

    @property
    def score(self) -> float:
        """Seconds of an iteration of work 1; infinite before one was counted."""
        return median(self.scores) if self.scores else math.inf

    def to_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` reads: plain values."""
        return {"plan": self.plan.to_mapping(), "predicted_s": self.predicted_s, "scores": list(self.scores)}

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> Trial:
        """Read it back."""
        return cls(ExecutionPlan.from_mapping(entry["plan"]), entry["predicted_s"], list(entry["scores"]))


# ---- what is to be done
@dataclass(frozen=True, slots=True)
class Measure:
    """Run ``skip + count`` iterations, then tell `Tuner.measured` of all of them."""

    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class Search:
    """Measure passes as far as that gets, look for plans, then tell `Tuner.searched`."""

    seconds: float
    profile_seconds: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Install a plan, then tell `Tuner.switched`; `Tuner.failed` where it could not be and the one before runs on."""

    plan: ExecutionPlan
    is_trial: bool
    """Whether it may fail: a plan that ran before may not."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell the user, then `Tuner.committed`."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell `Tuner.watched` of every iteration."""


Action = Measure | Search | Switch | Commit | Watch
