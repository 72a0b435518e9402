"""Load report of one rank in one round, and the loads to plan from once the reports of all ranks are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from typing import Any

from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, StepCurve, drain_seconds
from lightning_realloc.generation.rebalance.pace import PaceReport

MESSAGE_LATENCY_S = 1e-3
"""Assumed latency of a message between ranks."""
ONE_ROW_SHARE = 0.5
"""Assumed seconds of a step of one row, as a share of the smallest observed step. A move or two correct the guess."""
MAX_QUIET_PERIODS = 4
"""Periods between two rounds, at most, while nothing moves. Raise it to save rounds, at the price of later moves."""
MAX_DRAIN_SHARE = 0.4
"""Share of the seconds until the first rank finishes that may pass without a round."""
_SAMPLE_FIELDS = ("running", "waiting", "incoming")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Samples, slots and speed of one rank in one round."""

    rank: int
    running: tuple[LiveSample, ...]
    """Running samples, except those that are about to leave."""
    waiting: tuple[LiveSample, ...]
    """Queued samples, except those that are about to leave."""
    incoming: tuple[LiveSample, ...]
    """Samples planned to arrive. One that could not leave its source is reported by the source as well."""
    free_slots: int
    bytes_per_token: int
    """Cache bytes per token; 0 before the first step."""
    pace: PaceReport
    steps_s: float = 0.0
    """Seconds of all steps in this call so far."""
    evidence: tuple[float, float] = (0.0, 0.0)
    """Finished responses and their tokens; see `LengthPredictor.evidence`."""
    expected_since: int = 0
    """Every shipment planned in a round before this one has arrived."""

    @property
    def live(self) -> tuple[LiveSample, ...]:
        """Unfinished samples."""
        return self.running + self.waiting + self.incoming

    def to_json(self) -> dict[str, Any]:
        """Return the input of `from_json`."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        content |= {name: [_entry(sample) for sample in getattr(self, name)] for name in _SAMPLE_FIELDS}
        return content | {"pace": astuple(self.pace)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LoadReport:
        """Return the report that another rank made."""
        samples = {name: tuple(LiveSample(*entry) for entry in content[name]) for name in _SAMPLE_FIELDS}
        knots, *numbers = content["pace"]
        pace = PaceReport(tuple((rows, seconds) for rows, seconds in knots), *numbers)
        return cls(**{**content, **samples, "pace": pace, "evidence": tuple(content["evidence"])})


def _entry(sample: LiveSample) -> tuple[int, int, float, int | None, bool]:
    return (
        sample.sample_id, sample.context_tokens, sample.remaining_tokens, sample.last_moved_round, sample.has_begun
    )  # fmt: skip


def loads_from_reports(reports: Sequence[LoadReport]) -> tuple[tuple[RankLoad, ...], MoveCost] | None:
    """Return the loads of all ranks and the cost of a move; None while no rank has made a step.

    Ranks are assumed to be equally fast: a step size that one has not made takes the seconds that another one measured.
    A sample that several ranks report counts where it runs or waits, and as incoming on one rank only.
    """
    seen: dict[float, list[float]] = {}
    for report in reports:
        for rows, seconds in report.pace.knots:
            seen.setdefault(float(round(rows)), []).append(seconds)
    if not seen:
        return None
    means = [(rows, sum(seconds) / len(seconds)) for rows, seconds in sorted(seen.items())]
    if means[0][0] > 1:
        means.insert(0, (1.0, ONE_ROW_SHARE * means[0][1]))
    curve = StepCurve(tuple(zip((rows for rows, _ in means), accumulate((s for _, s in means), max), strict=True)))
    placed = {sample.sample_id for report in reports for sample in (*report.running, *report.waiting)}
    loads = tuple(_load_from_report(report, curve, placed) for report in reports)
    cost = MoveCost(
        bytes_per_token=max(report.bytes_per_token for report in reports),
        bytes_per_s=min(report.pace.bytes_per_s for report in reports),
        latency_s=MESSAGE_LATENCY_S,
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


def next_round_s(loads: Sequence[RankLoad], period_s: float, num_quiet: int) -> float:
    """Return the seconds until the next round: more, the longer nothing moved.

    Args:
        loads: One of each rank.
        period_s: Seconds between two rounds while samples move.
        num_quiet: Last rounds in a row without a move.
    """
    if not num_quiet:
        return period_s
    longest_s = min(MAX_QUIET_PERIODS * period_s, MAX_DRAIN_SHARE * min(drain_seconds(load) for load in loads))
    return max(min(2.0**num_quiet * period_s, longest_s), period_s)
