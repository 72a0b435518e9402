"""Runs for the tests of Ray: GRPO of six iterations, and faults on one of its ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.optim import AdamW

from lightning_realloc.data.prompts import PromptDataModule
from tests.models import tiny_model
from tests.strategies import runs

MACHINE = {"num_cpus": 2, "object_store_memory": 78_643_200}  # bytes: the smallest store that Ray starts
DETECTION = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}  # fmt: skip
NUM_ITERATIONS = 6
PLAN = {"calls": {"actor.generate": "dp2", "reference.infer": "tp2", "actor.train": "fsdp2"}}


@contextmanager
def started_cluster(*, connects: bool = True, **head: Any) -> Iterator[Any]:
    """Start a cluster of one machine, to which this process connects; more machines may be added.

    Args:
        connects: Whether this process connects.
        head: Settings of the machine, in place of `MACHINE`.
    """
    import ray
    from ray.cluster_utils import Cluster

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    patch = pytest.MonkeyPatch()
    patch.setenv("GLOO_SOCKET_IFNAME", "lo")
    patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # ends no process for other programs' memory
    given = {**MACHINE, "node_ip_address": "127.0.0.2", "include_dashboard": False, "_system_config": DETECTION, **head}
    # Without its own handlers of exit and signals, machines may be added from a thread.
    started = Cluster(initialize_head=True, head_node_args=given, shutdown_at_exit=False)
    try:
        if connects:
            ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        patch.undo()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if type(sys.excepthook).__module__.startswith("lightning_realloc"):
            sys.excepthook = sys.__excepthook__


class Rewards(Callback):
    """Writes the rewards of the iterations since the process started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write them on rank 0."""
        if trainer.is_global_zero:
            torch.save(pl_module.rewards, self.folder / "rewards.pt")


class Fault(Callback):
    """Ends a process once, on a rank outside the machine that called the Trainer, after some iteration.

    Args:
        folder: Folder for a mark that it has happened.
        step: Iteration after which it happens.
        target: ``"rank"`` for the rank's process, ``"machine"`` for the raylet of its machine.
        spared: Ray's id of the machine that called the Trainer; every rank elsewhere may be hit.
    """

    def __init__(self, folder: Path, step: int, target: str, spared: str) -> None:
        self.mark = folder / f"{target} {step}"
        self.step = step
        self.target = target
        self.spared = spared

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """End the process, and wait for the end if it is another one."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        if trainer.global_step != self.step or here == self.spared or self.mark.exists():
            return
        self.mark.touch()
        process = os.getpid() if self.target == "rank" else os.getppid()
        name = Path(f"/proc/{process}/comm").read_text().strip()
        assert self.target == "rank" or name == "raylet", name
        os.kill(process, signal.SIGKILL)
        time.sleep(60.0)


class DriverFault(Callback):
    """Ends the process that called the Trainer once, after some iteration; rank 0 does it.

    Args:
        folder: Folder for a mark that it has happened.
        step: Iteration after which it happens.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.mark = folder / f"driver {step}"
        self.step = step
        self.pid = os.getpid()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """End the process, and wait for Ray to end this one."""
        if trainer.is_global_zero and trainer.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(self.pid, signal.SIGKILL)
            time.sleep(60.0)


class Devices(Callback):
    """Writes the device of every rank, the GPUs that it sees, and Ray's id of its machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Write the file of this rank."""
        import ray

        seen = {
            "device": str(trainer.strategy.root_device), "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "machine": ray.get_runtime_context().get_node_id(), "ranks": trainer.world_size,
        }  # fmt: skip
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


class Pace(Callback):
    """Writes a file after two iterations, and slows all down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Write the file on rank 0."""
        time.sleep(0.05)
        if trainer.global_step == 2 and trainer.is_global_zero:
            (self.folder / "under way").touch()


class OddError(Exception):
    """Exception of a user's own, with a constructor of its own."""

    def __init__(self, rank: int, *, where: str) -> None:
        super().__init__(rank, where)
        self.rank = rank
        self.where = where

    def __reduce__(self) -> Any:
        return partial(OddError, where=self.where), (self.rank,)


class Fails(Callback):
    """Raises on the last rank before models are built, with the variables of its environment."""

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Raise."""
        import ray

        trainer.strategy.barrier()
        if trainer.global_rank == trainer.world_size - 1:
            variables = " ".join(f"{name}={os.environ[name]}" for name in ("RANK", "NODE_RANK", "LOCAL_RANK"))
            raise OddError(trainer.global_rank, where=f"{variables} on {ray.util.get_node_ip_address()}")


def reward_letters(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward low tokens."""
    return runs.low_tokens(completion_ids)


def fit(
    strategy: Any,
    folder: Path,
    *callbacks: Callback,
    devices: int,
    num_nodes: int = 1,
    reward: Any = reward_letters,
    ckpt_path: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train GRPO with a checkpoint every two iterations, and return the weights that came back."""
    folder.mkdir(exist_ok=True)
    resumes = ckpt_path is not None
    rows = [{"prompt": f"{number} + {number} ="} for number in range(24)]
    module = runs.grpo(
        actor=tiny_model("llama", vocab_size=320), reference=tiny_model("llama", seed=1, vocab_size=320), reward=reward,
        optimizer=partial(AdamW, lr=1e-3, eps=1e-4),
    )  # fmt: skip
    trainer = runs.trainer(
        strategy, devices, num_nodes=num_nodes, max_steps=NUM_ITERATIONS, max_epochs=-1, default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1, save_last=resumes),
                   Rewards(folder), *callbacks],
        **options,
    )  # fmt: skip
    trainer.fit(module, PromptDataModule(rows, batch_size=6), ckpt_path=ckpt_path)
    assert trainer.global_step == NUM_ITERATIONS
    return {name: weight.clone() for name, weight in module.actor.state_dict().items()}


def fit_for_long(strategy: Any, folder: Path) -> None:
    """Train for longer than a test waits, and save a checkpoint when the run is stopped."""
    callbacks = [Pace(folder), OnExceptionCheckpoint(folder)]
    runs.trainer(strategy, 1, num_nodes=2, max_epochs=10_000, enable_checkpointing=True, callbacks=callbacks).fit(
        runs.grpo(), runs.Batches(2)
    )
