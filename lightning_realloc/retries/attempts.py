"""Repeat an action on a disk or an object store after an error that may pass, with random waits that double."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_realloc.errors import describe_error
from lightning_realloc.retries.causes import may_pass

log = logging.getLogger(__name__)
T = TypeVar("T")

TRIES = 3
"""Attempts of an action. More outlast longer failures, and report lasting ones later."""
FIRST_WAIT_S = 1.0
"""Most seconds before the second attempt; they double with each further one."""
_WAS_TRIED = "_tried_by_lightning_realloc"
"""Attribute of an error that all attempts of an action met, for actions around that one."""
sleep: Callable[[float], None] = time.sleep
"""Waits between two attempts. Tests put a clock of their own in its place."""


def retried(action: Callable[[], T], place: object, *, tries: int = TRIES) -> T:
    """Return the result of an action, which is tried ``tries`` times if its errors may pass, see `may_pass`.

    Waits between attempts are random, so that ranks that failed together do not try again together. An action may
    hold others: if all attempts of an inner one failed, the outer one is not tried again.

    Args:
        action: May be repeated after it failed midway.
        place: Path or address that it reads or writes, for the log.
    """
    began_at = time.monotonic()
    for attempt in range(tries):
        try:
            result = action()
        except Exception as error:  # stores raise errors of any class
            if _was_tried(error) or not may_pass(error, is_remote="://" in str(place)):
                raise
            if attempt == tries - 1:
                setattr(error, _WAS_TRIED, True)
                raise
            wait_s = backoff_s(attempt, random.uniform, first_wait_s=FIRST_WAIT_S)
            said = (place, attempt + 2, tries, wait_s, describe_error(error))
            log.warning("%s failed, attempt %d of %d follows in %.2f s: %s", *said)
            sleep(wait_s)
            continue
        if attempt:
            log.info("%s answers again after %.2f s", place, time.monotonic() - began_at)
        return result
    raise AssertionError("the last attempt returns or raises")


def backoff_s(
    attempt: int, uniform: Callable[[float, float], float], *, first_wait_s: float, max_wait_s: float = math.inf
) -> float:
    """Return the seconds to wait after an attempt, counted from 0: half to all of a value that doubles each time.

    Source: Brooker, "Exponential backoff and jitter", AWS Architecture Blog, 2015.
    """
    return min(first_wait_s * 2.0 ** min(attempt, 60), max_wait_s) * uniform(0.5, 1.0)


def _was_tried(error: BaseException | None) -> bool:
    """Return whether an error, or one that it follows from, has ended all attempts of an inner action."""
    while error is not None:
        if hasattr(error, _WAS_TRIED):
            return True
        error = error.__cause__ or error.__context__
    return False
