"""Waits before retries, computed by hand."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime

import pytest

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.retries import Retries, retry_after_s

NOON = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


class Longest(random.Random):
    """A random source that returns the upper bound."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_waits_double_up_to_a_bound_and_end() -> None:
    retries = Retries(count=5, first_wait_s=0.5, max_wait_s=3.0)
    waits = [retries.wait_s(attempt, None, Longest()) for attempt in range(7)]
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0, None, None]
    assert Retries(count=0).wait_s(0, None, Longest()) is None
    assert Retries(count=2000, max_wait_s=3.0).wait_s(1999, None, Longest()) == 3.0


def test_waits_are_spread_over_the_upper_half_of_their_length() -> None:
    rng = random.Random(0)
    waits = [Retries(first_wait_s=2.0).wait_s(0, None, rng) or 0.0 for _ in range(200)]
    assert 1.0 <= min(waits) < 1.1 and 1.9 < max(waits) <= 2.0


def test_retry_after_is_the_shortest_wait_and_too_long_ends_retries() -> None:
    retries = Retries(first_wait_s=0.5, max_wait_s=60.0)
    assert retries.wait_s(0, 7.0, Longest()) == 7.0
    assert retries.wait_s(0, 0.0, Longest()) == 0.5
    assert retries.wait_s(0, 60.0, Longest()) == 60.0
    assert retries.wait_s(0, 61.0, Longest()) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Sun, 01 Mar 2026 12:00:30 GMT", 30.0),
        ("Sun, 01 Mar 2026 12:00:30 -0000", 30.0),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("²", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, NOON) == seconds


@pytest.mark.parametrize(
    "settings", [{"count": -1}, {"first_wait_s": 0.0}, {"max_wait_s": math.inf}, {"max_wait_s": math.nan}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(RewardError, match=f"retries.{next(iter(settings))}="):
        Retries(**settings)  # type: ignore[arg-type]
