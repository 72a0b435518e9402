"""Waiting of a generating call for its environments: spans without generation, and waiting samples over time. Pure.

Both have a bounded size, however long a call takes and however many turns its conversations have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_SPANS = 200
"""Spans without generation that are kept; a smaller number draws them at places that are less exact."""
MAX_BINS = 256
"""Bins of waiting samples; their width doubles where a call takes longer, so that at least half as many remain."""
FIRST_BIN_S = 0.01
"""Seconds of a bin in a short call."""


@dataclass(frozen=True, slots=True)
class WaitingOverTime:
    """Number of samples that wait for their environments, over time."""

    begin: float
    """Start of the first bin, in seconds."""
    bin_s: float
    """Seconds of a bin."""
    means: tuple[float, ...]
    """Mean number of samples that waited in each bin."""


@dataclass(frozen=True, slots=True)
class EnvironmentWaits:
    """Waiting of a call for its environments, on one rank."""

    idle: tuple[tuple[float, float], ...]
    """Start and seconds of spans in which nothing was generated, in order; their sum is exact, short ones are joined
    with the next."""
    samples: WaitingOverTime

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing was generated."""
        return sum(seconds for _, seconds in self.idle)

    def shifted(self, seconds: float) -> EnvironmentWaits:
        """Return the same waiting on a clock that is ``seconds`` ahead."""
        idle = tuple((begin + seconds, length) for begin, length in self.idle)
        return EnvironmentWaits(idle, replace(self.samples, begin=self.samples.begin + seconds))


class WaitMeter:
    """Measures the waiting of a call for its environments."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        """Seconds so far in which nothing was generated."""
        self.reply_s = 0.0
        """Seconds so far in which models answered environments."""
        self.num_replies = self.num_reply_tokens = 0
        self._idle: list[tuple[float, float]] = []
        self._idle_since: float | None = None
        self._begin: float | None = None
        """Start of the first bin; None before anything waited."""
        self._bin_s = FIRST_BIN_S
        self._sample_s: list[float] = []
        """Seconds of all waiting samples in each bin."""
        self._num_waiting, self._since = 0, 0.0

    @property
    def is_idle(self) -> bool:
        """Whether a span has begun in which nothing is generated."""
        return self._idle_since is not None

    def count(self, now: float, num_waiting: int) -> None:
        """Record that this many samples wait from ``now`` on, in seconds of any clock."""
        if self._begin is None:
            if not num_waiting:
                return
            self._begin = self._since = now
        while now - self._begin >= MAX_BINS * self._bin_s:
            pairs = [*self._sample_s, 0.0][: len(self._sample_s) + len(self._sample_s) % 2]
            self._sample_s = [sum(pairs[place : place + 2]) for place in range(0, len(pairs), 2)]
            self._bin_s *= 2
        last = int((now - self._begin) / self._bin_s)
        self._sample_s += [0.0] * (last + 1 - len(self._sample_s))
        if self._num_waiting:
            for place in range(int((self._since - self._begin) / self._bin_s), last + 1):
                begin = self._begin + place * self._bin_s
                overlap = min(now, begin + self._bin_s) - max(self._since, begin)
                self._sample_s[place] += self._num_waiting * max(0.0, overlap)
        self._num_waiting, self._since = num_waiting, now

    def begin_idle(self, now: float) -> None:
        """Begin a span in which nothing is generated, unless one has begun."""
        if self._idle_since is None:
            self._idle_since = now

    def end_idle(self, now: float) -> None:
        """End the span in which nothing is generated, if one has begun."""
        begin, self._idle_since = self._idle_since, None
        if begin is None or now <= begin:
            return
        self.idle_s += now - begin
        self._idle.append((begin, now - begin))
        if len(self._idle) > 2 * MAX_SPANS:
            self._idle = _joined(self._idle, MAX_SPANS)

    def count_replies(self, seconds: float, lengths: Sequence[int]) -> None:
        """Record the seconds of a model's replies to environments, and their tokens."""
        self.reply_s += seconds
        self.num_replies += len(lengths)
        self.num_reply_tokens += sum(lengths)

    def waits(self) -> EnvironmentWaits | None:
        """Return the waiting so far; None if nothing waited."""
        if self._begin is None and not self._idle:
            return None
        idle = _joined(self._idle, MAX_SPANS)
        begin = idle[0][0] if self._begin is None else self._begin
        means = tuple(seconds / self._bin_s for seconds in self._sample_s)
        return EnvironmentWaits(tuple(idle), WaitingOverTime(begin, self._bin_s, means))


def _joined(spans: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most this many spans: those with the shortest gaps between them become one, with the sum of seconds."""
    if len(spans) <= most:
        return list(spans)
    gaps = [after[0] - before[0] - before[1] for before, after in pairwise(spans)]
    widest = sorted(gaps)[len(spans) - most - 1]
    found = [spans[0]]
    for gap, (begin, seconds) in zip(gaps, spans[1:], strict=True):
        if gap <= widest:
            found[-1] = found[-1][0], found[-1][1] + seconds
        else:
            found.append((begin, seconds))
    return found
