"""Trial of long runs: do memory, open files, threads and memory maps of the ranks grow?

    python -m tests.soak --iterations 2000

Tiny GRPO and PPO runs on two ranks change their plan every ten iterations and save a checkpoint every hundred. After
a warm-up, a line is fitted to each rank's figures; the table has its slope per 1,000 iterations, with its error.
Then ten fits of a larger model run one after the other in one process: no model may stay alive after a fit.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

WARM_UP = 0.2
"""Share of the iterations before the first figure that counts."""
EVERY = 10
"""Iterations between two figures, and between two plans."""
PLANS: tuple[dict[str, Any], ...] = (
    {"calls": {"actor.generate": "dp2", "reference.infer": "tp2", "actor.train": "fsdp2"}},
    {"calls": {"actor.generate": "tp2", "reference.infer": "dp1@1-1", "actor.train": "tp2"}},
)
OF_PPO: tuple[dict[str, str], ...] = (
    {"critic.infer": "dp2", "critic.train": "fsdp2"},
    {"critic.infer": "dp1@0-0", "critic.train": "tp2"},
)


class Figures(Callback):
    """Records this process's figures, and changes the plan."""

    def __init__(self, plans: Sequence[dict[str, Any]]) -> None:
        self.plans = plans
        self.rows: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Record figures and change the plan."""
        if trainer.global_step % EVERY:
            return
        strategy: Any = trainer.strategy
        strategy.set_plan(self.plans[trainer.global_step // EVERY % 2])
        gc.collect()
        self.rows.append((float(trainer.global_step), *figures()))


NAMES = ("MB resident", "descriptors", "threads", "maps")


def figures() -> tuple[float, ...]:
    """Return resident MB, open descriptors, threads and memory maps of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().count("\n")
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resident, float(len(os.listdir("/proc/self/fd"))), float(threading.active_count()), float(maps)


def soak(algorithm: str, num_iterations: int, folder: str) -> list[tuple[float, ...]]:
    """Train, and return this rank's figures."""
    plans = [
        {"calls": plan["calls"] | (OF_PPO[index] if algorithm == "ppo" else {})} for index, plan in enumerate(PLANS)
    ]
    recorded = Figures(plans)
    saved = ModelCheckpoint(folder, every_n_train_steps=100, save_last=True)
    trainer = runs.trainer(
        ReallocStrategy(plans[0]), 2, callbacks=[recorded, saved], max_steps=num_iterations, max_epochs=-1,
        enable_checkpointing=True,
    )  # fmt: skip
    make = {"grpo": runs.grpo, "ppo": runs.ppo}[algorithm]
    trainer.fit(make(sample_reallocation=True), Batches(20))
    return recorded.rows


def slope(rows: Sequence[tuple[float, ...]], column: int) -> tuple[float, float]:
    """Return the slope of a figure per 1,000 iterations, and its standard error (least squares)."""
    xs, ys = [row[0] / 1000 for row in rows], [row[column] for row in rows]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    found = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return found, (rest / (len(xs) - 2) / spread) ** 0.5


def fit_repeatedly(count: int, width: int) -> list[tuple[int, float]]:
    """Fit new models one after the other; return the living models and resident MB after each."""
    found = []
    for _ in range(count):
        config = LlamaConfig(
            vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=8,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        alive = weakref.ref(model)
        runs.trainer("realloc", 1, max_steps=1).fit(runs.sft(actor=model), Batches(1, size=2, responses=True))
        del model
        gc.collect()
        living = sum(isinstance(each, nn.Module) and isinstance(each, LlamaForCausalLM) for each in gc.get_objects())
        found.append((living + (alive() is not None), figures()[0]))
    return found


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of each algorithm")
    parser.add_argument("--fits", type=int, default=10, help="fits one after the other")
    parser.add_argument("--width", type=int, default=640, help="width of their model: 640 has 50 million weights")
    options = parser.parse_args()
    pool = WorkerPool(max_workers=2)
    grows = False
    try:
        for algorithm in ("grpo", "ppo"):
            with tempfile.TemporaryDirectory() as folder:
                ranks = pool.run(
                    soak, algorithm, options.iterations, folder, world_size=2, init_process_group=False,
                    deadline_s=options.iterations * 2.0 + 120,
                )  # fmt: skip
            for rank, rows in enumerate(ranks):
                rows = rows[int(len(rows) * WARM_UP) :]
                found = {name: slope(rows, column) for column, name in enumerate(NAMES, start=1)}
                text = ", ".join(f"{name} {value:+.2f} ± {error:.2f}" for name, (value, error) in found.items())
                print(f"{algorithm} rank {rank}, per 1,000 iterations: {text}", flush=True)
                grows |= any(value > 3 * error and value > 0.5 for value, error in found.values())
        fits = pool.run(
            fit_repeatedly, options.fits, options.width, world_size=1, init_process_group=False, deadline_s=900.0
        )
        for number, (living, resident) in enumerate(fits[0], start=1):
            print(f"fit {number}: {living} models alive, {resident:.0f} MB resident")
            grows |= living > 0
    finally:
        pool.close()
    print("grows" if grows else "flat")
    return grows


if __name__ == "__main__":
    sys.exit(main())
