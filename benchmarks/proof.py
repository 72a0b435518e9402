"""Seconds to compare weights after they moved, next to those of an iteration, and gigabytes per second of a check.

GRPO trains a random Qwen3 on two CPU ranks: sharded in training, whole replicas in generation. The first iteration is
left out. Seconds are those of the slower rank, medians over the iterations. Arms:

- demo: a model and a batch of the size of the README's demo.
- 100M: a model of 100 million weights.
- adapters: LoRA over the same base, of which only adapters move.

Then weights move from fsdp2 to dp2 again and again, through shared memory, with a check of sampled and of all elements.
A rank reads its replica in bf16 for that, and twice its shard in fp32: for itself and for the other rank.

Run ``python -m benchmarks.proof``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, gather_from_ranks
from benchmarks.reallocation import llama
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.transfer.executor import Reallocation

WORLD_SIZE = 2
PLAN = {"calls": {"actor.train": "fsdp2", "actor.generate": "dp2", "reference.infer": "dp2"}}
LORA = {"peft_type": "LORA", "target_modules": "all-linear", "r": 8}
LARGEST_SHARE = 0.005
NUM_CHECKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model, and samples of an iteration."""

    hidden_size: int
    num_layers: int
    vocabulary: int
    num_prompts: int
    new_tokens: int
    has_adapters: bool = False
    iterations: int = 5


ARMS: Mapping[str, Workload] = {
    "demo": Workload(hidden_size=128, num_layers=4, vocabulary=512, num_prompts=16, new_tokens=64),
    "100M": Workload(hidden_size=768, num_layers=10, vocabulary=32000, num_prompts=8, new_tokens=32),
    "adapters": Workload(
        hidden_size=768, num_layers=10, vocabulary=32000, num_prompts=8, new_tokens=32, has_adapters=True
    ),
}


def run_arm(work: Workload) -> dict[str, float]:
    """Train with the other rank; return medians of the slower rank's seconds, and the compared tensors. Collective."""
    from benchmarks.workload import byte_tokenizer, make_trainer, random_prompts, share_of_vowels
    from lightning_realloc import GRPO, ReallocStrategy, SamplingParams
    from lightning_realloc.callbacks import PhaseCallback

    class Clock(PhaseCallback):
        """Seconds of each iteration, and what its checks took."""

        def __init__(self) -> None:
            self.checks: dict[int, list[tuple[int, float, float]]] = {}
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self._begin = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self._begin)

        def on_reallocate(self, trainer: Any, pl_module: Any, phase: str, report: Any) -> None:
            found = report.num_checked, report.check_s, report.seconds
            self.checks.setdefault(trainer.global_step, []).append(found)

    clock = Clock()
    sampling = SamplingParams(n=2, max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens)
    settings = {"peft_config": LORA} if work.has_adapters else {}
    module = GRPO(
        _config(work), share_of_vowels, tokenizer=byte_tokenizer(), sampling=sampling, kl_coef=0.1, **settings
    )
    strategy = ReallocStrategy(PLAN)
    trainer = make_trainer(strategy=strategy, precision="bf16-mixed", max_steps=work.iterations, callbacks=[clock])
    trainer.fit(module, random_prompts(work.num_prompts * work.iterations, length=16, batch_size=work.num_prompts))
    later = [clock.checks.get(step, []) for step in range(1, work.iterations)]
    mine = {
        "iteration_s": median(clock.seconds[1:]),
        "check_s": median(sum(check for _, check, _ in checks) for checks in later),
        "move_s": median(sum(move for _, _, move in checks) for checks in later),
        "tensors": max(sum(count for count, _, _ in checks) for checks in later),
        "million_weights": sum(p.numel for p in strategy.pool.home("actor").model_layout.model.params) / 1e6,
    }
    everyone = gather_from_ranks(mine)
    return {name: max(each[name] for each in everyone) for name in mine}


def _config(work: Workload) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=3 * work.hidden_size,
        num_hidden_layers=work.num_layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        head_dim=work.hidden_size // 4, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def run_checks(num_blocks: int) -> dict[str, float]:
    """Return the least seconds of a check of sampled and of all elements, of the slower rank. Collective."""
    model = llama(num_blocks)
    source, target = (ModelLayout(model, Layout.parse(text)) for text in ("fsdp2", "dp2"))
    rank = dist.get_rank()
    held: dict[str, Tensor] = {name: torch.randn(source.local_shape(name, rank)) for name in source.names(rank)}
    found: dict[str, float] = {"million_weights": model.num_elements / 1e6}
    for extent in ("sampled", "all"):
        move = Reallocation(
            source, held, target, rank=rank, world_size=WORLD_SIZE, dtype=torch.bfloat16, device="cpu",
            verify_weights=extent,
        )  # fmt: skip
        reports = [move.run(version) for version in range(NUM_CHECKS)]
        found |= {"move_s": min(report.seconds for report in reports)}
        found[f"{extent}_s"] = min(report.check_s for report in reports)
        del move
        gc.collect()
    everyone = gather_from_ranks(found)
    return {name: max(each[name] for each in everyone) for name in found}


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run all arms on this rank; rank 0 sends the results."""
    for name, work in arms(options).items():
        found = run_arm(work)
        gc.collect()
        if rank == 0:
            answers.send((name, found))
    found = run_checks(2 if options.tiny else 8)
    if rank == 0:
        answers.send(("checks", found))


def arms(options: argparse.Namespace) -> Mapping[str, Workload]:
    """Return the workloads that the options ask for."""
    return {"demo": ARMS["demo"]} if options.tiny else ARMS


def fill(report: BenchmarkReport, found: dict[str, dict[str, float]]) -> None:
    """Add a row for each arm, and the targets."""
    checks = found.pop("checks")
    for name, row in found.items():
        share = row["check_s"] / row["iteration_s"]
        report.add_row(arm=name, share=round(share, 5), **{key: round(value, 5) for key, value in row.items()})
        report.require_at_most(f"{name}: seconds of the check over those of an iteration", share, LARGEST_SHARE)
    weights = checks["million_weights"] * 1e6
    # A rank reads its bf16 replica, and as many fp32 elements of its shard: for itself and for the other rank.
    num_bytes = weights * 2 + weights * 4
    report.add_row(arm="checks alone", **{key: round(value, 5) for key, value in checks.items()})
    report.require_at_least("GB/s of a check of all elements, on each rank", num_bytes / checks["all_s"] / 1e9, 0.5)


def main(arguments: list[str] | None = None) -> int:
    """Run every arm and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="the demo's size alone, for a quick look")
    options = parser.parse_args(arguments)
    shown = {name: asdict(work) for name, work in arms(options).items()}
    report = BenchmarkReport("proof", settings={"world_size": WORLD_SIZE, "plan": PLAN, "arms": shown})
    fill(report, dict(answers_of_ranks(work_on, options, world_size=WORLD_SIZE)))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
