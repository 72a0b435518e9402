"""What a data-parallel generation rank still has to do, and how long that takes it.

Ranks publish these values; `balance` decides on them. Pure: no clock, no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import islice, pairwise
from operator import itemgetter
from typing import Literal

from lightning_realloc.errors import GenerationError

Handover = Literal["send", "recompute"]


@dataclass(frozen=True, slots=True)
class StepCurve:
    """How long a decode step takes, by the number of rows in it."""

    knots: tuple[tuple[float, float], ...]
    """(rows, seconds), measured: rows ascending, seconds never falling."""

    def __post_init__(self) -> None:
        positive = bool(self.knots) and self.knots[0][0] > 0 and self.knots[0][1] > 0
        if not positive or any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.knots)):
            raise GenerationError(
                "knots of a step curve are positive, their rows ascend and their seconds never fall, "
                f"got {self.knots}; sort what was measured by rows and take the running maximum of the seconds"
            )

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step with ``rows`` rows; no rows, no step.

        Linear between knots, the first knot's seconds below it. Past the last knot the last slope goes on; a single
        knot has none, there seconds are proportional to rows.
        """
        first_rows, first_s = self.knots[0]
        if rows <= first_rows:
            return first_s if rows > 0 else 0.0
        if len(self.knots) == 1:
            return first_s * rows / first_rows
        above = min(bisect_left(self.knots, rows, key=itemgetter(0)), len(self.knots) - 1)
        (low, low_s), (high, high_s) = self.knots[above - 1 : above + 1]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def knee_rows(self, tolerance: float = 0.1) -> float:
        """Return up to how many measured rows a step takes at most ``1 + tolerance`` of its shortest time."""
        limit = self.knots[0][1] * (1 + tolerance)
        for (low, low_s), (high, high_s) in pairwise(self.knots):
            if high_s > limit:
                return low + (high - low) * (limit - low_s) / (high_s - low_s)
        return self.knots[-1][0]


@dataclass(frozen=True, slots=True)
class LiveSample:
    """A response that is not finished."""

    sample_id: int
    context_tokens: int
    """Prompt and response so far: what its keys and values hold, once it has begun."""
    remaining_tokens: float
    """Expected."""
    last_moved_step: int | None = None
    """When it last changed its rank; None: never."""
    has_begun: bool = True
    """Whether it has keys and values somewhere."""

    def __post_init__(self) -> None:
        assert self.context_tokens >= 0 and self.remaining_tokens >= 0, f"sample {self.sample_id}: negative tokens"


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank publishes."""

    rank: int
    samples: tuple[LiveSample, ...]
    """Running: each holds a slot."""
    waiting: tuple[LiveSample, ...]
    """Not begun, in the order in which they will get slots."""
    curve: StepCurve
    free_slots: int
    tokens_per_row_step: float = 1.0
    """Tokens that a step adds to a row on average: more than one with speculation."""
    waiting_call_s: float = 0.0
    """Of calls that could work on what is finished here, were the rank free."""

    def __post_init__(self) -> None:
        assert self.free_slots >= 0, f"rank {self.rank} has {self.free_slots} free slots"
        if self.waiting and not self.num_slots:
            raise GenerationError(
                f"rank {self.rank} has {len(self.waiting)} samples waiting and no slot; give it at least one slot"
            )
        if not self.tokens_per_row_step > 0:
            raise GenerationError(
                f"rank {self.rank} adds tokens_per_row_step={self.tokens_per_row_step} to a row; "
                "it has to be positive, 1.0 without speculation"
            )

    @property
    def num_slots(self) -> int:
        """Rows that fit."""
        return len(self.samples) + self.free_slots

    @property
    def live(self) -> tuple[LiveSample, ...]:
        """Samples that are not finished, running ones first."""
        return self.samples + self.waiting

    @property
    def rows(self) -> int:
        """Rows of the next step: free slots are given to those who wait."""
        return min(len(self.live), self.num_slots)

    @property
    def remaining_tokens(self) -> float:
        """Expected, of all samples."""
        return sum(sample.remaining_tokens for sample in self.live)


def drain_seconds(load: RankLoad) -> float:
    """Return when the rank will have finished everything it holds, in seconds from now.

    Every row advances alike, whoever else is in the step; so the order of events is known in steps, and only the
    time between two of them depends on the rows. A slot is given to the next waiting sample as soon as its owner ends.
    Computing prompts is not counted. O(n log n).
    """
    waiting = iter([sample.remaining_tokens / load.tokens_per_row_step for sample in load.waiting])
    ends = sorted(sample.remaining_tokens / load.tokens_per_row_step for sample in load.samples)  # sorted, so a heap
    for begun in islice(waiting, load.free_slots):
        heappush(ends, begun)
    now = seconds = step_s = 0.0
    rows = 0
    while ends:
        if len(ends) != rows:
            rows = len(ends)
            step_s = load.curve.seconds(rows)
        seconds += (ends[0] - now) * step_s
        now = ends[0]
        following = next(waiting, None)
        if following is None:
            heappop(ends)
        else:
            heapreplace(ends, now + following)
    return seconds


@dataclass(frozen=True, slots=True)
class SampleMove:
    """A sample changes its rank."""

    sample_id: int
    source: int
    target: int
    how: Handover
    """Its keys and values are sent, or its tokens alone and the target computes the rest again. A sample that has not
    begun has nothing to send."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """What it takes to move a running sample. One that waits moves for nothing."""

    bytes_per_token: float
    """Keys and values of one token of context, over all layers."""
    bytes_per_s: float
    """Of the link."""
    latency_s: float
    """Of a message."""
    prefill_tokens_per_s: float
    """At which the target computes keys and values again."""
    stall_s: float
    """Both ranks stand still this long for each sample that is handed over."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.prefill_tokens_per_s <= 0:
            raise GenerationError(
                "rates of a move are positive, got "
                f"bytes_per_s={self.bytes_per_s}, prefill_tokens_per_s={self.prefill_tokens_per_s}; measure them first"
            )

    def handover(self, sample: LiveSample) -> tuple[Handover, float]:
        """Return the quicker way to have a running sample's keys and values at the target, and its seconds."""
        send_s = self.latency_s + sample.context_tokens * self.bytes_per_token / self.bytes_per_s
        recompute_s = self.latency_s + sample.context_tokens / self.prefill_tokens_per_s
        return ("send", send_s) if send_s <= recompute_s else ("recompute", recompute_s)
