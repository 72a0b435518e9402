"""Figures of running runs as Prometheus reads them: the latest iteration's metrics, seconds, waiting and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.iteration_record import IterationRecord
from lightning_realloc.recording.reader import RunRecord, Session
from lightning_realloc.scores.question_scores import HELD_OUT

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PREFIX = "lightning_realloc"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus's text format."""


def exposition(runs: Mapping[str, RunRecord]) -> bytes:
    """Return the figures of runs by name in Prometheus's text format.

    Raises:
        ConfigError: without the package ``prometheus-client``.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise ConfigError(
            "figures for Prometheus need prometheus-client: pip install 'lightning-realloc[prometheus]'"
        ) from None

    class Runs:
        """Collector of the figures as they are now."""

        def collect(self) -> Iterator[GaugeMetricFamily]:
            """Yield the figures."""
            return _families(runs)

    registry = CollectorRegistry()
    registry.register(Runs())
    return bytes(generate_latest(registry))


def _families(runs: Mapping[str, RunRecord]) -> Iterator[GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily as Gauge

    step = Gauge(f"{PREFIX}_step", "Iterations of the run so far.", labels=["run"])
    updated = Gauge(f"{PREFIX}_updated_seconds", "Time of day of the latest iteration, since 1970.", labels=["run"])
    metric = Gauge(f"{PREFIX}_metric", "Logged metric of the latest iteration.", labels=["run", "name"])
    seconds = Gauge(f"{PREFIX}_seconds", "Seconds of the latest iteration.", labels=["run", "rank", "kind", "name"])
    idle = Gauge(f"{PREFIX}_idle_share", "Share of the latest iteration spent waiting.", labels=["run", "rank"])
    peak = Gauge(f"{PREFIX}_peak_bytes", "Peak memory of a call.", labels=["run", "rank", "call"])
    for name, run in runs.items():
        if run.last.metrics:
            step.add_metric([name], run.last.metrics[-1].step)
            updated.add_metric([name], run.last.metrics[-1].unix_s)
        for key, value in _latest_metrics(run.last).items():
            metric.add_metric([name, key], value)
        for rank, iteration in _latest_iterations(run.last):
            idle.add_metric([name, str(rank)], iteration.idle_share)
            for kind, named in iteration.seconds.items():
                for piece, spent in named.items():
                    seconds.add_metric([name, str(rank), kind, piece], spent)
            for call, size in iteration.peak_bytes.items():
                peak.add_metric([name, str(rank), call], size)
    yield from (step, updated, metric, seconds, idle, peak)


def _latest_metrics(session: Session) -> dict[str, float]:
    """Return name -> latest value; held-out metrics are older than those of training."""
    rows = list(reversed(session.metrics))
    held_out = [next((row for row in rows if _has_prefix(row.values, one)), None) for one in HELD_OUT]
    training = next((row for row in rows if all(row is not one for one in held_out)), None)
    latest = (*held_out, training)
    return {name: value for row in latest if row is not None for name, value in row.values.items()}


def _has_prefix(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _latest_iterations(session: Session) -> Iterator[tuple[int, IterationRecord]]:
    for rank, iterations in sorted(session.ranks.items()):
        if iterations:
            yield rank, iterations[-1]
