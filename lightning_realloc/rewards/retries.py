"""Retry policy for HTTP requests: exponential backoff with jitter. Pure: time and random source are arguments."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from lightning_realloc.errors import RewardError
from lightning_realloc.retries.attempts import backoff_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Number of retries and waits between them.

    Args:
        count: Retries after the first attempt.
        first_wait_s: Maximum wait before the first retry, in seconds; it doubles with each retry.
        max_wait_s: Maximum wait, in seconds. If the server requests a longer one by ``Retry-After``, there is no retry.

    Example:
        >>> import random
        >>> Retries(count=2, first_wait_s=1.0).wait_s(2, None, random.Random(0)) is None
        True
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

    def wait_s(self, attempt: int, server_wait_s: float | None, rng: random.Random) -> float | None:
        """Return the seconds before the next attempt; None if there is none.

        The wait is random, so that clients that failed together do not retry together; see `backoff_s`.

        Args:
            attempt: Number of the last attempt, from 0.
            server_wait_s: Seconds that the server requested; None if it did not.
        """
        if attempt >= self.count or (server_wait_s is not None and server_wait_s > self.max_wait_s):
            return None
        own_s = backoff_s(attempt, rng.uniform, first_wait_s=self.first_wait_s, max_wait_s=self.max_wait_s)
        return max(server_wait_s or 0.0, own_s)


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Return the seconds in a ``Retry-After`` header; None if it is missing or cannot be read.

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
    if date.tzinfo is None:  # "-0000": an unknown time zone
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())
