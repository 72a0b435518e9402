"""Measurements for a rank's load reports: seconds of steps and transfers, lengths of responses, short calls.

The numbers outlive a call, as the engine does. Ranks that share a tensor-parallel model report those of the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from math import inf, log2
from typing import Protocol

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.environment import Agree as Agree
from lightning_realloc.generation.loop.run import TurnQuestions
from lightning_realloc.generation.rebalance.load import PaceReport, StepCurve
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor

LEARNING_RATE = 0.1
"""Weight of one observation in a mean. Raise it to follow a machine whose speed changes, at the price of noise."""
MAX_SLOWDOWN = 1.5
"""Factor over the mean at which a step's seconds are cut off. Raise it to follow a slower machine sooner."""
MAX_SILENT_CALLS = 8
"""Short calls in a row without reports. Raise it to save messages, at the price of noticing longer responses later."""
MAX_KNOWN_PROMPTS = 65_536
"""Prompts whose lengths are kept; bounds memory."""


class SteppedRun(Protocol):
    """Steps of all samples of a rank; see `GenerationRun`."""

    @property
    def conversations(self) -> TurnQuestions | None: ...

    @property
    def ended(self) -> list[Sample]: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def counts(self) -> tuple[int, int, int]: ...

    def step(self) -> None: ...


class StepTimes:
    """Exponentially weighted mean of a step's seconds, by its rows in buckets of a quarter octave."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}
        """Bucket -> mean rows, mean seconds, number of steps."""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one step. A coarse clock may not have moved, so no step counts as free."""
        bucket, seconds = round(4 * log2(rows)), max(seconds, 1e-9)
        mean_rows, mean_s, count = self._buckets.get(bucket, (float(rows), seconds, 0))
        rate = max(1 / (count + 1), LEARNING_RATE)
        if not count:
            # A larger step limits a hiccup in the first step of a bucket.
            has_larger = any(rows < larger for larger, _, _ in self._buckets.values())
            mean_s = min(seconds, 2.0 * self.seconds(rows) if has_larger else inf)
        elif count == 1 and seconds < mean_s:  # the first step of a bucket also paid for one-time setup
            mean_s = seconds
        else:
            mean_s += rate * (min(seconds, MAX_SLOWDOWN * mean_s) - mean_s)
        self._buckets[bucket] = (mean_rows + rate * (rows - mean_rows), mean_s, count + 1)

    def knots(self) -> list[tuple[float, float]]:
        """Return (mean rows, mean seconds) of each bucket, rows ascending."""
        return sorted((rows, seconds) for rows, seconds, _ in self._buckets.values())

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a step of so many rows; 0 before the first step."""
        return StepCurve.from_means(self.knots()).seconds(rows) if self._buckets else 0.0


class PaceEstimator:
    """Learns seconds of steps, transfers and handovers as they happen. Starts from guesses."""

    def __init__(self) -> None:
        self.steps = StepTimes()
        """Steps that read no prompts; drafting is included."""
        self.tokens_per_row_step = 1.0
        self.bytes_per_s = 1e9
        self.prefill_tokens_per_s = 1e4
        self.stall_s = 1e-3
        """Seconds per moved running sample in which its rank does not decode."""
        self._num_steps, self._steps_s = 0, 0.0
        """Number and seconds of the steps since the last report."""

    def record_step(self, *, rows: int, read: int, generated: int, seconds: float) -> None:
        """Learn from a step: ``rows`` samples got ``generated`` tokens, and ``read`` tokens of prompts were read."""
        self._num_steps += 1
        self._steps_s += seconds
        if rows:
            self.tokens_per_row_step += LEARNING_RATE / 2 * (generated / rows - self.tokens_per_row_step)
        if rows and not read:
            self.steps.observe(rows, seconds)
        elif read:
            reading_s = max(seconds - self.steps.seconds(rows), seconds / 4, 1e-9)
            self.prefill_tokens_per_s += LEARNING_RATE * (read / reading_s - self.prefill_tokens_per_s)

    def record_transfer(self, *, in_time: bool) -> None:
        """Assume a faster link where keys and values arrived before they were needed, else a slower one."""
        self.bytes_per_s *= 1.05 if in_time else 0.7

    def record_stall(self, seconds: float) -> None:
        """Learn the seconds for which packing or unpacking one sample kept this rank from decoding."""
        self.stall_s += LEARNING_RATE * (seconds - self.stall_s)

    def report(self, agree: Agree | None) -> PaceReport:
        """Return the current speed; ``agree`` makes the ranks of a tensor-parallel group report the same."""
        knots = self.steps.knots()
        step_s = self._steps_s / self._num_steps if self._num_steps else 0.0
        self._num_steps, self._steps_s = 0, 0.0
        numbers = [self.bytes_per_s, self.prefill_tokens_per_s, self.stall_s, step_s, *(s for _, s in knots)]
        bytes_per_s, prefill, stall_s, step_s, *seconds = numbers if agree is None else agree(numbers)
        agreed = tuple((rows, s) for (rows, _), s in zip(knots, seconds, strict=True))
        return PaceReport(agreed, self.tokens_per_row_step, bytes_per_s, prefill, stall_s, step_s)


class LengthHistory:
    """Lengths of the last responses to each prompt, over all calls of an engine."""

    def __init__(self) -> None:
        self._lengths: dict[int, deque[int]] = {}
        """Prompt key -> lengths."""

    def record(self, sample: Sample) -> None:
        """Keep the length of a finished response."""
        key = sample.input.prompt_key
        kept = self._lengths.pop(key, None) or deque(maxlen=8)
        kept.append(len(sample.token_ids))
        self._lengths[key] = kept  # at the end: least recently seen prompts are dropped first
        if len(self._lengths) > MAX_KNOWN_PROMPTS:
            del self._lengths[next(iter(self._lengths))]

    def predictor(self, samples: Sequence[Sample], hints: Sequence[int]) -> LengthPredictor:
        """Return a predictor for a call's samples; an expected length per prompt in ``hints``, unless 0, overrules."""
        known: dict[int, Sequence[int]] = {
            sample.prompt_number: list(self._lengths.get(sample.input.prompt_key, ())) for sample in samples
        }
        known |= {prompt: [hint] for prompt, hint in enumerate(hints) if hint}
        return LengthPredictor({prompt: lengths for prompt, lengths in known.items() if lengths}, is_shared=True)


class StepRecorder:
    """Makes a run's steps, and learns from them when the rank reports.

    ``lengths`` learns the lengths of finished responses for this call, ``history`` for later ones. Learning from many
    steps at once is cheaper: right after a forward the caches are full of weights, and the same work takes twice as
    long. ``on_step`` is called after every step with all samples that finished here so far.
    """

    def __init__(
        self,
        run: SteppedRun,
        pace: PaceEstimator,
        history: LengthHistory,
        lengths: LengthPredictor,
        *,
        clock: Callable[[], float],
        on_step: Callable[[Sequence[Sample]], None] | None,
    ) -> None:
        self._run = run
        self._pace = pace
        self._history = history
        self._lengths = lengths
        self._clock = clock
        self._on_step = on_step
        self._steps = [(run.counts, 0.0)]
        """Counts after each step and its seconds, from the last learnt step on."""
        self._num_ended = 0
        self.steps_s = 0.0
        """Seconds of all reported steps."""

    def step(self) -> bool:
        """Make one step; return whether any sample advanced."""
        run, (before, _) = self._run, self._steps[-1]
        begin = self._clock()
        run.step()
        after = run.counts
        self._steps.append((after, self._clock() - begin))
        if self._on_step is not None:
            self._on_step(run.ended)
        return after != before

    def learn(self) -> int:
        """Learn from the steps since the last time, and return their number."""
        for sample in self._run.ended[self._num_ended :]:
            self._lengths.finish(sample.prompt_number, len(sample.token_ids), is_cut=sample.is_full)
            self._history.record(sample)
            self._num_ended += 1
        for (before, _), (after, seconds) in pairwise(self._steps):
            rows, read, generated = (now - then for now, then in zip(after, before, strict=True))
            self._pace.record_step(rows=rows, read=read, generated=generated, seconds=seconds)
        num_steps = len(self._steps) - 1
        del self._steps[:-1]
        return num_steps

    def report(self, agree: Agree | None) -> PaceReport:
        """Learn, and return the rank's speed; see `PaceEstimator.report`."""
        num_steps = self.learn()
        pace = self._pace.report(agree)
        self.steps_s += num_steps * pace.step_s
        return pace


class ShortCallPredictor:
    """Predicts which calls end before a move could pay, so that ranks exchange no report in them.

    A report costs up to a millisecond, which is much for a call of a tenth of a second. After a short call, the next
    call of its kind is predicted to be short. After each further one it is the next two calls, then four, then eight.
    All ranks observe the same, so they agree.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Hashable, int] = {}
        """Kind -> calls predicted to be short after the last observed one."""
        self._left: dict[Hashable, int] = {}
        """Kind -> calls still predicted to be short."""

    def predict(self, kind: Hashable) -> bool:
        """Return whether the call that begins now is predicted to be short."""
        left = self._left.get(kind, 0)
        self._left[kind] = max(left - 1, 0)
        return left > 0

    def observe(self, kind: Hashable, *, was_short: bool) -> None:
        """Learn from a call that was not predicted to be short."""
        in_a_row = min(2 * self._in_a_row.get(kind, 0) or 1, MAX_SILENT_CALLS) if was_short else 0
        self._in_a_row[kind] = self._left[kind] = in_a_row
