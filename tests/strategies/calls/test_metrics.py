"""Rates from the metrics that ranks report for an iteration."""

from __future__ import annotations

import pytest

from lightning_realloc.generation import GenerationStats
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.calls.metrics import (
    ITERATION_S,
    reallocation_metrics,
    speculation_metrics,
    with_rates,
)
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool


def test_bytes_and_seconds_become_rates() -> None:
    report = ReallocationReport(
        bytes_moved=3 * 10**9, bytes_minimum=3 * 10**9, bytes_written=0, seconds=1.5, transport="direct",
        num_checked=10, check_s=0.25,
    )  # fmt: skip
    metrics = reallocation_metrics("actor.generate", report) | {ITERATION_S: 4.0, "seconds/actor.generate": 2.0}
    assert with_rates(metrics, num_tokens=1000) == {
        "reallocation_s/actor.generate": 1.5, "reallocation_GB_per_s/actor.generate": 2.0,
        "reallocation_check_s/actor.generate": 0.25, "tokens_per_s": 250.0, "seconds/actor.generate": 2.0,
    }  # fmt: skip


def test_rates_over_zero_seconds_are_zero_or_absent() -> None:
    still = ReallocationReport(bytes_moved=0, bytes_minimum=0, bytes_written=0, seconds=0.0, transport="direct")
    assert with_rates(reallocation_metrics("x", still), num_tokens=5)["reallocation_GB_per_s/x"] == 0.0
    assert with_rates({}, num_tokens=0) == {}


def test_tokens_per_step_are_the_ratio_of_sums_over_all_ranks() -> None:
    # 30 + 10 tokens in 10 + 10 steps; the second call generated nothing.
    reports = [
        IterationReport(sums=speculation_metrics("a", GenerationStats(generated_tokens=30, row_steps=10))),
        IterationReport(sums=speculation_metrics("a", GenerationStats(generated_tokens=10, row_steps=10))),
        IterationReport(sums=speculation_metrics("b", GenerationStats())),
    ]
    assert with_rates(IterationReport.merge(reports).metrics, num_tokens=0) == {"tokens_per_step/a": 2.0}


def logged_rates() -> list[dict[str, float]]:
    """Return the rates that GRPO logs in two iterations."""
    plan = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp1@1")
    seen: list[dict[str, float]] = []

    class Rates(runs.Record):
        def on_train_batch_end(self, trainer: object, *args: object) -> None:
            metrics = trainer.logged_metrics  # type: ignore[attr-defined]
            kinds = ("reallocation_", "tokens_per_s", "idle_share")
            seen.append({name: float(value) for name, value in metrics.items() if name.startswith(kinds)})

    runs.train(runs.grpo(), plan, 2, Batches(2), callbacks=[Rates()])
    return seen


def test_a_run_logs_the_same_rates_on_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(logged_rates, world_size=2, init_process_group=False)
    assert first == second
    names = {f"{name}/actor.generate" for name in ("reallocation_s", "reallocation_GB_per_s", "reallocation_check_s")}
    assert set(first[0]) == names
    assert set(first[1]) == names | {"tokens_per_s", "idle_share"}
    assert all(value > 0 for name, value in first[1].items() if name != "idle_share")
    assert first[1]["reallocation_GB_per_s/actor.generate"] == pytest.approx(
        first[0]["reallocation_GB_per_s/actor.generate"]
        * first[0]["reallocation_s/actor.generate"] / first[1]["reallocation_s/actor.generate"]
    )  # fmt: skip
