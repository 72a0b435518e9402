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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.generation import checked, draw_workload, run_engine, run_generate
from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio
from lightning_realloc.generation import GenerationEngine

VOCABULARY = 128256


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    head_dim: int
    tied: bool


SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 64, tied=True),
    "8b": Shape(4096, 14336, 32, 32, 128, tied=False),
}


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


def build_model(name: str, device: torch.device) -> PreTrainedModel:
    """Return a Llama with random weights."""
    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_blocks, num_attention_heads=shape.num_heads, num_key_value_heads=8,
        head_dim=shape.head_dim, max_position_embeddings=4096, tie_word_embeddings=shape.tied, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, dtype="bfloat16", attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


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
    arms = {name: checked(_finished(run), total) for name, run in runs.items()}
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


def _finished(run: Callable[[], int]) -> Callable[[], int]:
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
        model = build_model(name, device)
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
