"""Bytes that LoRA and DoRA move and hold, and their losses next to those of merged weights.

GRPO trains a random Qwen3 on two CPU ranks, sharded; it generates and scores with whole replicas. The table has the
bytes moved in the first and in later iterations, and the bytes of weights on each rank. Arms:

- whole: trains all weights, with a separate reference.
- lora, dora: train adapters; the base is the reference.
- lora, no reference: shows the cost of that reference.

Losses are those of SFT on one rank, compared with a plain model that has the adapters merged into its weights.

Run ``python -m benchmarks.adapters``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, gather_from_ranks

WORLD_SIZE = 2
PLAN = {"calls": {"actor.train": "fsdp2", "actor.generate": "dp2", "reference.infer": "dp2"}}
LORA = {"peft_type": "LORA", "target_modules": "all-linear", "init_lora_weights": False}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "lora": {"peft_config": LORA},
    "dora": {"peft_config": {**LORA, "use_dora": True}},
    "lora, no reference": {"peft_config": LORA, "kl_coef": 0.0},
}
PRECISIONS = ("32-true", "bf16-mixed")
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model, and samples of an iteration."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 8
    vocabulary: int = 8192
    rank: int = 8
    """Rank of the adapters."""
    num_prompts: int = 4
    new_tokens: int = 8
    iterations: int = 3


TINY = Workload(hidden_size=64, intermediate_size=128, num_layers=2, vocabulary=512, rank=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Bytes that one arm moved and held."""

    trained_bytes: int
    """Bytes of all trained weights, in the dtype in which they move."""
    moved: tuple[int, ...]
    """Bytes moved in each iteration, by all ranks."""
    held: tuple[int, ...]
    """Bytes of weights on each rank."""
    home: tuple[int, ...]
    """Bytes of weights of home replicas on each rank."""


def run_arm(name: str, precision: str, work: Workload) -> Turn:
    """Train with the other rank, and return the bytes of both. Collective."""
    from benchmarks.workload import byte_tokenizer, make_trainer, random_prompts, share_of_vowels
    from lightning_realloc import GRPO, ReallocStrategy, SamplingParams

    sampling = SamplingParams(n=2, max_new_tokens=work.new_tokens)
    settings = {"kl_coef": 0.1, "sampling": sampling, "learning_rate": 1e-6, **ARMS[name]}
    if "peft_config" in settings:
        settings["peft_config"] = {**settings["peft_config"], "r": work.rank}
    strategy = ReallocStrategy(PLAN if settings["kl_coef"] else _without_reference(), transport="direct")
    moved = _meter()
    trainer = make_trainer(strategy=strategy, precision=precision, max_steps=work.iterations, callbacks=[moved])
    module = GRPO(_config(work), share_of_vowels, tokenizer=byte_tokenizer(), **settings)
    trainer.fit(module, random_prompts(work.num_prompts * work.iterations, length=16, batch_size=work.num_prompts))
    pool, sizes = strategy.pool, moved.sizes
    trained = sum(p.numel() for p in pool.home("actor").model.parameters() if p.requires_grad)
    everywhere = gather_from_ranks((trained, _bytes_of_weights(pool, copies=False), _bytes_of_weights(pool)))
    itemsize = 2 if precision == "bf16-mixed" else 4
    return Turn(
        trained_bytes=everywhere[0][0] * itemsize,
        moved=tuple(sizes[at] for at in range(work.iterations)),
        held=tuple(held for _, _, held in everywhere),
        home=tuple(home for _, home, _ in everywhere),
    )


def _without_reference() -> dict[str, Any]:
    return {"calls": {name: layout for name, layout in PLAN["calls"].items() if not name.startswith("reference")}}


def _bytes_of_weights(pool: Any, *, copies: bool = True) -> int:
    """Return the bytes of the replicas' weights on this rank; a tensor that two replicas share counts once."""
    from lightning_realloc.runtime.parallel.shards import local_tensors

    calls = [call.name for call in pool.dataflow.model_calls]
    replicas = {id(replica): replica for replica in
                [pool.home(role) for role in pool.roles] + [pool.target(name) for name in calls if copies]}  # fmt: skip
    tensors = [tensor for one in replicas.values() for tensor in local_tensors(one.model).values()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _meter() -> Any:
    from lightning_realloc.callbacks import PhaseCallback

    class Meter(PhaseCallback):
        """Sums the moved bytes of each iteration."""

        def __init__(self) -> None:
            self.sizes: defaultdict[int, int] = defaultdict(int)

        def on_reallocate(self, trainer: Any, pl_module: Any, phase: str, report: Any) -> None:
            self.sizes[trainer.global_step] += report.bytes_moved

    return Meter()


def _config(work: Workload) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        head_dim=work.hidden_size // 4, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def losses_apart(work: Workload) -> list[tuple[float, float, float]]:
    """Train adapters by SFT; return the losses of each step with adapters, with merged weights and of the base."""
    from benchmarks.workload import byte_tokenizer, make_trainer, random_texts
    from lightning_realloc import SFT, ReallocStrategy, SFTDataModule
    from lightning_realloc.runtime.model.adapter_layers import adapters_disabled, merge_permanently

    found: list[tuple[float, float, float]] = []

    class Compared(SFT):
        def actor_loss(self, actor: Any, batch: Any, totals: Any) -> Any:
            loss = super().actor_loss(actor, batch, totals)
            with torch.no_grad():
                merged = super().actor_loss(merge_permanently(copy.deepcopy(actor)), batch, totals)
                with adapters_disabled(actor):
                    base = super().actor_loss(actor, batch, totals)
            found.append((float(loss.value), float(merged.value), float(base.value)))
            return loss

    texts = random_texts(8 * work.iterations, length=16, seed=2)
    rows = [{"prompt": text[:8], "completion": text[8:]} for text in texts]
    module = Compared(
        _config(work), tokenizer=byte_tokenizer(), peft_config={**LORA, "r": work.rank},
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    trainer = make_trainer(strategy=ReallocStrategy("heuristic"), max_steps=work.iterations)
    trainer.fit(module, SFTDataModule(rows, batch_size=8))
    return found


def fill(report: BenchmarkReport, turns: Mapping[tuple[str, str], Turn]) -> None:
    """Add a row for each arm and precision, and the targets."""
    for (name, precision), turn in turns.items():
        later = max(turn.moved[1:])
        report.add_row(
            arm=name, precision=precision, trained_bytes=turn.trained_bytes, first=turn.moved[0], later=later,
            later_over_trained=round(later / turn.trained_bytes, 4), home=max(turn.home), held=max(turn.held),
        )  # fmt: skip
        if name != "whole":
            name_of_target = f"{name}, {precision}: bytes of an iteration after the first over the adapters'"
            report.require_at_most(name_of_target, later / turn.trained_bytes, 1.01)
    for precision in {precision for _, precision in turns}:
        shared, alone = turns["lora", precision], turns["lora, no reference", precision]
        report.require_at_most(
            f"{precision}: weights with a reference over those without", max(shared.held) / max(alone.held), 1.0
        )
    whole = {precision: max(turns["lora", precision].home) for precision in PRECISIONS}
    report.require_at_most(
        "lora: home weights under bf16-mixed over 32-true", whole["bf16-mixed"] / whole["32-true"], 0.55
    )


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run all arms on this rank; rank 0 sends the results."""
    for precision in PRECISIONS:
        for name in ARMS:
            turn = run_arm(name, precision, workload(options))
            gc.collect()
            if rank == 0:
                answers.send(((name, precision), turn))


def compare_losses(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Compare losses on one rank."""
    answers.send(losses_apart(workload(options)))


def workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options ask for."""
    return TINY if options.tiny else Workload()


def main(arguments: list[str] | None = None) -> int:
    """Run every arm and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="models of 200,000 weights, for a quick look")
    options = parser.parse_args(arguments)
    report = BenchmarkReport("adapters", settings={"world_size": WORLD_SIZE, "plan": PLAN} | asdict(workload(options)))
    fill(report, dict(answers_of_ranks(work_on, options, world_size=WORLD_SIZE)))
    (losses,) = answers_of_ranks(compare_losses, options, world_size=1)
    differences, effects = ([abs(row[0] - row[at]) for row in losses] for at in (1, 2))
    report.require_at_most("largest difference from merged weights' loss", max(differences), TOLERANCE)
    report.require_at_least("smallest difference from the base's loss", min(effects), 100 * TOLERANCE)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
