"""CPU-seconds to the same score with this package and with TRL, on a tiny task for GRPO and for DPO.

GRPO writes letters and is rewarded for vowels; DPO learns the same from pairs. Both arms start from the same folder,
and see the same rows in the same order with the same settings. They take turns in processes of one thread each, with
several seeds. The table has final scores, CPU-seconds to the target score and seconds per step. CPU time is that of the
whole process, from the start of the first step; the JSON has wall time too.

Run ``python -m benchmarks.learning``; it needs TRL.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.learning_arms import ARMS, Curve, prepare_process, run
from benchmarks.learning_task import FAMILIES, QUICK, Task, save_model

LARGEST_SHARE = 2 / 3
"""Largest ratio of our seconds to TRL's, to the same score."""
NEVER = 99.0
"""Ratio of a run that does not reach the score."""
LEAST_NOISE = 0.01
"""Least noise of final scores: a smaller difference counts as none, even if seeds differ less."""

Curves = Mapping[str, Sequence[Curve]]
"""Arm -> its curves, one per seed."""


def take_turns(task: Task, families: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, Curve]]:
    """Yield (family, arm, curve) as runs end. The arm that comes first alternates between seeds."""
    context = multiprocessing.get_context("spawn")
    few = replace(task, grpo_steps=2, dpo_steps=2, num_held_out=2)
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-learning-"))
        arms = {
            arm: stack.enter_context(ProcessPoolExecutor(1, mp_context=context, initializer=prepare_process))
            for arm in ARMS
        }
        for number, seed in enumerate(seeds):
            folder = os.path.join(root, str(seed))
            arms[ARMS[1]].submit(save_model, task, folder, seed=seed).result()
            if number == 0:  # the first run loads libraries and kernels
                for arm, process in arms.items():
                    for family in families:
                        process.submit(run, arm, family, few, folder, seed).result()
            for family in families:
                for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                    yield family, arm, arms[arm].submit(run, arm, family, task, folder, seed).result()


def paired_shares(curves: Curves, score: float, *, window: int) -> list[float]:
    """Return our seconds to a score over TRL's for each seed.

    If our run never reaches it, the ratio is ``NEVER``. If only TRL's run never does, all its seconds count, which
    favours TRL.
    """
    shares = []
    for theirs, ours in zip(*(curves[arm] for arm in ARMS), strict=True):
        spent = ours.seconds_to(score, window=window)
        judged = theirs.seconds_to(score, window=window) or theirs.cpu_s[-1]
        shares.append(NEVER if spent is None else spent / judged)
    return shares


def noise(curves: Curves) -> float:
    """Return twice the standard error of the difference of both arms' mean final scores, at least a hundredth."""
    errors = [stdev([curve.final for curve in runs]) ** 2 / len(runs) for runs in curves.values()]
    return max(LEAST_NOISE, 2 * math.sqrt(sum(errors)))


def fill(report: BenchmarkReport, task: Task, family: str, curves: Curves) -> None:
    """Add a row for each arm, and the targets if there are several seeds."""
    score, window = task.score_to_reach(family), task.window
    for arm, runs in curves.items():
        finals, reached = [c.final for c in runs], [c.seconds_to(score, window=window) for c in runs]
        known = [seconds for seconds in reached if seconds is not None]
        report.add_row(
            family=family, arm=arm, seeds=len(runs), final=fmean(finals),
            spread=stdev(finals) if len(finals) > 1 else 0.0, reached=f"{len(known)} of {len(runs)}",
            cpu_s_to_score=median(known) if known else "never",
            cpu_s_per_step=median(c.cpu_s[-1] / len(c.cpu_s) for c in runs),
            wall_s_per_step=median(c.wall_s[-1] / len(c.wall_s) for c in runs),
        )  # fmt: skip
        report.settings[f"{family}, {arm}"] = [asdict(curve) for curve in runs]
    if len(curves[ARMS[0]]) < 2:
        return
    theirs, ours = (fmean(curve.final for curve in curves[arm]) for arm in ARMS)
    report.require_at_least(f"{family}: final score, against TRL's less noise", ours, theirs - noise(curves))
    shares = paired_shares(curves, score, window=window)
    report.require_at_most(f"{family}: seconds to {score}, over TRL's", median(shares), LARGEST_SHARE)
    report.require_at_least(f"{family}: runs that reach {score}", fmean(share < NEVER for share in shares), 1.0)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms in turns; return 1 if a target is missed."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of weights, data and sampling")
    parser.add_argument("--families", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="families to run")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and three steps without targets, for a quick look"
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        sys.stderr.write("this benchmark compares with TRL, which is not installed: pip install -e '.[bench]'\n")
        return 2
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true", "HF_DATASETS_OFFLINE": "1"}
    task, seeds = (QUICK, options.seeds[:1]) if options.quick else (Task(), options.seeds)
    settings: dict[str, Any] = {"clock": "process CPU time"} | asdict(task)
    report = BenchmarkReport("learning", seeds=tuple(seeds), settings=settings)
    curves: dict[str, defaultdict[str, list[Curve]]] = {family: defaultdict(list) for family in options.families}
    for family, arm, curve in take_turns(task, options.families, seeds):
        curves[family][arm].append(curve)
        sys.stderr.write(f"{family}, {arm}: {curve.scores[0]:.2f} to {curve.final:.2f} in {curve.cpu_s[-1]:.1f} s\n")
    for family, found in curves.items():
        fill(report, task, family, {arm: found[arm] for arm in ARMS})
    return max(report.finish(options), int(any(not target.met for target in report.targets)))


if __name__ == "__main__":
    sys.exit(main())
