"""GRPO of a tiny model on 8, 16 and 32 processes of one machine: seconds of an iteration by call, and of rank 0's work.

The work is the same for every number of ranks: 32 prompts with four responses of at most 16 tokens. What grows is the
cost of ranks: more messages, and more processes for the same cores. Samples are generated under ``dp.tp2`` and trained
on under FSDP over all ranks. `Timeline` records what every rank does; pieces of an iteration add up to its time. CPU
seconds are of all ranks together.

Run ``python -m benchmarks.many_ranks``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, gather_from_ranks

SIZES = (8, 16, 32)
PRELOADED = ("torch", "lightning.pytorch", "transformers.models.llama.modeling_llama", "lightning_realloc")
"""Modules that ranks share: without them, 32 processes would import torch on the same cores, each for seconds."""
NUM_PROMPTS, NUM_RESPONSES, NUM_TOKENS = 32, 4, 16
WARM_UP, MEASURED = 2, 4
CALLS = ("actor.generate", "reference.infer", "actor.train")


def train(rank: int, world_size: int, folder: str, answers: Connection) -> None:
    """Train on one rank with a record; rank 0 sends CPU seconds and resident bytes of all ranks."""
    from benchmarks.workload import make_trainer, random_model, random_prompts, share_of_vowels
    from lightning_realloc import GRPO, ReallocStrategy, SamplingParams, Timeline
    from lightning_realloc.runtime.measure.usage import resident_bytes

    model, tokenizer = random_model("llama", hidden_size=64, num_layers=2, num_heads=4, seed=0)
    sampling = SamplingParams(n=NUM_RESPONSES, max_new_tokens=NUM_TOKENS)
    layouts = (f"dp{world_size // 2}.tp2", f"dp{world_size}", f"fsdp{world_size}")
    strategy = ReallocStrategy(plan={"calls": dict(zip(CALLS, layouts, strict=True))})
    trainer = make_trainer(strategy=strategy, callbacks=[Timeline(folder)], max_steps=WARM_UP + MEASURED, max_epochs=-1)
    module = GRPO(model, share_of_vowels, tokenizer=tokenizer, sampling=sampling, kl_coef=0.04, learning_rate=1e-3)
    began = time.process_time()
    trainer.fit(module, random_prompts(NUM_PROMPTS * 8, length=8, batch_size=NUM_PROMPTS))
    usage = gather_from_ranks((time.process_time() - began, resident_bytes()))
    if rank == 0:
        answers.send(usage)
    answers.close()


def measure(world_size: int) -> dict[str, Any]:
    """Return the figures of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        (usage,) = answers_of_ranks(train, world_size, folder, world_size=world_size, preload=PRELOADED)
        return {"ranks": world_size, **seconds_of(Path(folder)), "CPU s of the run": sum(cpu for cpu, _ in usage)}


def seconds_of(folder: Path) -> dict[str, float]:
    """Return mean seconds of an iteration: the whole, each call on rank 0, moves, waits, and work between calls."""
    from lightning_realloc.recording.reader import read_run

    ranks = {rank: iterations[-MEASURED:] for rank, iterations in read_run(folder).last.ranks.items()}
    first, others = ranks[0], [one for rank, iterations in ranks.items() if rank for one in iterations]
    row = {"iteration, s": fmean(one.end - one.start for one in first)}
    for call in CALLS:
        row[call] = fmean(one.seconds.get("call", {}).get(call, 0.0) for one in first)
    row["moves"] = fmean(sum(one.seconds.get("move", {}).values()) for one in first)
    row["waits"] = fmean(sum(one.seconds.get("wait", {}).values()) for one in first)
    row["rank 0 between calls"] = fmean(_between_calls(one.seconds) for one in first)
    row["other ranks between calls"] = fmean(_between_calls(one.seconds) for one in others)
    return row


def _between_calls(seconds: Any) -> float:
    return sum(sum(named.values()) for kind, named in seconds.items() if kind not in ("call", "move", "wait"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all numbers of ranks."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks, even ones")
    options = parser.parse_args(arguments)
    report = BenchmarkReport("many_ranks", settings={"sizes": options.sizes, "iterations": MEASURED})
    for world_size in options.sizes:
        report.add_row(**measure(world_size))
        report.write(options.json)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
