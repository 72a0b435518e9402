"""Merged reports of ranks: maxima or sums of metrics, and joined samples."""

from __future__ import annotations

import torch

from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.strategies.exchange.iteration_report import IterationReport


def samples(*ids: int) -> Samples:
    """Return samples whose column is their id."""
    return Samples(torch.tensor(ids), {"score": torch.tensor(ids, dtype=torch.float32)})


def merged(*reports: IterationReport) -> IterationReport:
    """Return the reports merged as messages."""
    return IterationReport.merge([decode_message(encode_message(report)) for report in reports])


def test_counts_of_ranks_are_summed_by_call() -> None:
    report = merged(
        IterationReport(sums={"preemptions/a": 2.0, "moved_samples/a": 4.0}),
        IterationReport(sums={"preemptions/a": 3.0, "preemptions/b": 0.0}),
    )
    assert report.metrics == {"preemptions/a": 5.0, "preemptions/b": 0.0, "moved_samples/a": 4.0}


def test_other_metrics_are_the_maximum_over_ranks() -> None:
    report = merged(IterationReport({"seconds/a": 2.0}), IterationReport({"seconds/a": 3.0, "seconds/b": 1.0}))
    assert report.metrics == {"seconds/a": 3.0, "seconds/b": 1.0}


def test_samples_of_ranks_are_joined() -> None:
    report = merged(
        IterationReport(values={"a": samples(1)}, carried=samples(7)),
        IterationReport(values={"a": samples(0), "b": samples(2)}, carried=samples(5)),
        IterationReport(),
    )
    assert report.values["a"].equals(samples(1, 0)) and report.values["b"].equals(samples(2))
    assert report.carried is not None and report.carried.equals(samples(5, 7))
    assert report.shown is None
