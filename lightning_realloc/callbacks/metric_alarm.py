"""Callback that reacts to logged metrics which leave their range: spikes, limits, and bounds of healthy runs."""

from __future__ import annotations

import fnmatch
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Bound:
    """Range of a metric, and what to do about values that stay outside.

    Raises:
        ConfigError: for a range that holds no number, or a number of iterations below 1.
    """

    low: float | None = None
    """Smallest accepted value; None: any."""
    high: float | None = None
    """Largest accepted value; None: any."""
    num_iterations: int = 1
    """Iterations in a row outside of it that raise an alarm. The alarm is repeated after as many more."""
    advice: str = ""
    """What to change, added to the alarm."""

    def __post_init__(self) -> None:
        given = [end for end in (self.low, self.high) if end is not None]
        if not given or not all(map(_is_finite, given)) or (len(given) == 2 and given[0] > given[1]):
            raise ConfigError(
                f"Bound(low={self.low!r}, high={self.high!r}) must have one finite number, or two in this order"
            )
        times = self.num_iterations
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ConfigError(f"Bound(num_iterations={times!r}) must be a whole number of at least 1, such as 3")

    def exceeded(self, value: float) -> str | None:
        """Return the end of the range that a value is beyond, in words; None if it is within. NaN is beyond both."""
        if self.high is not None and not value <= self.high:
            return f"above its limit of {self.high:g}"
        if self.low is not None and not value >= self.low:
            return f"below its limit of {self.low:g}"
        return None


HEALTHY: Mapping[str, Bound] = {
    "actor/entropy": Bound(low=0.05, num_iterations=10, advice="if the task is not solved, set entropy='adaptive'"),
    "actor/kl": Bound(high=1.0, num_iterations=3, advice="lower the learning rate, or raise kl_coef"),
    "actor/clip_fraction": Bound(
        high=0.3, num_iterations=3, advice="lower the learning rate, or take fewer steps per iteration"
    ),
    "actor/engine_kl": Bound(
        high=0.05,
        num_iterations=3,
        advice="the engine draws from another distribution: set a correction, lower "
        "max_staleness, or use the engine 'native' to find out which",
    ),
    "actor/effective_sample_size": Bound(
        low=0.5, num_iterations=3, advice="few tokens outweigh all others: lower max_staleness, or the correction's cap"
    ),
    "actor/correction_excluded": Bound(
        high=0.5,
        num_iterations=3,
        advice="most tokens are not learned from: lower max_staleness, or use correction='token-truncate'",
    ),
    "frac_reward_zero_std": Bound(
        high=0.9,
        num_iterations=10,
        advice="groups with equal rewards teach nothing: use prompts that are neither "
        "solved nor hopeless, a graded reward, or dynamic_sampling",
    ),
    "stopped/length": Bound(
        high=0.5,
        num_iterations=10,
        advice="responses are cut off: raise max_new_tokens, or shorten them by OverlongPenalty",
    ),
    "reward_failures/*": Bound(high=0.0, num_iterations=3, advice="the log names why the reward failed"),
    "*/skipped_steps": Bound(
        high=0.0, num_iterations=3, advice="gradients are not finite: lower the learning rate, or train in bf16 or fp32"
    ),
}
"""Ranges of an online algorithm's metrics in a healthy run, see docs/healthy-runs.md."""


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
        limits: Metric, or pattern such as ``"*/kl"`` -> largest accepted value, or `Bound`. ``"healthy"``: the bounds
            of `HEALTHY`, for online algorithms; those of metrics that a run does not log are ignored.
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
        limits: Mapping[str, float | Bound] | Literal["healthy"] | None = None,
        *,
        spikes: Sequence[str] = DEFAULT_SPIKES,
        threshold: float = 8.0,
        min_spike: float = 1.0,
        action: AlarmAction = "warn",
    ) -> None:
        require_choice("action", action, get_args(AlarmAction))
        given = HEALTHY if limits == "healthy" else limits
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f"limits={limits!r} must map metrics to numbers, as in {{'actor/grad_norm': 50.0}}, or be 'healthy'"
            )
        names = (spikes,) if isinstance(spikes, str) else spikes
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"spikes={spikes!r} must be names of metrics, as in ['*/loss']; () watches none")
        for name, limit in (given or {}).items():
            if not isinstance(limit, Bound) and not _is_finite(limit):
                raise ConfigError(
                    f"limits[{name!r}]={limit!r} must be a finite number, or a Bound such as "
                    f"Bound(low=0.05); leave it out to never react"
                )
        for name, value in (("threshold", threshold), ("min_spike", min_spike)):
            if not _is_finite(value) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0; spikes=() watches none")
        self.limits = {
            name: limit if isinstance(limit, Bound) else Bound(high=limit) for name, limit in (given or {}).items()
        }
        """Bounds by metric or pattern."""
        self.spikes = tuple(names)
        self.threshold = threshold
        self.min_spike = min_spike
        self.action = action
        self._detectors: dict[str, SpikeDetector] = {}
        self._num_outside: dict[str, int] = {}
        """Iterations in a row that a metric has been outside of its bound."""
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
        alarms = [alarm for name, value in metrics.items() for alarm in self._judge(name, value)]
        if not alarms:
            return
        message = f"iteration {trainer.global_step - 1}: {'; '.join(alarms)}"
        if self.action == "fail":
            is_advised = any(bound.advice and bound.advice in message for bound in self.limits.values())
            way_out = "" if is_advised else "lower the learning rate or look at this iteration's data, or "
            raise ReallocError(f"{message}; {way_out}use MetricAlarm(action='warn') to go on")
        if trainer.is_global_zero:
            _log.warning("%s%s", message, "; training stops" if self.action == "stop" else "")
        trainer.should_stop = trainer.should_stop or self.action == "stop"

    def _warn_of_missing(self, metrics: Mapping[str, float]) -> None:
        """Warn of names given by the user that match no metric."""
        limits = [name for name, bound in self.limits.items() if bound is not HEALTHY.get(name)]
        chosen = [*limits, *(name for name in self.spikes if name not in DEFAULT_SPIKES)]
        for name in dict.fromkeys(chosen):
            if not fnmatch.filter(metrics, name):
                near = get_close_matches(name, metrics, n=3)
                rank_zero_warn(
                    f"MetricAlarm watches {name!r}, and the first iteration logged no such metric, so nothing is "
                    f"compared with it unless it is logged later; {'similar' if near else 'logged'} ones are "
                    f"{', '.join(near or sorted(metrics))}"
                )

    def _judge(self, name: str, value: float) -> Iterator[str]:
        """Yield what is wrong with a value."""
        bound = next((bound for pattern, bound in self.limits.items() if fnmatch.fnmatch(name, pattern)), None)
        beyond = None if bound is None else bound.exceeded(value)
        num_outside = self._num_outside[name] = 0 if beyond is None else self._num_outside.get(name, 0) + 1
        if bound is not None and beyond is not None:
            if num_outside % bound.num_iterations == 0 or not math.isfinite(value):
                in_a_row = f" in {num_outside} iterations in a row" if num_outside > 1 else ""
                yield f"{name} is {value:.4g}, {beyond}{in_a_row}{': ' if bound.advice else ''}{bound.advice}"
        elif any(fnmatch.fnmatch(name, pattern) for pattern in self.spikes):
            if not math.isfinite(value):
                yield f"{name} is {value}"
            else:
                exceeded = self._detectors.setdefault(name, SpikeDetector(self.threshold, self.min_spike)).add(value)
                if exceeded is not None:
                    yield f"{name} is {value:.4g}, a spike above {exceeded:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the latest values of each metric that is watched for spikes, and how long others are outside."""
        values = {name: list(detector.values) for name, detector in self._detectors.items()}
        return {"values": values, "outside": {name: count for name, count in self._num_outside.items() if count}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the values of the run before."""
        for name, values in state_dict["values"].items():
            self._detectors[name] = detector = SpikeDetector(self.threshold, self.min_spike)
            detector.values.extend(values)
        self._num_outside = dict(state_dict.get("outside", {}))  # earlier checkpoints have none
