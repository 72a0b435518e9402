"""Measure an iteration's speed: seconds of calls, waiting, and rates; exchange the metrics of training calls.

Each rank reports its metrics of calls before training in an `IterationReport`: ``maxima``, of which the largest value
over the ranks is logged, and ``sums``, which are added up. Metrics of a training call are those of its first rank.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.batch.balance_loss import BalanceLoss
from lightning_realloc.batch.samples import TOKEN_AGES, Samples
from lightning_realloc.batch.training import Average, Loss
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ReallocError
from lightning_realloc.generation import GenerationStats
from lightning_realloc.runtime.forward.routers import Routers, load_metrics
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.pool.model_pool import ModelPool

T = TypeVar("T")
log = logging.getLogger(__name__)
ITERATION_S = "iteration_s"
"""Name of the seconds of the iteration before. Not logged: `with_rates` divides tokens by it."""
_GENERATED = "generated/"
"""Prefix of the tokens that a call generated. Not logged: `with_rates` divides it by the row steps."""
_ROW_STEPS = "row_steps/"
"""Prefix of a call's decoding steps, summed over its samples. Not logged."""
_MOVE_S = "reallocation_s/"
"""Prefix of the seconds in which weights moved before a call."""
_CHECK_S = "reallocation_check_s/"
"""Prefix of the seconds in which ranks compared the weights that had moved before a call."""
_FACTOR = "factor/"
"""Prefix of means that others are multiplied with. Not logged."""
_MOVED_BYTES = "reallocation_bytes/"
"""Prefix of the bytes that moved over all ranks. Not logged: `with_rates` divides it by the seconds."""


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
        self._mailbox.record.add_wait(seconds)

    def begin(self) -> None:
        """Start to measure an iteration."""
        self._begin, self._seconds_at_begin = time.perf_counter(), self.seconds

    def end(self) -> None:
        """Finish measuring an iteration."""
        self._iteration_s = time.perf_counter() - self._begin
        self._share = (self.seconds - self._seconds_at_begin) / self._iteration_s

    def record(self, report: IterationReport) -> None:
        """Report the seconds of the last iteration, and this rank's part of the mean share of waiting."""
        if self._share is not None:
            report.maxima[ITERATION_S] = self._iteration_s
            report.sums["idle_share"] = self._share / (1 + len(self._mailbox.others))


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


class MetricSums:
    """Sums losses and metrics over micro-batches, and merges data-parallel ranks in one collective."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because the gradient norm was not finite."""
        self.num_minibatches = 0
        """Mini-batches counted so far."""
        self.expert_counts: Tensor | None = None
        """(layers, experts) tokens of each expert on this rank; None: none were counted."""
        self.expert_loads: Tensor | None = None
        """(layers, experts) all tokens of each expert on this rank, in one optimizer step; None: none were counted."""
        self.balance_loss: BalanceLoss | None = None
        """Loss that balances experts, of one optimizer step; None: there is none."""
        self._loss: list[Tensor] = []
        self._totals: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Tensor]] = {}
        self._shared: dict[str, list[Tensor]] = {}

    def add(self, loss: Loss, *, counts: bool) -> None:
        """Add one micro-batch; a repeated one adds zero, so that every rank knows every metric's name."""
        self._loss.append(loss.value.detach().float() * counts)
        for name, average in loss.metrics.items():
            self._add(name, average, counts=counts)
            if average.times is not None:
                self._add(_FACTOR + name, average.times, counts=counts)

    def _add(self, name: str, average: Average, *, counts: bool) -> None:
        self._totals.setdefault(name, []).append(average.total.detach().float() * counts)
        self._weights.setdefault(name, []).append(torch.as_tensor(average.weight, dtype=torch.float32) * counts)

    def merge(self, minibatch: MetricSums) -> None:
        """Add the micro-batches of one mini-batch."""
        self.num_minibatches += 1
        self._loss += minibatch._loss
        if minibatch.expert_counts is not None:
            ours = 0 if self.expert_counts is None else self.expert_counts
            self.expert_counts = minibatch.expert_counts + ours
        pairs = (
            (self._totals, minibatch._totals),
            (self._weights, minibatch._weights),
            (self._shared, minibatch._shared),
        )
        for own, theirs in pairs:
            for name, values in theirs.items():
                own.setdefault(name, []).extend(values)

    def add_shared(self, name: str, value: Tensor) -> None:
        """Add one optimizer step's value that is the same on all ranks; NaN if the step was skipped."""
        self._shared.setdefault(name, []).append(value.detach().float())

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Tensor]:
        """Return the means over all micro-batches of all ranks of the group."""
        names = sorted(self._totals)
        zero = torch.zeros((), device=device)
        sums = [torch.stack([zero, *self._loss]).sum()]
        for name in names:
            sums.append(torch.stack([zero, *self._totals.get(name, [])]).sum())
            sums.append(torch.stack([zero, *(w.to(device) for w in self._weights.get(name, []))]).sum())
        packed = torch.stack(sums)
        if group is not None:
            dist.all_reduce(packed, group=group)
        result = {"loss": packed[0] / max(1, self.num_minibatches)}
        for index, name in enumerate(names):
            result[name] = packed[1 + 2 * index] / packed[2 + 2 * index].clamp_min(1e-12)
        for name in [name for name in names if _FACTOR + name in result]:
            result[name] = result[name] * result.pop(_FACTOR + name)
        return result | {name: torch.stack(values).nanmean() for name, values in self._shared.items()}

    def expert_load(self, routers: Routers, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
        """Return the metrics of the experts' load over all ranks of a layout's group."""
        counts = routers.no_counts(device) if self.expert_counts is None else self.expert_counts
        if group is not None:  # tensor-parallel ranks count the same tokens: ratios stay
            dist.all_reduce(counts, group=group)
        return load_metrics(counts.cpu())


class SkippedSteps:
    """Counts the optimizer steps in a row that each role skipped because its gradient norm was not finite.

    Every rank of a role's layout sees the same norms, so all of them count alike and raise together.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def record_step(self, role: str) -> None:
        """Record a step that was taken."""
        self._in_a_row[role] = 0

    def record_skip(self, role: str, place: str, cause: str, *, limit: int | None, warns: bool) -> None:
        """Record a step that was skipped.

        Args:
            role: Role whose step was skipped.
            place: The iteration and the mini-batch, for messages.
            cause: The norm and the parameter, for messages.
            limit: Skipped steps in a row that stop the run; None: it never stops.
            warns: Whether this rank writes the warning.

        Raises:
            ReallocError: at the limit.
        """
        self._in_a_row[role] += 1
        count = self._in_a_row[role]
        if warns:
            log.warning("%s: skipped the optimizer step of %s: %s; skipped in a row: %d", role, place, cause, count)
        if limit is not None and count >= limit:
            raise ReallocError(
                f"{role}: the gradient norm was not finite in {count} optimizer steps in a row, "
                f"max_skipped_steps={limit}, last in {place}: {cause}. The weights are those before the first of them. "
                f"Lower the learning rate, look at the data and rewards of these mini-batches, or raise "
                f"max_skipped_steps in TrainOptions (None never stops)"
            )


class RunMetrics:
    """This rank's metrics of calls and iterations.

    Args:
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
        data.report.maxima |= {} if moved is None else reallocation_metrics(call.name, moved)
        if seconds is None:
            return
        self.seconds[call.name] += seconds
        self.counts[call.name] += 1
        metrics = data.training_metrics[call.name] if call.kind == "train" else data.report.maxima
        metrics[f"seconds/{call.name}"] = seconds

    def keep_for_next(self, reported: Mapping[str, float]) -> None:
        """Log these merged metrics with the next iteration."""
        self._of_next = dict(reported)

    def summarize(
        self, data: IterationData, reported: Mapping[str, float], known: Samples, *, wait: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return an iteration's metrics, and late ones that the same names have in addition; the same on all ranks.

        Args:
            reported: Merged metrics of all ranks' reports.
            wait: Whether metrics of training calls may not be late.
        """
        metrics = with_rates(self._of_next | dict(reported), num_tokens=self._num_tokens)
        self._of_next, self._num_tokens = {}, count_tokens(known)
        of_training, overdue = self._exchange_training_metrics(data, wait=wait)
        return metrics | of_training, overdue

    def drain(self) -> dict[str, Tensor]:
        """Receive and return pending metrics of training calls. The next iteration has them, if one follows."""
        self._late = {name: replace(late, own=self._receive(late)) for name, late in self._late.items()}
        return as_tensors({key: value for late in self._late.values() for key, value in self._receive(late).items()})

    def forget_late(self) -> None:
        """Forget pending metrics, of an earlier fit."""
        self._late.clear()

    def _exchange_training_metrics(
        self, data: IterationData, *, wait: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Send this rank's metrics of training calls, and return those of all ranks; late ones are an iteration old.

        Those of a call that is no longer late are returned as well, next to its late ones.
        """
        found: dict[str, float] = {}
        overdue: dict[str, float] = {}
        for call in data.routes.calls:
            if call.kind != "train":
                continue
            index, ranks = data.index(call), data.routes.placements[call.name].layout.ranks
            own = data.training_metrics[call.name] if ranks[0] == self._context.rank else None
            if own is not None:
                self._mailbox.send(self._mailbox.others, FrameKind.METRICS, data.run, index, encode_message(own))
            earlier, latest = self._late.pop(call.name, None), _TrainingMetrics(data.run, index, ranks[0], own)
            if self._may_be_late and len(ranks) <= len(self._mailbox.others) and not wait:
                self._late[call.name] = latest
                found |= self._receive(earlier) if earlier else {}
            else:
                overdue |= self._receive(earlier) if earlier else {}
                found |= self._receive(latest)
        return found, overdue

    def _receive(self, metrics: _TrainingMetrics) -> Mapping[str, float]:
        if metrics.own is not None:
            return metrics.own
        content = self._mailbox.receive(FrameKind.METRICS, metrics.run, metrics.index, metrics.source)
        own: Mapping[str, float] = decode_message(content)
        return own


def reallocation_metrics(call: str, report: ReallocationReport) -> dict[str, float]:
    """Return one rank's metrics of the reallocation before a call."""
    metrics = {f"{_MOVE_S}{call}": report.seconds, f"{_MOVED_BYTES}{call}": float(report.bytes_moved)}
    return metrics | ({f"{_CHECK_S}{call}": report.check_s} if report.num_checked else {})


def speculation_metrics(call: str, stats: GenerationStats) -> dict[str, float]:
    """Return one rank's counts of a call that drafts tokens."""
    return {f"{_GENERATED}{call}": float(stats.generated_tokens), f"{_ROW_STEPS}{call}": float(stats.row_steps)}


def mean_age(samples: Samples, *, otherwise: int) -> float:
    """Return the mean age of the tokens that a model sampled, in training steps.

    ``otherwise``: the age of all tokens, for samples that do not have their own.
    """
    if TOKEN_AGES not in samples:
        return float(otherwise)
    counted = "num_model_tokens" in samples
    tokens = samples.tensor("num_model_tokens") if counted else samples.ragged("response_ids").lengths
    return float(samples.tensor(TOKEN_AGES).sum() / tokens.sum())


def as_tensors(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    """Return metrics in the form that Lightning logs."""
    return {name: torch.tensor(value) for name, value in metrics.items()}


def count_tokens(samples: Samples) -> int:
    """Return the tokens of all prompts and responses together."""
    columns = (samples.ragged(name) for name in ("prompt_ids", "response_ids") if name in samples)
    return sum(int(column.lengths.sum()) for column in columns)


def with_rates(reported: Mapping[str, float], *, num_tokens: int) -> dict[str, float]:
    """Return the metrics to log, with rates in place of bytes and counts.

    Args:
        reported: Metrics of all ranks' merged reports.
        num_tokens: Prompt and response tokens of the iteration that `ITERATION_S` measures.
    """
    metrics = dict(reported)
    for name in reported:
        call = name.partition("/")[2]
        if name.startswith(_MOVED_BYTES):
            seconds, moved = metrics[f"{_MOVE_S}{call}"], metrics.pop(name)
            metrics[f"reallocation_GB_per_s/{call}"] = moved / seconds / 1e9 if seconds > 0 else 0.0
        elif name.startswith(_ROW_STEPS):
            generated, steps = metrics.pop(f"{_GENERATED}{call}"), metrics.pop(name)
            if steps:
                metrics[f"tokens_per_step/{call}"] = generated / steps
    seconds = metrics.pop(ITERATION_S, 0.0)
    if seconds > 0:
        metrics["tokens_per_s"] = num_tokens / seconds
    return metrics
