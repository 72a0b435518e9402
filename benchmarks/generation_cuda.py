"""Tokens per second of `GenerationEngine` on one GPU, with and without CUDA graphs, and of `generate`.

The workload is that of `benchmarks.generation`: all arms draw the same number of tokens for the same prompts. Response
lengths are geometric (mean 64, at most 256). Models have random weights in bfloat16. Seconds are wall time; arms take
turns.

Run ``python -m benchmarks.generation_cuda``.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.generation import checked, draw_workload, run_engine, run_generate
from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio
from benchmarks.llamas import SHAPES, VOCABULARY, build_llama
from lightning_realloc.generation import GenerationEngine


@dataclass(frozen=True, slots=True)
class Case:
    """One model, its batch size and the ratio to reach."""

    model: str
    batch: int
    samples: int
    over_generate: float
    repeats: int = 3

    @property
    def name(self) -> str:
        """Short text for tables."""
        return f"{self.model} bfloat16 B={self.batch} N={self.samples}"


CASES = (
    Case("1b", 1, 2, over_generate=2.0),
    Case("1b", 8, 16, over_generate=2.0),
    Case("1b", 32, 64, over_generate=4.0),
    Case("1b", 128, 256, over_generate=4.0),
    Case("8b", 32, 64, over_generate=3.0),
    Case("8b", 128, 256, over_generate=3.0),
)


def measure(case: Case, model: PreTrainedModel, report: BenchmarkReport, seed: int) -> None:
    """Time one case's arms and add its rows and target."""
    work = draw_workload(case.samples, VOCABULARY, seed)
    engines = {
        "engine, no graphs": GenerationEngine(model, max_slots=case.batch, cuda_graphs=False),
        "engine": GenerationEngine(model, max_slots=case.batch),
    }

    def arm_of(engine: GenerationEngine) -> Callable[[], int]:
        return lambda: run_engine(engine, work, seed)

    runs: dict[str, Callable[[], int]] = {"generate": lambda: run_generate(model, work, case.batch)}
    runs.update({name: arm_of(engine) for name, engine in engines.items()})
    total = sum(work.lengths)
    arms = {name: checked(finished(run), total) for name, run in runs.items()}
    # The first round loads kernels and captures graphs; the second one captures shapes that occur once per call.
    for warm_up in (arms, {name: arms[name] for name in engines}):
        interleave(warm_up, repeats=1, clock=time.perf_counter)
    seconds = interleave(arms, repeats=case.repeats, clock=time.perf_counter)
    for name, times in seconds.items():
        steps = engines[name].stats.num_steps if name in engines else None
        report.add_row(
            case=case.name, arm=name, tokens=total, seconds=min(times), tokens_per_s=total / min(times),
            ms_per_step=None if steps is None else 1e3 * min(times) / steps,
            over_generate=paired_ratio(seconds["generate"], times),
        )  # fmt: skip
    over = paired_ratio(seconds["generate"], seconds["engine"])
    report.require_at_least(f"{case.name}: over generate", over, case.over_generate)
    for engine in engines.values():
        engine.release()


def finished(run: Callable[[], int]) -> Callable[[], int]:
    """Return ``run`` with a wait for its last kernel."""

    def finished() -> int:
        made = run()
        torch.cuda.synchronize()
        return made

    return finished


def main() -> int:
    """Run the benchmark; return the process's exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and sampling")
    parser.add_argument("--repeats", type=int, help="turns of each arm; default: that of each case")
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    options = parser.parse_args()
    report = BenchmarkReport("generation_cuda", seeds=(options.seed,))
    if not torch.cuda.is_available():
        report.add_row(case="all", skipped="needs a CUDA device")
        return report.finish(options)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda")
    cases = [replace(case, repeats=options.repeats or case.repeats) for case in CASES if options.only in case.name]
    for name in dict.fromkeys(case.model for case in cases):
        model = build_llama(SHAPES[name], device)
        for case in cases:
            if case.model == name:
                measure(case, model, report, options.seed)
                print(*report.rows[-3:], sep="\n", flush=True)
                report.write(options.json)
        del model
        torch.cuda.empty_cache()
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
