"""Metrics of an iteration's speed: names in a rank's report, and rates from the merged reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation import GenerationStats
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.runtime.transfer.executor import ReallocationReport

ITERATION_S = "iteration_s"
"""Name of the seconds of the iteration before, in a rank's report."""
IDLE_SHARE = "idle_share"
"""Name of the share of the iteration before in which a rank waited; in a report ``/`` and the rank follow."""
_GENERATED, _ROW_STEPS, _TOKENS_PER_STEP = "generated/", "row_steps/", "tokens_per_step/"
_MOVED, _PREEMPTIONS = "moved_samples/", "preemptions/"
_SECONDS, _BYTES, _RATE = "reallocation_s/", "reallocation_bytes/", "reallocation_GB_per_s/"


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
