"""How do the tests of checkpoints run an algorithm? In parts, each with its own layout, one going on from the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.runtime.samples import Samples
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.distributed_checkpoint import read_whole, stored_tensors
from tests.models import tiny_model
from tests.strategies import runs

NUM_ROWS = 10
BATCH_SIZE = 4
"""Three batches an epoch, the last one of two rows."""


@dataclass(frozen=True)
class Part:
    """A stretch of a run."""

    plan: Any
    """Of the strategy."""
    max_steps: int
    """Where it ends, counted from the beginning of the run."""
    resume: Path | None = None
    """The checkpoint that it goes on from."""
    save: Path | None = None
    """Where the end is written."""
    save_at: tuple[int, ...] = ()
    """Also written after these steps, as ``<save>-<step>``."""
    algorithm: str = "sft"
    optimizer: str = "adam"
    family: str = "llama"
    dropout: float = 0.0
    seed: int = 0
    """Of the process's generators, as ``seed_everything`` would set it."""


def table(*, responses: bool) -> Samples:
    """Return ten rows, the same everywhere."""
    rows = list(runs.Batches(1, size=NUM_ROWS, responses=responses))
    return rows[0]


def make_optimizer(name: str) -> Any:
    """Return a constructor; Adam's epsilon keeps rounding errors of tiny gradients from becoming whole steps."""
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    if name == "momentum":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def make_module(part: Part) -> Any:
    """Return the algorithm of a part."""
    rates = {"attention_dropout": part.dropout} if part.family == "llama" else {"resid_pdrop": part.dropout}
    actor = tiny_model(part.family, **(rates if part.dropout else {}))
    settings: dict[str, Any] = {"actor": actor, "optimizer": make_optimizer(part.optimizer)}
    settings["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return runs.grpo(**settings) if part.algorithm == "grpo" else runs.sft(**settings)


@dataclass
class SaveAt(Callback):
    """Writes checkpoints in the middle of epochs, while the trainer trains."""

    part: Part
    written: list[int] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Write where the part asks for it."""
        if trainer.global_step in self.part.save_at:
            assert self.part.save is not None
            trainer.save_checkpoint(f"{self.part.save}-{trainer.global_step}")
            self.written.append(trainer.global_step)


def run_parts(parts: Sequence[Part], world_size: int) -> list[list[dict[str, float]]]:
    """Run the parts one after another and return what each logged, step by step."""
    logged = []
    for part in parts:
        L.seed_everything(part.seed, verbose=False)
        record = runs.Record()
        fitted = runs.trainer(
            ReallocStrategy(part.plan), world_size, max_steps=part.max_steps, max_epochs=-1,
            callbacks=[record, SaveAt(part)],
        )  # fmt: skip
        loader = BatchLoader(table(responses=part.algorithm == "sft"), batch_size=BATCH_SIZE, seed=5)
        fitted.fit(make_module(part), loader, ckpt_path=part.resume)
        assert fitted.global_step == part.max_steps
        if part.save is not None:
            fitted.save_checkpoint(part.save)
        logged.append(record.logged)
    return logged


def contents(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, whole."""
    return read_whole(folder, stored_tensors(folder))


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return tensor name -> largest difference, for those that are not the same bit for bit."""
    assert ours.keys() == theirs.keys(), f"only in one: {sorted(ours.keys() ^ theirs.keys())}"
    return {
        name: float((ours[name] - theirs[name]).abs().max())
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    }


def fit_with_model_checkpoint(folder: Path, world_size: int, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Fit two epochs of two batches, and return the best path and what lies in the folder."""
    checkpoint = ModelCheckpoint(dirpath=folder, **options)
    fitted = runs.trainer(
        ReallocStrategy("static"), world_size, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]
    )
    fitted.fit(runs.sft(), runs.Batches(2, responses=True), runs.Batches(1, responses=True, seed=7))
    return checkpoint.best_model_path, sorted(path.name for path in folder.iterdir())
