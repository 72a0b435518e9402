"""Record the latest activities of a rank: calls, waits and transfers, for messages about hangs and failures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lightning_realloc.runtime.messages.environment_waits import EnvironmentWaits

T = TypeVar("T")
ActivityKind = Literal["call", "move", "offload", "wait", "environment", "save", "other"]
"""Kind of an activity: a model function call, moving weights, offloading them, waiting for other ranks, waiting for
environments, saving."""
CAPACITY = 400
"""Activities that are kept: those of tens of iterations, in less than 100 kB."""


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


@dataclass(slots=True)
class Activity:
    """Something that a rank does, from one moment to another."""

    name: str
    """Name of a call, or description of a wait or transfer."""
    began_at: float
    """Seconds of `time.monotonic`."""
    depth: int
    """Number of activities around it."""
    waits_for: tuple[int, ...] | None = None
    """Ranks that it waits for; None if it is work of this rank."""
    seconds: float | None = None
    """Duration; None while it lasts."""
    has_failed: bool = False
    """Whether an exception ended it."""
    kind: ActivityKind = "other"
    """Kind of the time outside of the activities within it."""
    waited_s: float = 0.0
    """Seconds of waiting within it that are no activity of their own."""
    environment_waits: EnvironmentWaits | None = None
    """Waiting for environments within it, from its beginning; None without any."""
    read_progress: Callable[[], ActivityProgress | None] | None = None
    """Returns its progress, to any thread; None if it reports none, and after its end."""
    parts: ActivityProgress | None = None
    """Its finished parts; None if it expects none."""

    def elapsed(self, now: float) -> float:
        """Return the duration until it ended, or until ``now``."""
        return now - self.began_at if self.seconds is None else self.seconds


BEFORE = "code before the first call"
"""Name of a run's start, which takes much longer than the code between two calls."""
BETWEEN = "code between two calls"
"""Name of the later time outside of all activities: Lightning's loops and callbacks."""


class FlightRecord:
    """Latest activities of one rank. Written by the thread that trains, read by any thread."""

    def __init__(self) -> None:
        self._latest: deque[Activity] = deque(maxlen=CAPACITY)
        self._open: list[Activity] = []
        self.start_run()
        self._longest: dict[str, float] = {}
        self.listener: Callable[[Activity], None] | None = None
        """Receives every activity when it ends."""

    def start_run(self) -> None:
        """Begin the time before a run's first activity. The time since an earlier run counts for nothing."""
        self._between = Activity(BEFORE, time.monotonic(), 0)

    @contextmanager
    def during(
        self, name: str, *, kind: ActivityKind = "other", waits_for: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Record what happens inside as an activity, within those that have not ended.

        Args:
            kind: What the time is spent on; "wait" if ``waits_for`` is given.
            waits_for: Ranks that this one waits for, () if they are not known.
        """
        waited = None if waits_for is None else tuple(waits_for)
        kind = kind if waited is None else "wait"
        activity = Activity(name, time.monotonic(), len(self._open), waited, kind=kind)
        if not self._open:
            self._end(self._between)
        self._latest.append(activity)
        self._open.append(activity)
        try:
            yield
        except BaseException:
            activity.has_failed = True
            raise
        finally:
            self._open.pop()
            activity.read_progress = None  # it may keep samples alive
            self._end(activity)
            if not self._open:
                self._between = Activity(BETWEEN, time.monotonic(), 0)
            if self.listener is not None:
                self.listener(activity)

    def insert(self, name: str, seconds: float, *, kind: ActivityKind) -> None:
        """Record an activity that ends now, and was measured elsewhere."""
        activity = Activity(name, time.monotonic() - seconds, len(self._open), seconds=seconds, kind=kind)
        self._latest.append(activity)
        if self.listener is not None:
            self.listener(activity)

    def add_wait(self, seconds: float) -> None:
        """Count seconds of waiting that were measured elsewhere for the innermost activity."""
        if self._open:
            self._open[-1].waited_s += seconds

    def add_environment_waits(self, waits: EnvironmentWaits) -> None:
        """Record the innermost activity's waiting for environments, on the clock of `time.monotonic`."""
        if self._open:
            self._open[-1].environment_waits = waits.shifted(-self._open[-1].began_at)

    # ---- progress of the innermost activity
    def follow(self, read_progress: Callable[[], ActivityProgress | None]) -> None:
        """Let ``read_progress`` report the innermost activity's progress. Other threads call it."""
        if self._open:
            self._open[-1].read_progress = read_progress

    def expect_parts(self, total: int | None, unit: str) -> None:
        """Start to count the finished parts of the innermost activity; ``total=None``: their number is not known."""
        if self._open:
            activity = self._open[-1]
            activity.parts = ActivityProgress(0, total, unit)
            activity.read_progress = lambda: activity.parts

    def advance(self) -> None:
        """Count a finished part if the innermost activity expects any; repeated ones beyond the total do not count."""
        parts = self._open[-1].parts if self._open else None
        if parts is not None and parts.done != parts.total:
            self._open[-1].parts = replace(parts, done=parts.done + 1)

    def counted(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield parts, and count each as finished when the next one is asked for."""
        for part in parts:
            yield part
            self.advance()

    def _end(self, activity: Activity) -> None:
        activity.seconds = time.monotonic() - activity.began_at
        if not activity.has_failed:
            self._longest[activity.name] = max(activity.seconds, self.longest_s(activity.name))

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been recorded."""
        return not self._latest

    def current(self) -> tuple[Activity, ...]:
        """Return the activities that have not ended, the outermost first; the time outside if there are none."""
        return tuple(self._open) or (self._between,)

    def latest(self) -> tuple[Activity, ...]:
        """Return the latest activities, the oldest first."""
        return tuple(self._latest)

    def longest_s(self, name: str) -> float:
        """Return the longest duration so far of activities with a name that have ended; 0 without any."""
        return self._longest.get(name, 0.0)

    def lines(self) -> list[str]:
        """Return a line for each activity, the oldest first: when it began, counted back from now, and its duration."""
        now = time.monotonic()
        return [_line(activity, now) for activity in self.latest()]


def _line(activity: Activity, now: float) -> str:
    state = " failed" if activity.has_failed else " so far" if activity.seconds is None else ""
    indent = "  " * activity.depth
    return f"{activity.began_at - now:10.3f} s  {indent}{activity.name}  {activity.elapsed(now):.3f} s{state}"
