"""The demo's GRPO with drafting and sample rebalancing, next to the same run without.

The arms are those of `everything`, with the demo's files, model, rewards and plan. Four ranks generate as ``dp2.tp2``.
The model has 107,000 weights, responses have six tokens, and prompts repeat in every epoch.

Run ``python -m benchmarks.everything_demo``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.everything import ARMS, Readings, Run, collect, conclude, fit, recorded_grpo, take_turns
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks
from examples import report as demo_report
from examples.demo import Settings, make_grpo, make_prompts
from examples.sorting import read_jsonl

RATIO_TO = "proximal"
"""GRPO's ``ratio_to``, as in `everything`: neither drafts nor moves round the trained model's own log-probabilities."""
_LOADING = {"epochs": 1, "prompts_per_iteration": 240, "responses_per_prompt": 2}
"""Settings of a short run of two iterations, which loads kernels."""


def run_arm(arm: str, settings: Settings) -> Run:
    """Train the demo's model, and return the measurements of all ranks. Collective."""
    noted = Readings()
    make = partial(recorded_grpo(noted, **ARMS[arm]), ratio_to=RATIO_TO)
    # actor.infer computes the log-probabilities for the ratios.
    calls = settings.plan["calls"] | {"actor.infer": settings.infer_layout}
    return fit(make_grpo(settings, make), make_prompts(settings), noted, calls, epochs=settings.epochs)


def work_on(rank: int, settings: Settings, turns: int, answers: Connection) -> None:
    """Run all turns of both arms on this rank; the first rank sends the results."""
    demo_report.silence_hints()
    for arm in ARMS:
        run_arm(arm, replace(settings, **_LOADING))
    take_turns(rank, lambda arm: run_arm(arm, settings), turns, answers)


def prepare(settings: Settings) -> None:
    """Write the demo's files and its warmed-up model in separate processes, as a user does."""
    command = [sys.executable, "-m", "examples.demo", "--prepare-only", "--folder", str(settings.folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms in turns; return 1 if they differ."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=4, help="runs of each arm, in turns")
    parser.add_argument(
        "--prepared", type=Path, help="folder of `python -m examples.demo --prepare-only`; default: run that first"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(folder=options.prepared or Path(folder))
        if options.prepared is None:
            prepare(settings)
        num_prompts = len(read_jsonl(settings.folder / "train.jsonl"))
        if num_prompts != settings.num_prompts:
            parser.error(f"{settings.folder} holds {num_prompts} prompts and not the demo's {settings.num_prompts}")
        report = BenchmarkReport("everything_demo", seeds=(settings.seed,), settings={"ratio_to": RATIO_TO})
        report.settings |= asdict(settings) | {"folder": None}
        answers = answers_of_ranks(work_on, settings, options.turns, world_size=settings.num_ranks)
        collect(report, answers, ranks=settings.num_ranks)
    return conclude(report, options)


if __name__ == "__main__":
    sys.exit(main())
