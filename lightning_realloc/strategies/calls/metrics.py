"""Measure an iteration's speed: seconds of calls, waiting, and rates; exchange the metrics of training calls.

Metrics of calls before training travel with an `IterationReport`. The first rank of a training call sends that
call's metrics to all others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation import GenerationStats
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.pool.model_pool import ModelPool

T = TypeVar("T")
ITERATION_S = "iteration_s"
"""Name of the seconds of the iteration before, in a rank's report."""
IDLE_SHARE = "idle_share"
"""Name of the share of the iteration before in which a rank waited; in a report ``/`` and the rank follow."""
_GENERATED, _ROW_STEPS, _TOKENS_PER_STEP = "generated/", "row_steps/", "tokens_per_step/"
_MOVED, _PREEMPTIONS = "moved_samples/", "preemptions/"
_SECONDS, _BYTES, _RATE = "reallocation_s/", "reallocation_bytes/", "reallocation_GB_per_s/"


class IdleClock:
    """Measures how long this rank waits for data, weights and other ranks, and its share of an iteration."""

    def __init__(self, mailbox: Mailbox, pool: ModelPool) -> None:
        self._mailbox, self._pool = mailbox, pool
        self._elsewhere_s = 0.0
        self._begin = time.perf_counter()
        self._seconds_at_begin = 0.0
        self._share: float | None = None
        self._iteration_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of waiting since the run began."""
        return self._mailbox.seconds_waited + self._elsewhere_s

    def measure(self, action: Callable[[], T]) -> T:
        """Call ``action``, and count its seconds as waiting, less those in which the pool moves weights."""
        begin, moving = time.perf_counter(), self._pool.seconds_moving
        result = action()
        self._elsewhere_s += max(0.0, time.perf_counter() - begin - (self._pool.seconds_moving - moving))
        return result

    def add(self, seconds: float) -> None:
        """Count seconds of waiting that this clock did not measure."""
        self._elsewhere_s += seconds

    def begin(self) -> None:
        """Start to measure an iteration."""
        self._begin, self._seconds_at_begin = time.perf_counter(), self.seconds

    def end(self) -> None:
        """Finish measuring an iteration."""
        self._iteration_s = time.perf_counter() - self._begin
        self._share = (self.seconds - self._seconds_at_begin) / self._iteration_s

    def metrics(self, rank: int) -> dict[str, float]:
        """Return the share of waiting in the last iteration, and its seconds."""
        return {} if self._share is None else {f"{IDLE_SHARE}/{rank}": self._share, ITERATION_S: self._iteration_s}


@dataclass(frozen=True, slots=True)
class _TrainingMetrics:
    """Metrics of one training call, here or on the rank that sends them."""

    run: int
    index: int
    """The call's place in running order."""
    source: int
    """The rank that sends them."""
    own: Mapping[str, float] | None
    """The metrics themselves on that rank; None on others."""


class RunMetrics:
    """This rank's metrics of calls and iterations.

    Args:
        context: This rank, its messages, and its models, which report the seconds and bytes of moved weights.
        may_be_late: Whether metrics of a training call on some ranks may be those of the iteration before, so that no
            rank waits for them.
    """

    def __init__(self, context: CallContext, *, may_be_late: bool) -> None:
        self.idle = IdleClock(context.mailbox, context.pool)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Call -> seconds on this rank, over all iterations."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Call -> how often this rank took part in it."""
        self._context, self._mailbox = context, context.mailbox
        self._may_be_late = may_be_late
        self._late: dict[str, _TrainingMetrics] = {}
        """Training call -> metrics that are logged with the next iteration."""
        self._num_tokens = 0
        """Prompt and response tokens of the last iteration."""
        self._of_next: dict[str, float] = {}
        """Metrics of calls that ran before the iteration that they belong to."""

    def record_call(self, data: IterationData, call: ModelFunctionCall, seconds: float | None) -> None:
        """Record the seconds of a call, None on a rank without part in it, and of moving its weights."""
        moved = self._context.pool.take_report(call.name)
        data.report.metrics |= {} if moved is None else reallocation_metrics(call.name, moved)
        if seconds is None:
            return
        self.seconds[call.name] += seconds
        self.counts[call.name] += 1
        metrics = data.training_metrics[call.name] if call.kind == "train" else data.report.metrics
        metrics[f"seconds/{call.name}"] = seconds

    def keep_for_next(self, reported: Mapping[str, float]) -> None:
        """Log these merged metrics with the next iteration."""
        self._of_next = dict(reported)

    def summarize(
        self, data: IterationData, reported: Mapping[str, float], known: Samples, *, wait: bool
    ) -> dict[str, float]:
        """Return an iteration's metrics, the same on all ranks.

        Args:
            data: The iteration's data.
            reported: Merged metrics of all ranks' reports.
            known: The iteration's samples.
            wait: Whether metrics of training calls may not be late.
        """
        metrics = with_rates(self._of_next | dict(reported), num_tokens=self._num_tokens)
        self._of_next, self._num_tokens = {}, count_tokens(known)
        return metrics | self._exchange_training_metrics(data, wait=wait)

    def drain(self) -> None:
        """Receive pending metrics of training calls."""
        for late in self._late.values():
            self._receive(late)
        self._late.clear()

    def _exchange_training_metrics(self, data: IterationData, *, wait: bool) -> dict[str, float]:
        """Send this rank's metrics of training calls, and return those of all ranks; late ones are an iteration old."""
        due: list[_TrainingMetrics] = []
        for call in data.routes.calls:
            if call.kind != "train":
                continue
            index, ranks = data.index(call), data.routes.placements[call.name].layout.ranks
            own = data.training_metrics[call.name] if ranks[0] == self._context.rank else None
            if own is not None:
                self._mailbox.send(
                    self._mailbox.others, FrameKind.METRICS, data.run, index, encode_message(own, {})
                )  # fmt: skip
            earlier, latest = self._late.pop(call.name, None), _TrainingMetrics(data.run, index, ranks[0], own)
            due += [earlier] if earlier else []
            if self._may_be_late and len(ranks) <= len(self._mailbox.others) and not wait:
                self._late[call.name] = latest
            else:
                due.append(latest)
        return {name: value for metrics in due for name, value in self._receive(metrics).items()}

    def _receive(self, metrics: _TrainingMetrics) -> Mapping[str, float]:
        if metrics.own is not None:
            return metrics.own
        return decode_message(self._mailbox.receive(FrameKind.METRICS, metrics.run, metrics.index, metrics.source))[0]


def reallocation_metrics(call: str, report: ReallocationReport) -> dict[str, float]:
    """Return one rank's metrics of the reallocation before a call."""
    return {f"{_SECONDS}{call}": report.seconds, f"{_BYTES}{call}": float(report.bytes_moved)}


def speculation_metrics(call: str, stats: GenerationStats, rank: int) -> dict[str, float]:
    """Return one rank's metrics of a call that drafts tokens."""
    counts = {_GENERATED: stats.generated_tokens, _ROW_STEPS: stats.row_steps}
    return {f"{name}{call}/{rank}": float(count) for name, count in counts.items()}


def migration_metrics(call: str, stats: MigrationStats, rank: int) -> dict[str, float]:
    """Return one rank's metrics of a call whose samples may move between ranks."""
    return {f"{_MOVED}{call}/{rank}": float(stats.num_received)}


def preemption_metrics(call: str, stats: GenerationStats, rank: int) -> dict[str, float]:
    """Return one rank's metrics of a call whose cache is bounded."""
    return {f"{_PREEMPTIONS}{call}/{rank}": float(stats.num_preemptions)}


def count_tokens(samples: Samples) -> int:
    """Return the tokens of all prompts and responses together."""
    columns = (samples.ragged(name) for name in ("prompt_ids", "response_ids") if name in samples)
    return sum(int(column.lengths.sum()) for column in columns)


def with_rates(reported: Mapping[str, float], *, num_tokens: int) -> dict[str, float]:
    """Return the metrics to log: rates in place of bytes and counts, sums and means over ranks.

    Args:
        reported: The largest value of each metric over all ranks.
        num_tokens: Prompt and response tokens of the iteration that `ITERATION_S` measures.
    """
    metrics = dict(reported)
    for name in [name for name in reported if name.startswith(_BYTES)]:
        call = name.removeprefix(_BYTES)
        seconds, moved = reported[f"{_SECONDS}{call}"], metrics.pop(name)
        metrics[f"{_RATE}{call}"] = moved / seconds / 1e9 if seconds > 0 else 0.0
    metrics |= _tokens_per_step(metrics)
    metrics |= _sums(metrics, (_MOVED, _PREEMPTIONS))
    shares = [metrics.pop(name) for name in list(metrics) if name.startswith(f"{IDLE_SHARE}/")]
    if shares:
        metrics[IDLE_SHARE] = sum(shares) / len(shares)
    seconds = metrics.pop(ITERATION_S, 0.0)
    if seconds > 0:
        metrics["tokens_per_s"] = num_tokens / seconds
    return metrics


def _sums(metrics: dict[str, float], kinds: tuple[str, ...]) -> dict[str, float]:
    """Remove the counts of each rank of these kinds, and return their sums by call."""
    totals: dict[str, float] = {}
    for name in [name for name in metrics if name.startswith(kinds)]:
        call = name.rpartition("/")[0]
        totals[call] = totals.get(call, 0.0) + metrics.pop(name)
    return totals


def _tokens_per_step(metrics: dict[str, float]) -> dict[str, float]:
    """Remove the counts of generating calls, and return the tokens that a sample got in a step, over all ranks."""
    totals: dict[str, list[float]] = {}
    for place, prefix in enumerate((_GENERATED, _ROW_STEPS)):
        for name in [name for name in metrics if name.startswith(prefix)]:
            call = name.removeprefix(prefix).rpartition("/")[0]
            totals.setdefault(call, [0.0, 0.0])[place] += metrics.pop(name)
    return {f"{_TOKENS_PER_STEP}{call}": made / steps for call, (made, steps) in totals.items() if steps}
