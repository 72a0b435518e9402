"""Callback that reacts to logged metrics which leave their usual range: spikes, explosions, limits."""

from __future__ import annotations

import fnmatch
import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, Trainer

from lightning_realloc.errors import ConfigError, ReallocError

_log = logging.getLogger(__name__)

AlarmAction = Literal["warn", "stop", "fail"]
"""Reaction to an alarm: a warning, the end of training after this iteration, or an exception on all ranks."""
WINDOW = 50
"""Iterations whose values are the usual range. More make alarms slower to follow a drift."""
MIN_VALUES = 10
"""Values without which no spike is found."""


class SpikeDetector:
    """Finds values far above the latest ones: beyond the median by many median absolute deviations.

    Args:
        threshold: Distance from the median, in standard deviations of a normal distribution with the same median
            absolute deviation (1.4826 times it; Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013).
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.values: deque[float] = deque(maxlen=WINDOW)
        """Latest values, the oldest first."""

    def limit(self) -> float | None:
        """Return the value above which the next one is a spike; None after too few values."""
        if len(self.values) < MIN_VALUES:
            return None
        median = statistics.median(self.values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in self.values)
        return median + max(self.threshold * deviation, abs(median))  # of equal values, none would deviate

    def add(self, value: float) -> float | None:
        """Record a value, and return the limit that it exceeds; None if it is no spike."""
        limit = self.limit()
        self.values.append(value)
        return limit if limit is not None and value > limit else None


class MetricAlarm(Callback):
    """Warns, stops or fails if a metric of training spikes, exceeds a limit, or is not finite.

    Metrics of training are the same on every rank, so all ranks react alike.

    Args:
        limits: Metric, or pattern such as ``"*/kl"`` -> largest accepted value.
        spikes: Metrics or patterns that are watched for spikes: values that exceed the median of the last 50 iterations
            by ``threshold`` standard deviations and by its own size.
        threshold: Standard deviations of a spike; more find fewer.
        action: ``"warn"`` logs a warning; ``"stop"`` ends training after this iteration, as `EarlyStopping` does;
            ``"fail"`` raises ReallocError, upon which ``ModelCheckpoint(save_on_exception=True)`` saves.

    Raises:
        ConfigError: for an unknown action, or limits that are no finite numbers.

    Example:
        >>> from lightning_realloc import MetricAlarm
        >>> alarm = MetricAlarm({"actor/kl": 10.0}, action="stop")  # Trainer(strategy="realloc", callbacks=[alarm])
        >>> alarm.action
        'stop'
    """

    def __init__(
        self,
        limits: Mapping[str, float] | None = None,
        *,
        spikes: Sequence[str] = ("*/loss", "*/grad_norm", "*/kl"),
        threshold: float = 8.0,
        action: AlarmAction = "warn",
    ) -> None:
        if action not in get_args(AlarmAction):
            raise ConfigError(f"action={action!r} must be one of {', '.join(get_args(AlarmAction))}")
        for name, limit in (limits or {}).items():
            if not math.isfinite(limit):
                raise ConfigError(f"limits[{name!r}]={limit} must be a finite number; leave it out to never react")
        self.limits = dict(limits or {})
        self.spikes = (spikes,) if isinstance(spikes, str) else tuple(spikes)
        self.threshold = threshold
        self.action = action
        self._detectors: dict[str, SpikeDetector] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Look at the metrics of the iteration.

        Raises:
            ReallocError: if a metric is out of range and the action is ``"fail"``.
        """
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        alarms = [alarm for name, value in metrics.items() if (alarm := self._judge(name, value)) is not None]
        if not alarms:
            return
        message = f"iteration {trainer.global_step - 1}: {'; '.join(alarms)}"
        if self.action == "fail":
            raise ReallocError(
                f"{message}; lower the learning rate or look at this iteration's data, or use "
                f"MetricAlarm(action='warn') to go on"
            )
        if trainer.is_global_zero:
            _log.warning("%s%s", message, "; training stops" if self.action == "stop" else "")
        trainer.should_stop = trainer.should_stop or self.action == "stop"

    def _judge(self, name: str, value: float) -> str | None:
        limit = next((limit for pattern, limit in self.limits.items() if fnmatch.fnmatch(name, pattern)), None)
        if limit is not None and not value <= limit:  # NaN too
            return f"{name} is {value:.4g}, above its limit of {limit:g}"
        if not any(fnmatch.fnmatch(name, pattern) for pattern in self.spikes):
            return None
        if not math.isfinite(value):
            return f"{name} is {value}"
        exceeded = self._detectors.setdefault(name, SpikeDetector(self.threshold)).add(value)
        return None if exceeded is None else f"{name} is {value:.4g}, a spike above {exceeded:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the latest values of each metric that is watched for spikes."""
        return {"values": {name: list(detector.values) for name, detector in self._detectors.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the values of the run before."""
        for name, values in state_dict["values"].items():
            self._detectors[name] = detector = SpikeDetector(self.threshold)
            detector.values.extend(values)
