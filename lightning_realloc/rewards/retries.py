"""When is a server asked again, and how long after? Pure: the time and the random source are arguments."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from lightning_realloc.errors import RewardError

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers after which the same request may go well; any other tells what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often, and how patiently, one request is repeated.

    Args:
        count: Repetitions after the first attempt.
        first_wait_s: Longest wait before the first repetition; it doubles with each.
        max_wait_s: Longest wait at all. A server that asks for more, by ``Retry-After``, is not asked again.
    """

    count: int = 4
    first_wait_s: float = 0.5
    max_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise RewardError(f"retries.count={self.count} may not be negative; 0 asks once")
        for name in ("first_wait_s", "max_wait_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise RewardError(f"retries.{name}={value} must be above 0 and finite")

    def wait_s(self, attempt: int, asked_s: float | None, rng: random.Random) -> float | None:
        """Return the seconds before the next attempt, None where there is none.

        Between half and all of what doubling gives: clients that failed together do not come back together.
        Source: Brooker, "Exponential backoff and jitter", AWS Architecture Blog, 2015.

        Args:
            attempt: Of those made, the last one's number, from 0.
            asked_s: What the server asked for.
        """
        if attempt >= self.count or (asked_s is not None and asked_s > self.max_wait_s):
            return None
        doubled = min(self.first_wait_s * 2.0 ** min(attempt, 60), self.max_wait_s)
        return max(asked_s or 0.0, doubled * rng.uniform(0.5, 1.0))


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for; None without one that can be read.

    Source: RFC 9110, §10.2.3: a number of seconds, or a date.
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000": of no known zone
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())
