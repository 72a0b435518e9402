"""What is logged of an iteration's speed: seconds and GB/s of every reallocation, and tokens per second."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_realloc.runtime.executor import ReallocationReport

ITERATION_S = "iteration_s"
"""Seconds of the iteration before, as one rank tells them to the others."""
_SECONDS, _BYTES, _RATE = "reallocation_s/", "reallocation_bytes/", "reallocation_GB_per_s/"


def facts_of(call: str, report: ReallocationReport) -> dict[str, float]:
    """Return what one rank tells of the reallocation before a call."""
    return {f"{_SECONDS}{call}": report.seconds, f"{_BYTES}{call}": float(report.bytes_moved)}


def with_rates(facts: Mapping[str, float], *, num_tokens: int) -> dict[str, float]:
    """Return the facts of all ranks, the largest of each, with rates in place of bytes and of an iteration's seconds.

    Args:
        facts: Of a reallocation the slowest rank's seconds.
        num_tokens: Prompt and response tokens of the iteration that `ITERATION_S` is of.
    """
    metrics = dict(facts)
    for name in [name for name in facts if name.startswith(_BYTES)]:
        call = name.removeprefix(_BYTES)
        seconds, moved = facts[f"{_SECONDS}{call}"], metrics.pop(name)
        metrics[f"{_RATE}{call}"] = moved / seconds / 1e9 if seconds > 0 else 0.0
    seconds = metrics.pop(ITERATION_S, 0.0)
    if seconds > 0:
        metrics["tokens_per_s"] = num_tokens / seconds
    return metrics
