"""What a rank knows about its own pace and the way to others, and what it tells them of that and of its load.

The numbers outlive a call, since an engine does. Ranks that share a tensor-parallel model tell those of the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, StepCurve, drain_seconds
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor
from lightning_realloc.generation.speculative.step_costs import StepCosts

_RATE = 0.2
_LATENCY_S = 1e-3
_OF_ONE_ROW = 0.5
"""What a step of one row is taken to cost of the smallest step made so far: a guess, and a move or two correct it."""
_RAREST = 4
"""Periods between two rounds, at most, while nothing moves."""
_UNTIL_THE_FIRST_END = 0.4
"""Share of the seconds until the first rank is expected to have nothing left that may pass without a round."""
_RESPONSES_PER_PROMPT = 8
_MOST_PROMPTS = 65_536
_SAMPLES = ("running", "waiting", "incoming")
"""Fields of a report that hold samples."""


class Pace:
    """Seconds of this rank's steps, transfers and hand-overs, learnt as they happen."""

    def __init__(self) -> None:
        """Know guesses, and of steps nothing."""
        self.steps = StepCosts(told_from=1)
        """By rows; drafting included."""
        self.tokens_per_row_step = 1.0
        self.bytes_per_s = 1e9
        self.prefill_tokens_per_s = 1e4
        self.stall_s = 1e-3
        """In which one moved sample keeps its rank from decoding."""
        self._since_told = [0.0, 0.0]
        """Steps and their seconds."""

    def take_step(self, *, rows: int, read: int, generated: int, seconds: float) -> None:
        """Take a step that brought ``rows`` samples ``generated`` tokens further and read ``read`` tokens of others."""
        self._since_told[0] += 1
        self._since_told[1] += seconds
        if rows:
            self.tokens_per_row_step += _RATE / 4 * (generated / rows - self.tokens_per_row_step)
        if rows and not read:
            self.steps.observe(rows, seconds)
        elif read:
            decoding_s = self.steps.seconds(rows) if rows and self.steps.known else 0.0
            reading_s = max(seconds - decoding_s, seconds / 4)
            self.prefill_tokens_per_s += _RATE * (read / reading_s - self.prefill_tokens_per_s)

    def take_transfer(self, *, in_time: bool) -> None:
        """Take whether keys and values were there when they were expected to be: then links are faster than thought."""
        self.bytes_per_s *= 1.05 if in_time else 0.7

    def take_stall(self, seconds: float) -> None:
        """Take the seconds that packing or unpacking one sample kept this rank from decoding."""
        self.stall_s += _RATE * (seconds - self.stall_s)

    def agreed(self, agree: Callable[[Sequence[float]], Sequence[float]] | None) -> Told:
        """Return what to tell; ``agree`` makes ranks that work together tell the same."""
        knots = self.steps.knots()
        num_steps, of_steps_s = self._since_told
        self._since_told = [0.0, 0.0]
        rates = [
            self.bytes_per_s,
            self.prefill_tokens_per_s,
            self.stall_s,
            of_steps_s / num_steps if num_steps else 0.0,
        ]
        numbers = [*rates, *(seconds for _, seconds in knots)]
        bytes_per_s, prefill, stall_s, step_s, *seconds = numbers if agree is None else agree(numbers)
        curve = tuple((size, s) for (size, _), s in zip(knots, seconds, strict=True))
        return Told(curve, self.tokens_per_row_step, bytes_per_s, prefill, stall_s, step_s)


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's pace, as others hear of it."""

    knots: tuple[tuple[float, float], ...]
    """(rows, seconds) of steps, none if nothing is known."""
    tokens_per_row_step: float
    bytes_per_s: float
    prefill_tokens_per_s: float
    stall_s: float
    step_s: float = 0.0
    """Mean of the steps since the round before, reading of prompts included; 0 without any."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells in one round."""

    rank: int
    running: tuple[LiveSample, ...]
    """Without those that are about to leave, as `waiting`."""
    waiting: tuple[LiveSample, ...]
    incoming: tuple[LiveSample, ...]
    """Planned to come. What cannot leave when it is to does not come; then the other rank tells of it as well."""
    free_slots: int
    bytes_per_token: int
    """Of its cache; 0 before the first step."""
    pace: Told
    steps_s: float = 0.0
    """Seconds of all its steps in this call so far."""
    evidence: tuple[float, float] = (0.0, 0.0)
    """Of lengths, see `LengthPredictor`."""
    waiting_call_s: float = 0.0
    """Of calls that could work on what is finished there; 0 until it is known."""
    expected_since: int = 0
    """Shipments that were planned in rounds before this one have been taken in there."""

    @property
    def live(self) -> tuple[LiveSample, ...]:
        """Samples that are not finished."""
        return self.running + self.waiting + self.incoming

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` understands."""
        return {
            "rank": self.rank,
            **{name: [_entry(sample) for sample in getattr(self, name)] for name in _SAMPLES},
            "free_slots": self.free_slots,
            "bytes_per_token": self.bytes_per_token,
            "steps_s": self.steps_s,
            "evidence": self.evidence,
            "waiting_call_s": self.waiting_call_s,
            "expected_since": self.expected_since,
            "pace": [list(map(list, self.pace.knots)), self.pace.tokens_per_row_step, self.pace.bytes_per_s,
                     self.pace.prefill_tokens_per_s, self.pace.stall_s, self.pace.step_s],
        }  # fmt: skip

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Report:
        """Return the report that another rank made."""
        knots, *numbers = told["pace"]
        running, waiting, incoming = (tuple(LiveSample(*entry) for entry in told[name]) for name in _SAMPLES)
        pace = Told(tuple((size, seconds) for size, seconds in knots), *numbers)
        return cls(
            told["rank"], running, waiting, incoming, told["free_slots"], told["bytes_per_token"], pace,
            told["steps_s"], tuple(told["evidence"]), told["waiting_call_s"], told["expected_since"],
        )  # fmt: skip


def _entry(sample: LiveSample) -> tuple[int, int, float, int | None, bool]:
    return (
        sample.sample_id, sample.context_tokens, sample.remaining_tokens, sample.last_moved_step, sample.has_begun
    )  # fmt: skip


def loads_of(reports: Sequence[Report]) -> tuple[tuple[RankLoad, ...], MoveCost] | None:
    """Return what to plan moves by; None while nobody knows how long steps take.

    Ranks are taken to be alike: steps of a size that one has not made take as long as they took another one. A sample
    that several ranks tell of is where it runs or waits, and on its way to one rank only.
    """
    seen: dict[float, list[float]] = {}
    for report in reports:
        for rows, seconds in report.pace.knots:
            seen.setdefault(float(round(rows)), []).append(seconds)
    if not seen:
        return None
    means = [(rows, sum(seconds) / len(seconds)) for rows, seconds in sorted(seen.items())]
    if means[0][0] > 1:
        means.insert(0, (1.0, _OF_ONE_ROW * means[0][1]))
    curve = StepCurve(tuple(zip((rows for rows, _ in means), accumulate((s for _, s in means), max), strict=True)))
    placed = {sample.sample_id for report in reports for sample in (*report.running, *report.waiting)}
    loads = tuple(_load_of(report, curve, placed) for report in reports)
    cost = MoveCost(
        bytes_per_token=max(report.bytes_per_token for report in reports),
        bytes_per_s=min(report.pace.bytes_per_s for report in reports),
        latency_s=_LATENCY_S,
        prefill_tokens_per_s=min(report.pace.prefill_tokens_per_s for report in reports),
        stall_s=max(report.pace.stall_s for report in reports),
    )
    return loads, cost


def _load_of(report: Report, curve: StepCurve, placed: set[int]) -> RankLoad:
    """Return a rank's load, with what is on its way to it unless that is ``placed`` already; place it."""
    incoming = [sample for sample in report.incoming if sample.sample_id not in placed]
    placed |= {sample.sample_id for sample in incoming}
    begun = tuple(sample for sample in incoming if sample.has_begun)
    running = report.running + begun
    waiting = report.waiting + tuple(sample for sample in incoming if not sample.has_begun)
    # Where all who run are about to leave, with the slots and pages that they hold, those who wait will have these.
    free_slots = max(report.free_slots - len(begun), int(bool(waiting) and not running))
    rate, waiting_call_s = report.pace.tokens_per_row_step, report.waiting_call_s
    return RankLoad(report.rank, running, waiting, curve, free_slots, rate, waiting_call_s)


def next_round_s(loads: Sequence[RankLoad], period_s: float, num_quiet: int) -> float:
    """Return the seconds until the next round: the more, the longer nothing moved.

    Args:
        loads: Of all ranks.
        period_s: Seconds between two rounds while samples move.
        num_quiet: Rounds in a row in which nothing moved.
    """
    if not num_quiet:
        return period_s
    longest_s = min(_RAREST * period_s, _UNTIL_THE_FIRST_END * min(drain_seconds(load) for load in loads))
    return max(min(2.0**num_quiet * period_s, longest_s), period_s)


class LengthBook:
    """How long responses to which prompts were, over the calls of an engine."""

    def __init__(self) -> None:
        """Know nothing."""
        self._lengths: dict[tuple[int, ...], deque[int]] = {}

    def keep(self, sample: Sample) -> None:
        """Take the length of a finished response."""
        prompt = tuple(sample.prompt)
        kept = self._lengths.pop(prompt, None)
        kept = deque(maxlen=_RESPONSES_PER_PROMPT) if kept is None else kept
        kept.append(len(sample.token_ids))
        self._lengths[prompt] = kept  # at the end: the prompt seen last
        if len(self._lengths) > _MOST_PROMPTS:
            del self._lengths[next(iter(self._lengths))]

    def begin(self, samples: Sequence[Sample], hints: Mapping[int, int]) -> LengthPredictor:
        """Return expectations for a call's samples; ``hints`` says what a prompt's responses will come to."""
        history: dict[int, Sequence[int]] = {}
        for sample in samples:
            index = sample.prompt_number
            if index not in history:
                known = self._lengths.get(tuple(sample.prompt), ())
                history[index] = [hints[index]] if hints.get(index) else list(known)
        return LengthPredictor({index: lengths for index, lengths in history.items() if lengths}, is_shared=True)


def as_moved(sample: LiveSample, step: int) -> LiveSample:
    """Return the sample as one that changed its rank in ``step``."""
    return replace(sample, last_moved_step=step)
