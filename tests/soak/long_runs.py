"""The trial's runs in the ranks: long ones with their figures over time, and many fits one after the other."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_realloc import GenerationOptions
from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.strategies.runs import Batches

EVERY = 10
"""Iterations between two figures, and between two plans."""
ARENA_BYTES = 64 << 20
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

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Record figures and change the plan."""
        if trainer.global_step % EVERY:
            return
        module: Any = pl_module
        module.tokens.clear()  # of all iterations, kept by the tests' modules alone
        module.rewards.clear()
        strategy: Any = trainer.strategy
        strategy.set_plan(self.plans[trainer.global_step // EVERY % 2])
        gc.collect()
        self.rows.append((float(trainer.global_step), *figures()))


NAMES = ("MB resident", "descriptors", "threads", "maps")


def figures() -> tuple[float, ...]:
    """Return resident MB, open descriptors, threads and memory maps of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = count_maps(Path("/proc/self/maps").read_text().splitlines())
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resident, float(len(os.listdir("/proc/self/fd"))), float(threading.active_count()), float(maps)


def count_maps(lines: Sequence[str]) -> int:
    """Return the memory maps of ``/proc/self/maps``, without those of malloc's arenas.

    glibc makes another arena, of two maps, whenever threads wait for each other, up to eight for each core: a busy
    machine has more of them. An arena's second map is a reserve that ends at a multiple of 64 MiB (``HEAP_MAX_SIZE`` in
    glibc's malloc/arena.c).
    """
    fields = [line.split() for line in lines]
    reserves = (one for one in fields if len(one) == 5 and one[1] == "---p")
    arenas = sum(int(one[0].partition("-")[2], 16) % ARENA_BYTES == 0 for one in reserves)
    return len(fields) - 2 * arenas


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
    trainer.fit(make(generation=GenerationOptions(sample_reallocation=True)), Batches(20))
    return recorded.rows


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
