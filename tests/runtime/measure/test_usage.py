"""Peaks of several readers, each since its own last reading, and joules between two readings."""

from __future__ import annotations

from mmap import mmap
from types import SimpleNamespace

import pytest
import torch

from lightning_realloc.runtime.measure.usage import EnergyMeter, PeakMemory, resident_bytes

MIB = 1 << 20


@pytest.fixture
def memory() -> PeakMemory:
    memory = PeakMemory(torch.device("cpu"))
    if memory.take("probe") is None:
        pytest.skip("this system cannot reset the peak of resident memory")
    return memory


def touch(num_bytes: int) -> None:
    """Take memory of the system, write to it, and give it back: a tensor may get what another test has freed."""
    with mmap(-1, num_bytes) as block:
        for page in range(0, num_bytes, 4096):
            block[page] = 1


def test_a_reader_sees_the_peak_since_its_last_reading(memory: PeakMemory) -> None:
    memory.take("calls")
    before = resident_bytes()
    assert before is not None
    touch(200 * MIB)
    assert memory.take("calls") - before > 190 * MIB  # type: ignore[operator]
    touch(50 * MIB)
    assert memory.take("calls") - before < 100 * MIB  # type: ignore[operator]


def test_a_reading_is_no_loss_to_other_readers_nor_to_the_run(memory: PeakMemory) -> None:
    memory.take("tuner")
    before = resident_bytes()
    assert before is not None
    touch(200 * MIB)
    for _ in range(3):
        memory.take("calls")
    assert memory.take("tuner") - before > 190 * MIB  # type: ignore[operator]
    assert memory.of_run() - before > 190 * MIB
    assert memory.take("tuner") - before < 100 * MIB  # type: ignore[operator]


def test_the_meter_returns_the_joules_since_the_last_reading() -> None:
    millijoules = iter([1_000_000, 1_002_500, 1_002_500, 1_010_000])
    nvml = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(millijoules))
    meter = EnergyMeter(nvml, handle="the first GPU")
    assert [meter.take() for _ in range(3)] == [2.5, 0.0, 7.5]


def test_a_cpu_has_no_meter() -> None:
    assert EnergyMeter.for_device(torch.device("cpu")) is None
