"""Load of a data-parallel generation rank, how long it takes to finish, and what a move of a sample costs.

Ranks report these values and `balance_policy` plans moves from them. Pure: no clock, no tensor.
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
"""How a running sample's keys and values reach the target: sent, or computed there again from its tokens."""


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of a decode step by its number of rows."""

    knots: tuple[tuple[float, float], ...]
    """Measured (rows, seconds): rows ascend, seconds never fall."""

    def __post_init__(self) -> None:
        positive = bool(self.knots) and self.knots[0][0] > 0 and self.knots[0][1] > 0
        if not positive or any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.knots)):
            raise GenerationError(
                "knots of a step curve are positive, their rows ascend and their seconds never fall, "
                f"got {self.knots}; sort what was measured by rows and take the running maximum of the seconds"
            )

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step with ``rows`` rows; without rows there is no step.

        Linear between knots and constant below the first. The last slope continues beyond the last knot; a single
        knot has no slope, and seconds beyond it are proportional to rows.
        """
        first_rows, first_s = self.knots[0]
        if rows <= first_rows:
            return first_s if rows > 0 else 0.0
        if len(self.knots) == 1:
            return first_s * rows / first_rows
        above = min(bisect_left(self.knots, rows, key=itemgetter(0)), len(self.knots) - 1)
        (low, low_s), (high, high_s) = self.knots[above - 1 : above + 1]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)


@dataclass(frozen=True, slots=True)
class LiveSample:
    """A response that is not finished."""

    sample_id: int
    context_tokens: int
    """Tokens of prompt and response so far; keys and values of as many, once it has begun."""
    remaining_tokens: float
    """Expected number of tokens to come."""
    last_moved_round: int | None = None
    """Round in which it last changed its rank; None: never."""
    has_begun: bool = True
    """Whether some rank holds keys and values of its response."""

    def __post_init__(self) -> None:
        assert self.context_tokens >= 0 and self.remaining_tokens >= 0, f"sample {self.sample_id}: negative tokens"


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Samples, slots and speed of one rank."""

    rank: int
    samples: tuple[LiveSample, ...]
    """Running samples; each holds a slot."""
    waiting: tuple[LiveSample, ...]
    """Queued samples, in the order in which they will get slots."""
    curve: StepCurve
    free_slots: int
    tokens_per_row_step: float = 1.0
    """Tokens that a step adds to a row on average; above 1 with speculative decoding."""

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
        """Largest number of running samples."""
        return len(self.samples) + self.free_slots

    @property
    def live(self) -> tuple[LiveSample, ...]:
        """Unfinished samples, running ones first."""
        return self.samples + self.waiting

    @property
    def rows(self) -> int:
        """Rows of the next step, in which queued samples take the free slots."""
        return min(len(self.live), self.num_slots)


def drain_seconds(load: RankLoad) -> float:
    """Return the seconds until the rank has finished all of its samples.

    All rows advance by the same number of tokens in a step. So the order in which samples finish is known in steps,
    and only the seconds between two of them depend on the rows. A queued sample takes a slot as soon as one is free.
    Reading prompts is not counted. O(n log n).
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
    """A change of one sample's rank."""

    sample_id: int
    source: int
    target: int
    how: Handover
    """A queued sample has nothing to send: "recompute"."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Cost of moving a running sample. A queued one moves for free."""

    bytes_per_token: float
    """Keys and values of one token of context, over all layers."""
    bytes_per_s: float
    """Bandwidth of the link."""
    latency_s: float
    """Seconds until a message of no bytes arrives."""
    prefill_tokens_per_s: float
    """Speed at which the target computes keys and values again."""
    stall_s: float
    """Seconds per moved sample in which neither rank decodes."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.prefill_tokens_per_s <= 0:
            raise GenerationError(
                "rates of a move are positive, got "
                f"bytes_per_s={self.bytes_per_s}, prefill_tokens_per_s={self.prefill_tokens_per_s}; measure them first"
            )

    def handover(self, sample: LiveSample) -> tuple[Handover, float]:
        """Return the faster way to bring a running sample's keys and values to the target, and its seconds."""
        send_s = self.latency_s + sample.context_tokens * self.bytes_per_token / self.bytes_per_s
        recompute_s = self.latency_s + sample.context_tokens / self.prefill_tokens_per_s
        return ("send", send_s) if send_s <= recompute_s else ("recompute", recompute_s)
