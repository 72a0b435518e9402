"""One PPO iteration with four models on four CPU ranks, under different execution plans.

All arms have the same random Llamas, prompts and seeds:

- static: every call is sharded over all ranks, one after the other.
- heuristic: the heuristic's plan.
- overlapping: a plan by hand, whose calls run at the same time on different ranks.
- in turn: the same plan with one call at a time.

Each turn has a Trainer of its own in the same four processes: a warm-up iteration with short responses, then measured
iterations. Since iterations may overlap, the measurement starts when all ranks begin the first one and ends when the
last rank ends the last one. *Idle* is the metric `idle_share` of each rank.

Lasting memory is the bytes of live tensors at the fullest moment between calls; memory that ranks share is divided
among them. The peak, with activations and gathered weights, is predicted and measured in a separate run with short
responses.

Run ``python -m benchmarks.plans``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.plan_data import PROMPT_TOKENS, RESPONSE_TOKENS, DataTurn, move_data
from benchmarks.plan_memory import PeakBytes, compare_peaks
from benchmarks.plan_turn import CALLS, WORLD_SIZE, Arm, Plan, Readings, Turn, Workload, make_module, run_arm
from benchmarks.ranks import answers_of_ranks, turns_within

FASTER_THAN_STATIC = 4.0
TOLERANCE = 1e-5
PEAK_TOLERANCE = 0.1
NUM_SAMPLES = 512
"""Samples of the batch whose exchange between ranks is timed."""

# All ranks generate. Then the reference runs on one half of the ranks, reward model and critic on the other half. The
# actor trains on one half, the critic on the other.
BY_HAND: Plan = {"calls": {
    "actor.generate": "dp2.tp2@0-3",
    "reference.infer": "dp2@0-1",
    "reward.infer": "dp1@2",
    "critic.infer": "dp1@3",
    "actor.train": "fsdp2@0-1",
    "critic.train": "fsdp2@2-3",
}}  # fmt: skip

STATIC, HEURISTIC, OVERLAPPING, IN_TURN = "static", "heuristic", "overlapping", "in turn"
ARMS = (
    Arm(STATIC, "static", "none", measured=1),  # slow, and all its iterations are alike
    Arm(HEURISTIC, "heuristic", "iterations"),
    Arm(OVERLAPPING, BY_HAND, "iterations"),
    Arm(IN_TURN, BY_HAND, "none"),
)
TINY = Workload(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, vocabulary=512, new_tokens=8
)


# --- four ranks -------------------------------------------------------------------------------------------------------


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run all turns of all arms on this rank; rank 0 sends the results."""
    for _ in turns_within(options.turns, options.limit_s):
        for arm in ARMS:
            turn = run_arm(arm, workload(options))
            gc.collect()
            if rank == 0:
                answers.send((arm.name, turn))
    peaks = {arm.name: compare_peaks(arm, workload(options)) for arm in ARMS if arm.name != IN_TURN}
    peaks[IN_TURN] = peaks[OVERLAPPING]  # the same plan
    calls = make_module(workload(options), Readings()).dataflow.calls
    moved = move_data(calls, BY_HAND, num_samples=8 if options.tiny else NUM_SAMPLES)
    if rank == 0:
        answers.send(("peaks", peaks))
        answers.send(("data", moved))


def workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options ask for."""
    return TINY if options.tiny else Workload(new_tokens=options.new_tokens)


# --- judging ----------------------------------------------------------------------------------------------------------


def fill(
    report: BenchmarkReport, turns: Mapping[str, Sequence[Turn]], peaks: Mapping[str, Sequence[PeakBytes]]
) -> None:
    """Add a row for each arm, with bytes in megabytes (10^6)."""
    for arm, made in turns.items():
        first = made[0]
        idle = [median(shares) for shares in zip(*(turn.idle_shares for turn in made), strict=True)]
        report.add_row(
            arm=arm,
            seconds=round(median(turn.seconds for turn in made), 2),
            cpu_s=round(median(turn.cpu_s for turn in made), 1),
            **{CALLS[name]: round(median(turn.seconds_per_call[name] for turn in made), 2) for name in CALLS},
            idle=round(fmean(idle), 3),
            by_rank=" ".join(f"{share:.2f}" for share in idle),
            moved=round(first.bytes_moved / 1e6, 1),
            minimum=round(first.bytes_minimum / 1e6, 1),
            lasting=" ".join(
                f"{max(sizes) / 1e6:.0f}" for sizes in zip(*(turn.peak_bytes for turn in made), strict=True)
            ),
            peak=" ".join(f"{peak.predicted / 1e6:.0f}/{peak.measured / 1e6:.0f}" for peak in peaks[arm]),
            **compare(first, turns[STATIC][0]),
        )


def compare(turn: Turn, other: Turn) -> dict[str, float]:
    """Return the share of equal responses, and the differences of scores and losses, in iterations of both arms."""
    tokens = _paired(turn.rollouts, other.rollouts)
    scores = _paired(turn.scores, other.scores)
    both = turn.losses.keys() & other.losses.keys()
    return {
        "equal": fmean(ours == theirs for ours, theirs in tokens),
        "score_diff": max(abs(ours - theirs) for ours, theirs in scores),
        "loss_diff": max(abs(turn.losses[key] - other.losses[key]) for key in both),
    }


def _paired(ours: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of values of the same sample, for the iterations of both arms."""
    iterations = zip(ours, theirs, strict=False)
    return [pair for one, other in iterations for pair in zip(one, other, strict=True)]


def fill_data(report: BenchmarkReport, moved: DataTurn, num_samples: int) -> None:
    """Add a row for the exchange of one iteration's data."""
    report.add_row(
        arm=f"data of {num_samples} x {PROMPT_TOKENS + RESPONSE_TOKENS} tokens",
        seconds=round(moved.seconds, 4),
        moved=round(moved.bytes_sent / 1e6, 1),
        minimum=round(moved.bytes_minimum / 1e6, 1),
        floor_s=round(moved.floor_s, 4),
        mb_per_s=round(moved.bytes_sent / moved.seconds / 1e6),
    )


def judge(
    report: BenchmarkReport, turns: Mapping[str, Sequence[Turn]], peaks: Mapping[str, Sequence[PeakBytes]]
) -> None:
    """Add the targets."""
    seconds = {arm: [turn.seconds for turn in made] for arm, made in turns.items()}
    cpu_s = {arm: [turn.cpu_s for turn in made] for arm, made in turns.items()}
    idle = {arm: median(fmean(turn.idle_shares) for turn in made) for arm, made in turns.items()}
    best = min((arm for arm in turns if arm != STATIC), key=lambda arm: median(seconds[arm]))
    for clock, values in (("seconds", seconds), ("CPU seconds", cpu_s)):
        ratio = paired_ratio(values[STATIC], values[best])
        report.require_at_least(f"{clock} of {STATIC} over {best}", ratio, FASTER_THAN_STATIC)
    shorter = paired_ratio(seconds[OVERLAPPING], seconds[IN_TURN])
    report.require_at_most(f"seconds of {OVERLAPPING} over {IN_TURN}", shorter, 1.0)
    report.require_at_most(f"idle share of {OVERLAPPING} over {IN_TURN}", idle[OVERLAPPING] / idle[IN_TURN], 1.0)
    against = [compare(turn, turns[STATIC][0]) for made in turns.values() for turn in made]
    against += [compare(turn, turns[IN_TURN][0]) for turn in turns[OVERLAPPING]]
    report.require_at_least("share of equal responses", min(found["equal"] for found in against), 1.0)
    for name, column in (("scores", "score_diff"), ("losses", "loss_diff")):
        report.require_at_most(f"largest difference of {name}", max(found[column] for found in against), TOLERANCE)
    errors = [abs(peak.error) for ranks in peaks.values() for peak in ranks]
    report.require_at_most("largest error of a predicted peak", max(errors), PEAK_TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Run all arms in turns and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=2, help="turns of each arm")
    parser.add_argument("--new-tokens", type=int, default=Workload().new_tokens, help="length of the responses")
    parser.add_argument("--tiny", action="store_true", help="models of 100,000 weights, for a quick look")
    parser.add_argument(
        "--limit-s", type=float, default=800.0, help="seconds for all turns; there are fewer turns if needed"
    )
    options = parser.parse_args(arguments)
    report = BenchmarkReport("plans", settings={"world_size": WORLD_SIZE} | asdict(workload(options)))
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    others: dict[str, Any] = {}
    for name, answer in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        if not isinstance(answer, Turn):
            others[name] = answer
            continue
        turns[name].append(answer)
        sys.stderr.write(f"{name}: {answer.seconds:.2f} s an iteration, CPU {answer.cpu_s:.1f} s\n")
    report.settings["num_weights"] = turns[STATIC][0].num_weights
    report.settings["plans"] = {arm: made[0].plan["calls"] for arm, made in turns.items()}
    fill(report, turns, others["peaks"])
    fill_data(report, others["data"], 8 if options.tiny else NUM_SAMPLES)
    judge(report, turns, others["peaks"])
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
