"""Alarms: spikes are found by their distance from the latest values, and all actions react to limits and spikes."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback

from lightning_realloc.callbacks import MetricAlarm
from lightning_realloc.callbacks.metric_alarm import MIN_VALUES, WINDOW, Bound, SpikeDetector
from lightning_realloc.errors import ConfigError, ReallocError
from tests.strategies import runs
from tests.strategies.runs import Batches


class Logs(Callback):
    """Adds values of its own to the metrics of an iteration, by its number."""

    def __init__(self, name: str, values: Mapping[int, float], usual: float = 1.0) -> None:
        self.name, self.values, self.usual = name, values, usual

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Log the value, before alarms look at it."""
        pl_module.log(self.name, self.values.get(trainer.global_step - 1, self.usual))


def fit(alarm: MetricAlarm, logs: Logs, num_iterations: int = 15) -> L.Trainer:
    """Fit SFT with logged values."""
    trainer = runs.trainer("realloc", 1, callbacks=[logs, alarm], max_steps=num_iterations, max_epochs=-1)
    trainer.fit(runs.sft(), Batches(5, size=2, responses=True))
    return trainer


# ---- the detector
@given(st.lists(st.floats(0.5, 1.5), min_size=MIN_VALUES, max_size=2 * WINDOW), st.floats(0.5, 1.5))
def test_values_within_their_range_are_no_spikes(values: list[float], new: float) -> None:
    detector = SpikeDetector(threshold=8.0)
    detector.values.extend(values)

    limit = detector.limit()

    assert limit is not None
    assert limit >= 1.0  # at least twice the median, which is at least 0.5
    assert (detector.add(new) is not None) == (new > limit)


@given(st.lists(st.floats(-1.0, 1.0), min_size=MIN_VALUES), st.floats(100.0, 1e9))
def test_a_value_far_above_all_others_is_a_spike(values: list[float], spike: float) -> None:
    detector = SpikeDetector(threshold=8.0)
    detector.values.extend(values)
    assert detector.add(spike) is not None


def test_the_first_values_are_never_spikes_and_a_new_level_becomes_usual() -> None:
    detector = SpikeDetector(threshold=8.0)
    assert [detector.add(float(10**number)) for number in range(MIN_VALUES)] == [None] * MIN_VALUES
    level = SpikeDetector(threshold=8.0)
    found = [level.add(value) is not None for value in [1.0] * WINDOW + [5.0] * WINDOW]
    assert found[WINDOW]
    assert not any(found[WINDOW + WINDOW // 2 + 1 :])


@given(st.data(), st.floats(0.0, 1.0), st.integers(1, 2 * WINDOW))
def test_a_loss_of_rounding_noise_and_small_values_never_alarms(data: st.DataObject, share: float, count: int) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**31)))
    detector = SpikeDetector(threshold=8.0)
    losses = [rng.gauss(0.0, 1e-8 if rng.random() < share else 0.2) for _ in range(count)]
    assert [detector.add(loss) for loss in losses] == [None] * count


def test_gradients_of_the_few_iterations_with_advantages_never_alarm() -> None:
    detector = SpikeDetector(threshold=8.0)
    norms = [3.0 + number % 7 * 0.2 if number % 5 == 0 else 0.0 for number in range(200)]  # four of five have none
    assert not any(detector.add(norm) for norm in norms)
    assert detector.add(30.0) is not None


def test_a_jump_out_of_noise_is_a_spike() -> None:
    detector = SpikeDetector(threshold=8.0)
    assert not any(detector.add(1e-4 * (-1) ** number) for number in range(WINDOW))
    assert detector.add(50.0) == 1.0


# ---- the callback
def test_a_spike_is_warned_of_once_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = fit(MetricAlarm(), Logs("actor/kl", {12: 50.0}))
    assert trainer.global_step == 15
    (warning,) = [record.getMessage() for record in caplog.records if "actor/kl" in record.getMessage()]
    assert warning == "iteration 12: actor/kl is 50, a spike above 2"


@pytest.mark.parametrize("value", [3.5, math.nan, math.inf])
def test_a_limit_ends_training_after_its_iteration(value: float) -> None:
    trainer = fit(MetricAlarm({"my/*": 3.0}, action="stop"), Logs("my/ratio", {4: value}))
    assert trainer.global_step == 5


def test_an_alarm_that_fails_raises_with_the_values() -> None:
    with pytest.raises(ReallocError, match=r"iteration 2: actor/kl is 4, above its limit of 3; lower the learning"):
        fit(MetricAlarm({"actor/kl": 3.0}, action="fail"), Logs("actor/kl", {2: 4.0}))
    advised = {"actor/kl": Bound(high=3.0, advice="raise kl_coef")}
    with pytest.raises(ReallocError, match=r"limit of 3: raise kl_coef; use MetricAlarm\(action='warn'\) to go on$"):
        fit(MetricAlarm(advised, action="fail"), Logs("actor/kl", {2: 4.0}))


def test_a_metric_that_is_never_logged_is_named_once_with_similar_ones() -> None:
    alarm = MetricAlarm({"actor/gradnorm": 3.0, "actor/loss": 1e9, "nothing/*": 1.0}, spikes=("actor/los",))
    with pytest.warns(UserWarning, match="MetricAlarm") as found:
        fit(alarm, Logs("actor/kl", {}), num_iterations=3)
    texts = [str(each.message) for each in found if "MetricAlarm" in str(each.message)]
    assert [text.split("'")[1] for text in texts] == ["actor/gradnorm", "nothing/*", "actor/los"]
    assert "similar ones are actor/grad_norm" in texts[0]
    assert "actor/loss" in texts[2]


def test_metrics_that_are_logged_and_the_default_patterns_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MetricAlarm")
        fit(MetricAlarm({"actor/loss": 1e9, "*/grad_norm": 1e9}), Logs("my/ratio", {}), num_iterations=2)


def test_values_are_kept_in_checkpoints() -> None:
    alarm, other = MetricAlarm(), MetricAlarm()
    fit(alarm, Logs("actor/kl", {}))
    other.load_state_dict(alarm.state_dict())
    assert other.state_dict() == alarm.state_dict()
    assert len(alarm.state_dict()["values"]["actor/kl"]) == 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limits": {"loss": {"low": 1}}}, "must be a finite number, or a Bound such as"),
        ({"action": "halt"}, "action='halt' must be one of warn, stop, fail"),
        ({"limits": {"a": math.nan}}, r"limits\['a'\]=nan must be a finite number"),
        ({"limits": {"a": "x"}}, r"limits\['a'\]='x' must be a finite number"),
        ({"limits": {"a": None}}, r"limits\['a'\]=None must be a finite number"),
        ({"limits": 5}, "limits=5 must map metrics to numbers"),
        ({"spikes": 5}, "spikes=5 must be names of metrics"),
        ({"spikes": [5]}, r"spikes=\[5\] must be names of metrics"),
        ({"threshold": "8"}, "threshold='8' must be a finite number"),
        ({"min_spike": math.nan}, "min_spike=nan must be a finite number"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricAlarm(**settings)
