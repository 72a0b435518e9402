"""Loads that data-parallel generation ranks report, the seconds until a rank finishes, and the cost of a move.

`balance_policy` plans moves from these values. Pure: no clock, no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, islice, pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lightning_realloc.errors import GenerationError

Handover = Literal["send", "recompute"]
"""Way of a running sample's keys and values to the target: sent, or recomputed there from its tokens."""


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

    @classmethod
    def from_means(cls, means: Iterable[tuple[float, float]]) -> StepCurve:
        """Return the curve through the running maximum of measured (rows, seconds), at least one."""
        rows, seconds = zip(*sorted(means), strict=True)
        return cls(tuple(zip(rows, accumulate(seconds, max), strict=True)))

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step with ``rows`` rows; 0 without rows.

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


class LiveSample(NamedTuple):
    """A response that is not finished."""

    sample_id: int
    context_tokens: int
    """Tokens of prompt and response so far."""
    remaining_tokens: float
    """Expected number of tokens to come."""
    last_moved_round: int | None = None
    """Round in which the sample last changed its rank; None: never."""
    has_begun: bool = True
    """Whether some rank holds keys and values of its response."""


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
        assert self.free_slots >= 0 and self.tokens_per_row_step > 0, self
        if self.waiting and not self.num_slots:
            raise GenerationError(
                f"rank {self.rank} has {len(self.waiting)} samples waiting and no slot; give it at least one slot"
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
    """Keys and values of one token of context, over all layers; infinity if they cannot leave."""
    bytes_per_s: float
    """Bandwidth of the link."""
    latency_s: float
    """Seconds until a message of no bytes arrives."""
    prefill_tokens_per_s: float
    """Speed at which the target computes keys and values again."""
    stall_s: float
    """Seconds per moved sample in which neither rank decodes."""

    def __post_init__(self) -> None:
        assert self.bytes_per_s > 0 and self.prefill_tokens_per_s > 0, self

    def handover(self, sample: LiveSample) -> tuple[Handover, float]:
        """Return the faster way to bring a running sample's keys and values to the target, and its seconds."""
        send_s = self.latency_s + sample.context_tokens * self.bytes_per_token / self.bytes_per_s
        recompute_s = self.latency_s + sample.context_tokens / self.prefill_tokens_per_s
        return ("send", send_s) if send_s <= recompute_s else ("recompute", recompute_s)


class PaceReport(NamedTuple):
    """Measured speed of a rank."""

    knots: tuple[tuple[float, float], ...]
    """(rows, seconds) of its steps; empty before the first one."""
    tokens_per_row_step: float
    bytes_per_s: float
    prefill_tokens_per_s: float
    stall_s: float
    step_s: float = 0.0
    """Mean seconds of the steps since the last report, prefills included; 0 without any."""


class LoadReport(NamedTuple):
    """Samples, slots and speed of one rank in one round. Named tuples, so that JSON encodes them."""

    rank: int
    running: tuple[LiveSample, ...]
    """Running samples, except those that are about to leave."""
    waiting: tuple[LiveSample, ...]
    """Queued samples, except those that are about to leave."""
    incoming: tuple[LiveSample, ...]
    """Samples planned to arrive. One that could not leave its source is reported by the source as well."""
    free_slots: int
    bytes_per_token: float
    """Cache bytes per token; 0 before the first step, infinity if keys and values cannot leave."""
    pace: PaceReport
    steps_s: float = 0.0
    """Seconds of all steps in this call so far."""
    evidence: tuple[float, float] = (0.0, 0.0)
    """Finished responses and their tokens; see `LengthPredictor.evidence`."""
    expected_since: int = 0
    """Round whose arrivals, and later ones, are still on their way; all earlier ones are here."""

    @property
    def live(self) -> tuple[LiveSample, ...]:
        """Unfinished samples."""
        return self.running + self.waiting + self.incoming

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> LoadReport:
        """Return the report that JSON turned into lists."""
        report = cls(*content)
        running, waiting, incoming = (tuple(LiveSample(*each) for each in samples) for samples in report[1:4])
        pace = PaceReport(*report.pace)
        pace = pace._replace(knots=tuple((rows, seconds) for rows, seconds in pace.knots))
        ends, tokens = report.evidence
        return report._replace(running=running, waiting=waiting, incoming=incoming, pace=pace, evidence=(ends, tokens))


def loads_from_reports(reports: Sequence[LoadReport]) -> tuple[tuple[RankLoad, ...], MoveCost] | None:
    """Return the loads of all ranks and the cost of a move; None while no rank has made a step.

    Ranks are assumed to be equally fast: a step size that one has not made takes the seconds that another one measured.
    A sample that several ranks report counts where it runs or waits, and as incoming on one rank only.
    """
    seen: defaultdict[float, list[float]] = defaultdict(list)
    for report in reports:
        for rows, seconds in report.pace.knots:
            seen[float(round(rows))].append(seconds)
    if not seen:
        return None
    if min(seen) > 1:
        # Guess that a step of one row takes half of the smallest observed one; a move or two correct it.
        seen[1.0] = [0.5 * fmean(seen[min(seen)])]
    curve = StepCurve.from_means((rows, fmean(seconds)) for rows, seconds in seen.items())
    placed = {sample.sample_id for report in reports for sample in (*report.running, *report.waiting)}
    loads = tuple(_load_from_report(report, curve, placed) for report in reports)
    cost = MoveCost(
        bytes_per_token=max(report.bytes_per_token for report in reports),
        bytes_per_s=min(report.pace.bytes_per_s for report in reports),
        latency_s=1e-3,  # a guess
        prefill_tokens_per_s=min(report.pace.prefill_tokens_per_s for report in reports),
        stall_s=max(report.pace.stall_s for report in reports),
    )
    return loads, cost


def _load_from_report(report: LoadReport, curve: StepCurve, placed: set[int]) -> RankLoad:
    """Return a rank's load with its incoming samples that are not ``placed`` yet, and add these to ``placed``."""
    incoming = [sample for sample in report.incoming if sample.sample_id not in placed]
    placed |= {sample.sample_id for sample in incoming}
    begun = tuple(sample for sample in incoming if sample.has_begun)
    running = report.running + begun
    waiting = report.waiting + tuple(sample for sample in incoming if not sample.has_begun)
    # Where every running sample is about to leave, the queued ones will get their slots and pages.
    free_slots = max(report.free_slots - len(begun), int(bool(waiting) and not running))
    return RankLoad(report.rank, running, waiting, curve, free_slots, report.pace.tokens_per_row_step)
