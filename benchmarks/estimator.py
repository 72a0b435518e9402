"""Estimates from a profile, next to measured calls, iterations and peak memory.

Four CPU ranks profile blocks of small models once, as the AutoTuner does. Then PPO's four models run under random
plans, with ranks, degrees and micro-batches of its own for every call. Calls are timed one at a time, iterations with
overlap. The table has the median error, the 90th percentile and the bias of predictions. Peak bytes are compared under
three plans, in iterations with short responses.

Errors are those of an idle host: other load shifts both sides.

Run ``python -m benchmarks.estimator``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from benchmarks.estimator_turn import CallPoint, PlanPoint, Turn, measure
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.plan_memory import PeakBytes, compare_peaks
from benchmarks.plan_turn import WORLD_SIZE, Arm, Workload
from benchmarks.plans import BY_HAND
from benchmarks.ranks import answers_of_ranks

WORKLOADS = {
    "small, long": Workload(
        hidden_size=256, intermediate_size=704, num_layers=6, vocabulary=2048, num_prompts=16, prompt_tokens=24,
        new_tokens=40,
    ),
    "large, short": Workload(
        hidden_size=512, intermediate_size=1408, num_layers=8, vocabulary=8192, num_prompts=8, prompt_tokens=16,
        new_tokens=32,
    ),
}  # fmt: skip
TINY = Workload(
    hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=4, vocabulary=512, num_prompts=4,
    prompt_tokens=8, new_tokens=8,
)  # fmt: skip
PEAK_PLANS = (
    Arm("heuristic", "heuristic", "iterations"),
    Arm("by hand", BY_HAND, "iterations"),
    Arm("static", "static", "none"),
)
MEDIAN, NINETIETH, PEAK, CORRELATION = 0.10, 0.25, 0.10, 0.9
FEWEST_CALLS, FEWEST_PLANS = 40, 20


# --- four ranks -------------------------------------------------------------------------------------------------------


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Measure all workloads on this rank; rank 0 sends the results."""
    for name, work in workloads(options).items():
        profile = None
        for overlap in ("none", "iterations"):
            turn, profile = measure(
                work,
                num_plans=options.plans if overlap == "none" else 2 * options.plans,
                seed=options.seed,
                overlap=overlap,
                profile=profile,  # type: ignore[arg-type]
            )
            gc.collect()
            if rank == 0:
                answers.send((name, overlap, turn))
        for arm in PEAK_PLANS:
            peaks = compare_peaks(arm, work)
            gc.collect()
            if rank == 0:
                answers.send((name, arm.name, peaks))


def workloads(options: argparse.Namespace) -> dict[str, Workload]:
    """Return the workloads to run."""
    if options.tiny:
        return {"tiny": TINY}
    return {name: work for name, work in WORKLOADS.items() if options.only in (None, name)}


# --- report -----------------------------------------------------------------------------------------------------------


def report_on(answers: Sequence[tuple[str, str, Any]], options: argparse.Namespace) -> BenchmarkReport:
    """Return a report with a row for each kind of call and workload, and the targets over all of them."""
    report = BenchmarkReport("estimator", seeds=(options.seed,), settings={"plans": options.plans})
    ranked: list[float] = []
    calls: list[CallPoint] = []
    plans: list[PlanPoint] = []
    peaks: list[float] = []
    for name, kind, found in answers:
        if kind == "none":
            calls += distinct_calls(found)
            add_calls(report, name, found)
        elif kind == "iterations":
            plans += found.plans
            ranked.append(add_plans(report, name, found))
        else:
            peaks += add_peaks(report, name, kind, found)
    errors = [relative_error(point) for point in calls]
    report.settings["points"] = [asdict(point) for point in calls]
    report.settings["iterations"] = [(plan.predicted_s, plan.measured_s) for plan in plans]
    report.require_at_least("calls that were compared", len(calls), FEWEST_CALLS)
    report.require_at_most("calls: median error", median(errors), MEDIAN)
    report.require_at_most("calls: 90th percentile of errors", percentile(errors, 0.9), NINETIETH)
    report.require_at_most("peak bytes: largest error", max(peaks), PEAK)
    report.require_at_least("plans that were compared", len(plans), FEWEST_PLANS)
    report.require_at_least("iterations: rank correlation, all plans", rank_correlation(plans), CORRELATION)
    report.require_at_least("iterations: rank correlation, the lower workload's", min(ranked), CORRELATION)
    return report


def distinct_calls(turn: Turn) -> list[CallPoint]:
    """Return the points of a workload; points of one call under one plan become their mean."""
    groups: dict[tuple[str, str, int | None], list[CallPoint]] = {}
    for plan in turn.plans:
        for point in plan.calls:
            groups.setdefault((point.call, point.layout, point.micro_batch_tokens), []).append(point)
    return [
        CallPoint(*key, points[0].predicted_s, sum(point.measured_s for point in points) / len(points))
        for key, points in groups.items()
    ]


def relative_error(point: CallPoint) -> float:
    """Return the error of a prediction relative to the measurement."""
    return abs(point.predicted_s / point.measured_s - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return float(np.quantile(values, share))


def rank_correlation(plans: Sequence[PlanPoint]) -> float:
    """Return Spearman's coefficient of predicted and measured seconds."""
    orders = [np.argsort(np.argsort([getattr(plan, name) for plan in plans])) for name in ("predicted_s", "measured_s")]
    return float(np.corrcoef(orders)[0, 1])


def add_calls(report: BenchmarkReport, name: str, turn: Turn) -> None:
    """Add a row for each call of a workload."""
    points = distinct_calls(turn)
    for call in dict.fromkeys(point.call for point in points):
        of_call = [point for point in points if point.call == call]
        errors = [relative_error(point) for point in of_call]
        report.add_row(
            workload=name, what=call, points=len(errors), **{"median error": median(errors)},
            **{"90th percentile": percentile(errors, 0.9)},
            bias=median(point.predicted_s / point.measured_s - 1 for point in of_call),
            **{"measured s": median(point.measured_s for point in of_call)},
        )  # fmt: skip


def add_plans(report: BenchmarkReport, name: str, turn: Turn) -> float:
    """Add a row for a workload's whole iterations; return their rank correlation."""
    errors = [abs(plan.predicted_s / plan.measured_s - 1) for plan in turn.plans]
    correlation = rank_correlation(turn.plans)
    report.settings.setdefault("profile", {})[name] = {"seconds": turn.profile_s, "crowding": turn.crowding}
    report.add_row(
        workload=name, what="iteration", points=len(errors), **{"median error": median(errors)},
        **{"90th percentile": percentile(errors, 0.9)},
        bias=median(plan.predicted_s / plan.measured_s - 1 for plan in turn.plans),
        **{"measured s": median(plan.measured_s for plan in turn.plans)}, correlation=correlation,
        **{"profile s": turn.profile_s},
    )  # fmt: skip
    return correlation


def add_peaks(report: BenchmarkReport, name: str, plan: str, peaks: Sequence[PeakBytes]) -> list[float]:
    """Add a row for the peaks of one plan; return every rank's error."""
    errors = [abs(peak.error) for peak in peaks]
    report.add_row(
        workload=name, what=f"peak bytes, {plan}", points=len(errors), **{"median error": median(errors)},
        **{"90th percentile": max(errors)}, bias=median(peak.error for peak in peaks),
    )  # fmt: skip
    return errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--plans",
        type=int,
        default=10,
        help="random plans of each workload whose calls are timed alone; twice as many run with overlap",
    )
    parser.add_argument("--only", choices=tuple(WORKLOADS), help="workload to run; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plans")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a quick look")
    options = parser.parse_args(arguments)
    answers, begin = [], time.monotonic()
    for answer in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        answers.append(answer)
        sys.stderr.write(f"{answer[0]}, {answer[1]}: done after {time.monotonic() - begin:.0f} s\n")
    return report_on(answers, options).finish(options)


if __name__ == "__main__":
    sys.exit(main())
