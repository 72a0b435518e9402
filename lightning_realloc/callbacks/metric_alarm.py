"""Callback that reacts to logged metrics which leave their usual range: spikes, explosions, limits."""

from __future__ import annotations

import fnmatch
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, TypeGuard, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.errors import ConfigError, ReallocError, require_choice

_log = logging.getLogger(__name__)

AlarmAction = Literal["warn", "stop", "fail"]
"""Reaction to an alarm: a warning, the end of training after this iteration, or an exception on all ranks."""
WINDOW = 50
"""Iterations whose values are the usual range. More make alarms slower to follow a drift."""
MIN_VALUES = 10
"""Values without which no spike is found."""
ROUNDING_NOISE = 1e-6
"""Largest size of a value that says nothing about the usual range, such as a policy's loss without advantages."""
DEFAULT_SPIKES = ("*/loss", "*/grad_norm", "*/kl")
"""Metrics watched for spikes by default. An algorithm need not log all of them."""


class SpikeDetector:
    """Finds values far above the latest ones.

    A spike is above all of these: the median plus ``threshold`` deviations; twice the size that nine of ten values stay
    below; ``min_spike``. Deviations of equal or mostly small values are tiny, which is why they do not decide alone.
    Values within 1e-6 of 0 are ignored.

    Args:
        threshold: Distance from the median, in standard deviations of a normal distribution with the same median
            absolute deviation (1.4826 times it; Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013).
        min_spike: Value up to which none is a spike.
    """

    def __init__(self, threshold: float, min_spike: float = 1.0) -> None:
        self.threshold = threshold
        self.min_spike = min_spike
        self.values: deque[float] = deque(maxlen=WINDOW)
        """Latest values, the oldest first."""

    def limit(self) -> float | None:
        """Return the value above which the next one is a spike; None after too few values."""
        if len(self.values) < MIN_VALUES:
            return None
        median = statistics.median(self.values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in self.values)
        usual_size = statistics.quantiles(map(abs, self.values), n=10, method="inclusive")[-1]
        return max(median + self.threshold * deviation, 2 * usual_size, self.min_spike)

    def add(self, value: float) -> float | None:
        """Record a value, and return the limit that it exceeds; None if it is no spike."""
        limit = self.limit()
        if abs(value) > ROUNDING_NOISE:
            self.values.append(value)
        return limit if limit is not None and value > limit else None


class MetricAlarm(Callback):
    """Warns, stops or fails if a metric of training spikes, exceeds a limit, or is not finite.

    Metrics of training are the same on every rank, so all ranks react alike. A metric with a limit that the first
    iteration does not log is named in a warning.

    Args:
        limits: Metric, or pattern such as ``"*/kl"`` -> largest accepted value.
        spikes: Metrics or patterns that are watched for spikes. A spike is above ``min_spike``, above twice the size
            that nine in ten of the last 50 values stay below, and ``threshold`` standard deviations above their median.
            The loss of a policy is rounding noise around 0 in many iterations: values within 1e-6 of 0 do not count.
        threshold: Standard deviations of a spike; more find fewer.
        min_spike: Value up to which none is a spike. The default 1 suits losses and gradient norms; lower it, or set a
            limit, for metrics that are smaller.
        action: ``"warn"`` logs a warning; ``"stop"`` ends training after this iteration, as `EarlyStopping` does;
            ``"fail"`` raises ReallocError, upon which ``ModelCheckpoint(save_on_exception=True)`` saves.

    Raises:
        ConfigError: for an unknown action, or numbers and names of another kind.

    Example:
        >>> from lightning_realloc import MetricAlarm
        >>> alarm = MetricAlarm({"actor/grad_norm": 50.0}, action="stop")  # Trainer(..., callbacks=[alarm])
        >>> alarm.action
        'stop'
    """

    def __init__(
        self,
        limits: Mapping[str, float] | None = None,
        *,
        spikes: Sequence[str] = DEFAULT_SPIKES,
        threshold: float = 8.0,
        min_spike: float = 1.0,
        action: AlarmAction = "warn",
    ) -> None:
        require_choice("action", action, get_args(AlarmAction))
        if limits is not None and not isinstance(limits, Mapping):
            raise ConfigError(f"limits={limits!r} must map metrics to numbers, as in {{'actor/grad_norm': 50.0}}")
        names = (spikes,) if isinstance(spikes, str) else spikes
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"spikes={spikes!r} must be names of metrics, as in ['*/loss']; () watches none")
        for name, limit in (limits or {}).items():
            if not _is_finite(limit):
                raise ConfigError(f"limits[{name!r}]={limit!r} must be a finite number; leave it out to never react")
        for name, value in (("threshold", threshold), ("min_spike", min_spike)):
            if not _is_finite(value) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0; spikes=() watches none")
        self.limits = dict(limits or {})
        self.spikes = tuple(names)
        self.threshold = threshold
        self.min_spike = min_spike
        self.action = action
        self._detectors: dict[str, SpikeDetector] = {}
        self._is_checked = False
        """Whether the names have been compared with the logged ones."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare names with the metrics of this run."""
        self._is_checked = False

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Look at the metrics of the iteration.

        Raises:
            ReallocError: if a metric is out of range and the action is ``"fail"``.
        """
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if metrics and not self._is_checked:
            self._is_checked = True
            self._warn_of_missing(metrics)
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

    def _warn_of_missing(self, metrics: Mapping[str, float]) -> None:
        """Warn of names given by the user that match no metric."""
        chosen = [*self.limits, *(name for name in self.spikes if name not in DEFAULT_SPIKES)]
        for name in dict.fromkeys(chosen):
            if not fnmatch.filter(metrics, name):
                near = get_close_matches(name, metrics, n=3)
                rank_zero_warn(
                    f"MetricAlarm watches {name!r}, and the first iteration logged no such metric, so nothing is "
                    f"compared with it unless it is logged later; {'similar' if near else 'logged'} ones are "
                    f"{', '.join(near or sorted(metrics))}"
                )

    def _judge(self, name: str, value: float) -> str | None:
        limit = next((limit for pattern, limit in self.limits.items() if fnmatch.fnmatch(name, pattern)), None)
        if limit is not None and not value <= limit:  # NaN too
            return f"{name} is {value:.4g}, above its limit of {limit:g}"
        if not any(fnmatch.fnmatch(name, pattern) for pattern in self.spikes):
            return None
        if not math.isfinite(value):
            return f"{name} is {value}"
        exceeded = self._detectors.setdefault(name, SpikeDetector(self.threshold, self.min_spike)).add(value)
        return None if exceeded is None else f"{name} is {value:.4g}, a spike above {exceeded:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the latest values of each metric that is watched for spikes."""
        return {"values": {name: list(detector.values) for name, detector in self._detectors.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the values of the run before."""
        for name, values in state_dict["values"].items():
            self._detectors[name] = detector = SpikeDetector(self.threshold, self.min_spike)
            detector.values.extend(values)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
