"""Joules between two readings of the counter, and devices without one."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from lightning_realloc.runtime.measure.energy import EnergyMeter


def test_the_meter_returns_the_joules_since_the_last_reading() -> None:
    millijoules = iter([1_000_000, 1_002_500, 1_002_500, 1_010_000])
    nvml = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(millijoules))
    meter = EnergyMeter(nvml, handle="the first GPU")
    assert [meter.take() for _ in range(3)] == [2.5, 0.0, 7.5]


def test_a_cpu_has_no_meter() -> None:
    assert EnergyMeter.for_device(torch.device("cpu")) is None
