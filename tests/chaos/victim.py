"""Script of one rank in the trial of faults: trains a tiny GRPO, PPO or agents, and brings about one fault.

Its argument is a JSON file with the algorithm, the launcher, a folder, and the fault, or none. Every rank writes its
process id there. The run changes its plan every three iterations, saves a checkpoint every two, and exports once. No
sample moves between ranks while it is generated: that depends on the clock, and rounds differently in float32.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.runtime.messages import watchdog
from lightning_realloc.strategies import ReallocStrategy
from tests.chaos import agents
from tests.chaos.faults import MOMENTS
from tests.models import tiny_model
from tests.strategies import runs

NUM_ITERATIONS = 8
STALL_TIMEOUT_S = 4.0
"""Seconds of a stall after which the watchdog ends a waiting rank."""


def reward_letters(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward low tokens."""
    return runs.low_tokens(completion_ids)


class Replan(Callback):
    """Changes the plan every three iterations, and exports the actor after five."""

    def __init__(self, folder: Path, plans: Sequence[dict[str, Any]]) -> None:
        self.folder, self.plans = folder, plans

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Change the plan or export, by the number of the iteration."""
        strategy: Any = trainer.strategy
        if trainer.global_step % 3 == 0:
            strategy.set_plan(self.plans[trainer.global_step // 3 % 2])
        if trainer.global_step == 5:
            strategy.save_huggingface("actor", self.folder / "actor")


class Results(Callback):
    """Writes the trained weights of all trained roles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write them on rank 0, as one mapping."""
        strategy: Any = trainer.strategy
        weights = {role: strategy.full_weights(role) for role in strategy.pool.dataflow.trained_roles}
        if trainer.is_global_zero:
            torch.save(weights, self.folder / "weights.pt")


def plans_of(algorithm: str, world_size: int) -> list[dict[str, Any]]:
    """Return two plans with other layouts for every call; in the second one calls overlap on disjoint ranks."""
    last = world_size - 1
    calls = {
        "actor.generate": (f"dp{world_size}", f"dp{last}@0-{last - 1}"),
        "reference.infer": ("tp2@0-1", f"dp1@{last}-{last}"),
        "actor.train": (f"fsdp{world_size}", "fsdp2@0-1"),
    }
    if algorithm == "ppo":
        calls |= {"critic.infer": (f"dp{world_size}", f"dp1@{last}-{last}"), "critic.train": ("fsdp2@0-1", "tp2@0-1")}
    return [{"calls": {name: layouts[index] for name, layouts in calls.items()}} for index in range(2)]


def sabotage(fault: dict[str, Any], folder: Path) -> None:
    """Make this rank bring about the fault when it comes to the moment for the given time."""
    module_name, _, path = MOMENTS[fault["moment"]].partition(":")
    owner: Any = import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != fault["occurrence"]:
            return original(*args, **kwargs)
        if fault["moment"] == "save: exchange":  # the new checkpoint is in place, the earlier one not yet removed
            result = original(*args, **kwargs)
            strike(fault, folder)
            return result
        strike(fault, folder)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def strike(fault: dict[str, Any], folder: Path) -> None:
    """Send the signal to its target."""
    (folder / "struck").touch()
    number = signal.Signals[fault["signal"]]
    if fault["target"] == "launcher":
        os.kill(int((folder / "launcher").read_text()), number)
    elif fault["target"] == "all":
        others = [int(file.read_text()) for file in folder.glob("pid*") if file.name != f"pid{fault['rank']}"]
        for process in [*others, os.getpid()]:
            os.kill(process, number)
    else:
        os.kill(os.getpid(), number)


class Ranks(Callback):
    """Writes this rank's process id, and prepares the fault on the rank that brings it about."""

    def __init__(self, folder: Path, fault: dict[str, Any] | None) -> None:
        self.folder, self.fault = folder, fault

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Write the id before models are built."""
        (self.folder / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
        if self.fault is not None and self.fault["signal"] == "SIGSTOP":
            watchdog.FIRST_CALL_S = STALL_TIMEOUT_S  # otherwise ranks wait half an hour for one stopped in a first call
        trainer.strategy.barrier()
        if self.fault is not None and trainer.global_rank == self.fault["rank"]:
            sabotage(self.fault, self.folder)


def train(case: dict[str, Any]) -> None:
    """Fit, and write the trained weights. The loader of the data resumes within an epoch."""
    folder, fault, num_nodes = Path(case["folder"]), case.get("fault"), case.get("num_nodes", 1)
    plans = plans_of(case["algorithm"], case["world_size"])
    resumed, has_agents = case.get("ckpt_path"), case["algorithm"] == "agents"
    plan = json.loads(Path(resumed, "realloc.json").read_text())["plan"] if resumed else plans[0]
    callbacks = [
        Ranks(folder, fault),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1, save_last=True),
        OnExceptionCheckpoint(folder / "checkpoints"),
        Replan(folder, plans),
        Results(folder),
    ]
    if has_agents:
        callbacks.append(agents.LeftOpen(folder))
    strategy = ReallocStrategy(
        plan,
        launcher="spawn" if case["launcher"] == "spawn" else "popen",
        stall_timeout=case.get("stall_timeout", agents.STALL_TIMEOUT_S if has_agents else STALL_TIMEOUT_S),
        on_stall="end",
    )
    trainer = runs.trainer(
        strategy, case["world_size"] // num_nodes, num_nodes=num_nodes, callbacks=callbacks,
        max_steps=NUM_ITERATIONS, max_epochs=-1, enable_checkpointing=True, default_root_dir=folder,
    )  # fmt: skip
    if has_agents:
        module, data = agents.algorithm(case["address"], reward_letters), agents.games()
    else:
        make = {"grpo": runs.grpo, "ppo": runs.ppo}[case["algorithm"]]
        models = {
            "actor": tiny_model("llama", vocab_size=320),
            "reference": tiny_model("llama", seed=1, vocab_size=320),
        }
        rows = [{"prompt": f"{number} + {number} ="} for number in range(24)]
        module, data = make(reward=reward_letters, **models), PromptDataModule(rows, batch_size=6)
    trainer.fit(module, data, ckpt_path=resumed)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
