"""Progress within a long activity, such as a call: finished and all parts, and counts of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivityProgress:
    """How much of an activity is done, on this rank."""

    done: int
    """Finished parts."""
    total: int | None
    """All parts; None if their number is not known before the end."""
    unit: str
    """Name of several parts, such as ``"samples"``."""
    num_tokens: int | None = None
    """Tokens of all responses so far; None if the activity generates none."""
    longest: int | None = None
    """Tokens of the longest response that is not finished; None without one."""


class PartCounter:
    """Counts the finished parts of an activity. Written by the thread that trains, read by any thread.

    Args:
        total: All parts; None if their number is not known.
        unit: Name of several parts.
    """

    def __init__(self, total: int | None, unit: str) -> None:
        self._total, self._unit, self._done = total, unit, 0

    def advance(self) -> None:
        """Count a finished part. Parts beyond the total, such as repeated ones, are left out."""
        self._done += 1

    def read(self) -> ActivityProgress:
        """Return the progress so far."""
        done = self._done if self._total is None else min(self._done, self._total)
        return ActivityProgress(done, self._total, self._unit)
