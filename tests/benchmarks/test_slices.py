"""Turns, seconds and failures of sliced arms."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby

import pytest

from benchmarks.slices import NUM_SLICES, SlicedArms


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def arm(name: str, seconds: float, sliced: SlicedArms, log: list[str]) -> Callable[[], None]:
    """Return an arm of 48 steps that takes ``seconds``."""

    def run() -> None:
        for _ in range(2 * NUM_SLICES):
            log.append(name)
            work(seconds / (2 * NUM_SLICES))
            sliced.give_way()

    return run


@pytest.mark.timeout(30)
def test_arms_take_turns_to_the_end_and_report_their_own_seconds() -> None:
    log: list[str] = []
    with SlicedArms(("slow", "fast")) as sliced:
        arms = {"slow": arm("slow", 0.24, sliced, log), "fast": arm("fast", 0.06, sliced, log)}
        sliced.run(arms)
        log.clear()
        begin = time.perf_counter()
        seconds = sliced.run(arms)
        elapsed = time.perf_counter() - begin
    assert seconds["slow"] >= 0.24 and seconds["fast"] >= 0.06
    assert sum(seconds.values()) <= elapsed, "no arm counts the other's seconds"
    assert len([name for name, _ in groupby(log)]) > NUM_SLICES
    assert "slow" in log[-12:] and "fast" in log[-12:]  # a fourth of the seconds, but both end at the same time


@pytest.mark.timeout(30)
def test_a_failing_arm_lets_the_others_end_and_is_reported() -> None:
    log: list[str] = []

    def fail() -> None:
        raise ValueError("no such model")

    with SlicedArms(("failing", "other")) as sliced, pytest.raises(ValueError, match="no such model"):
        sliced.run({"failing": fail, "other": arm("other", 0.05, sliced, log)})
    assert len(log) == 2 * NUM_SLICES
