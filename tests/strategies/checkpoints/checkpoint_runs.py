"""Run an algorithm in parts for the tests of checkpoints; each part has its layout and may resume from another."""

from __future__ import annotations

import json
import os
import resource
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_realloc import GAE, KL
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.sharded_tensors import read_whole
from lightning_realloc.strategies.checkpoints.stored_metadata import stored_tensors
from tests.models import tiny_model
from tests.strategies import runs

NUM_ROWS = 10
BATCH_SIZE = 4
"""Three batches per epoch; the last one has two rows."""


@dataclass(frozen=True)
class Part:
    """A part of a run."""

    plan: Any
    """The strategy's plan."""
    max_steps: int
    """Step at which the part ends, counted from the beginning of the run."""
    resume: Path | str | None = None
    """Checkpoint to resume from, as path or address; None starts anew."""
    save: Path | str | None = None
    """Path of the checkpoint at the end."""
    save_at: tuple[int, ...] = ()
    """Steps after which a checkpoint ``<save>-<step>`` is written as well."""
    algorithm: str = "sft"
    optimizer: str = "adam"
    family: str = "llama"
    dropout: float = 0.0
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model's config."""
    seed: int = 0
    """Seed of the processes' generators, whose states differ between ranks."""
    in_background: bool = False
    """Whether checkpoints are written while training goes on."""


def table(*, responses: bool) -> Samples:
    """Return ten rows, the same on every rank."""
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
    actor = tiny_model(part.family, **part.sizes, **({"resid_pdrop": part.dropout} if part.dropout else {}))
    # A fixed seed: the parts of a run seed their processes differently, but must draw like one run.
    settings: dict[str, Any] = {"actor": actor, "optimizer": make_optimizer(part.optimizer), "seed": 0}
    settings["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if part.algorithm == "ppo":
        # At the checkpoint the actor has not stepped yet, but the KL coefficient and the moments have.
        return runs.ppo(**settings, critic_warmup=3, kl=KL(target=1.0), advantages=GAE(normalize_values=True))
    return runs.grpo(**settings) if part.algorithm == "grpo" else runs.sft(**settings)


@dataclass
class SaveAt(Callback):
    """Writes checkpoints in the middle of epochs, while the trainer trains."""

    part: Part

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write before any optimizer has stepped."""
        self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Write a checkpoint after the part's steps."""
        if trainer.global_step in self.part.save_at:
            assert self.part.save is not None
            trainer.save_checkpoint(f"{self.part.save}-{trainer.global_step}")


def run_parts(parts: Sequence[Part], world_size: int) -> list[list[dict[str, float]]]:
    """Run the parts one after another and return what each logged, step by step."""
    logged = []
    for part in parts:
        L.seed_everything(part.seed + int(os.environ["RANK"]), verbose=False)
        record = runs.Record()
        fitted = runs.trainer(
            ReallocStrategy(part.plan, async_checkpoints=part.in_background), world_size, max_steps=part.max_steps,
            max_epochs=-1, callbacks=[record, SaveAt(part)],
        )  # fmt: skip
        loader = BatchLoader(table(responses=part.algorithm == "sft"), batch_size=BATCH_SIZE, seed=5)
        fitted.fit(make_module(part), loader, ckpt_path=part.resume)
        assert fitted.global_step == part.max_steps
        if part.save is not None:
            fitted.save_checkpoint(part.save)
        logged.append(record.logged)
    return logged


def save_after(what: str, folder: Path, world_size: int, *, ckpt_path: Path | None = None) -> str:
    """Train for two iterations, evaluate, and save; return the warning about state that the checkpoint lacks."""
    L.seed_everything(0, verbose=False)
    part = Part(runs.calls(actor_train="fsdp2"), 2)
    fitted = runs.trainer(ReallocStrategy(part.plan), world_size, max_steps=part.max_steps, max_epochs=-1)
    loader, module = BatchLoader(table(responses=True), batch_size=BATCH_SIZE, seed=5), make_module(part)
    fitted.fit(module, loader)
    fitted.save_checkpoint(folder / "fitted")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(fitted, what)(module, loader, ckpt_path=ckpt_path)
        fitted.save_checkpoint(folder / "evaluated")
    return " ".join(str(warning.message) for warning in caught if "no run can be resumed" in str(warning.message))


def replicated_weights(part: Part, world_size: int) -> dict[str, Tensor]:
    """Run a part and return, on every rank, the weights that tensor parallelism does not shard."""
    L.seed_everything(part.seed + int(os.environ["RANK"]), verbose=False)
    strategy = ReallocStrategy(part.plan)
    fitted = runs.trainer(strategy, world_size, max_steps=part.max_steps)
    fitted.fit(make_module(part), runs.Batches(part.max_steps, responses=True))
    held = local_tensors(strategy.pool.home("actor").model)
    return {name: tensor for name, tensor in held.items() if tensor.dim() == 1}


def contents(folder: Path) -> dict[str, Tensor]:
    """Return all full tensors of a checkpoint."""
    return read_whole(folder, stored_tensors(folder))


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return tensor name -> largest difference, for tensors that are not bitwise equal."""
    assert ours.keys() == theirs.keys(), f"only in one: {sorted(ours.keys() ^ theirs.keys())}"
    return {
        name: float((ours[name] - theirs[name]).abs().max())
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    }


def fit_with_model_checkpoint(folder: Path, world_size: int, save_last: Any) -> tuple[list[str], list[str], list[int]]:
    """Fit, resume from "last", test from "best"; return the folder's files after each fit, links with @, and steps."""
    names, steps = [], []
    for max_epochs in (3, 4):
        checkpoint = ModelCheckpoint(
            dirpath=folder, filename="{step}", monitor="val/loss", save_top_k=2, save_last=save_last
        )
        fitted = runs.trainer(
            ReallocStrategy("static"), world_size, max_epochs=max_epochs, enable_checkpointing=True,
            callbacks=[checkpoint],
        )  # fmt: skip
        held_out = runs.Batches(1, responses=True, seed=7)
        fitted.fit(runs.sft(), runs.Batches(1, responses=True), held_out, ckpt_path="last" if steps else None)
        names.append(sorted(path.name + "@" * path.is_symlink() for path in folder.iterdir()))
        steps.append(fitted.global_step)
        fitted.test(dataloaders=held_out, ckpt_path="best", verbose=False)
    return names[0], names[1], steps


def refusals(parts: Sequence[Part], world_size: int) -> list[str | None]:
    """Run the parts and return, on every rank, the error of each; None for one that runs."""
    answers: list[str | None] = []
    for part in parts:
        try:
            run_parts([part], world_size)
            answers.append(None)
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def save_weights_only(folder: Path, world_size: int) -> str:
    """Write a checkpoint without optimizers, validate from it, and return the error of resuming from it."""
    fitted = runs.trainer(ReallocStrategy("static"), world_size, max_steps=2)
    fitted.fit(runs.sft(), runs.Batches(2, responses=True))
    fitted.save_checkpoint(folder, weights_only=True)
    fitted.validate(runs.sft(), runs.Batches(1, responses=True), ckpt_path=folder, verbose=False)
    return str(refusals([Part("static", 3, resume=folder)], world_size)[0])


def resume_with_hyperparameters(folder: Path, world_size: int) -> tuple[int, str]:
    """Write a checkpoint whose metadata holds a dataclass, and resume it with each ``load_weights_only``."""
    answers: list[Any] = []
    trusting: Any
    for resume, trusting in ((None, {}), (folder, {"load_weights_only": False}), (folder, {})):
        module = runs.sft()
        module.save_hyperparameters({"options": TrainOptions(num_epochs=1)})
        strategy = ReallocStrategy("static", **trusting)
        fitted = runs.trainer(strategy, world_size, max_steps=2 if resume else 1, max_epochs=-1)
        try:
            fitted.fit(module, runs.Batches(2, responses=True), ckpt_path=resume)
            answers.append(fitted.global_step)
        except CheckpointError as error:
            answers.append(str(error))
        if resume is None:
            fitted.save_checkpoint(folder)
    return answers[1], answers[2]


class Linear(L.LightningModule):
    """An ordinary LightningModule: automatic optimization, a batch norm, momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a mean square."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run_plain_module(folder: Path, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train a plain module for four steps at once, and for two and two; return both results."""
    loader = torch.utils.data.DataLoader(torch.randn(32, 3, generator=torch.Generator().manual_seed(1)), batch_size=4)
    ends = []
    for name, max_steps, resume in (("straight", 4, None), ("half", 2, None), ("resumed", 4, folder / "half.ckpt")):
        L.seed_everything(0, verbose=False)
        module = Linear()
        fitted = runs.trainer(
            ReallocStrategy(), world_size, max_steps=max_steps, max_epochs=-1, use_distributed_sampler=False
        )
        # Both halves get the batches of the whole run, since a plain DataLoader does not store its position.
        fitted.fit(module, _Cycle(loader, start=2 if resume else 0), ckpt_path=resume)
        fitted.save_checkpoint(folder / f"{name}.ckpt")
        ends.append({key: value.clone() for key, value in module.state_dict().items()})
    return ends[0], ends[2]


class _Cycle:
    """A loader's batches from a given index onwards."""

    def __init__(self, loader: Any, *, start: int) -> None:
        self.batches = list(loader)[start:]

    def __iter__(self) -> Any:
        return iter(self.batches)


def fit_in_forked_processes(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Fit on two ranks that the launcher forks, and return the results in the process that called fit."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT"):
        os.environ.pop(name, None)
    part = Part(runs.calls(actor_train="fsdp2"), 2, save=folder / "saved", save_at=(2,))
    strategy = ReallocStrategy(part.plan, launcher="fork")
    fitted = runs.trainer(strategy, 2, max_steps=2, callbacks=[SaveAt(part)])
    module = make_module(part)
    fitted.fit(module, runs.Batches(2, responses=True))
    weights = {name: parameter.detach() for name, parameter in module.actor.named_parameters()}
    return weights, float(fitted.callback_metrics["actor/loss"])


def save_not_finite(folder: Path, world_size: int) -> list[str]:
    """Save a checkpoint, put NaN into two weights on the last rank only, and return the errors of saving."""
    strategy = ReallocStrategy(runs.calls(actor_train=f"fsdp{world_size}"))
    fitted = runs.trainer(strategy, world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    fitted.save_checkpoint(folder)
    held = local_tensors(strategy.pool.home("actor").model)
    if fitted.global_rank == world_size - 1:
        held["model.layers.0.mlp.up_proj.weight"].view(-1)[-1] = float("nan")
        held["model.norm.weight"][-1] = float("-inf")
    answers = []
    saves = (
        lambda: fitted.save_checkpoint(folder),
        lambda: strategy.save_huggingface("actor", folder.with_name("model")),
    )
    for save in saves:
        try:
            save()
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def save_without_room(folder: Path, world_size: int, limits: Mapping[int, int]) -> list[str]:
    """Save a checkpoint, then again while some ranks may write files of a limited size; return the errors.

    Args:
        folder: Path of the checkpoint.
        world_size: Number of ranks.
        limits: Rank -> bytes of the largest file that it may write.
    """
    fitted = runs.trainer(ReallocStrategy(runs.calls(actor_train=f"fsdp{world_size}")), world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    fitted.save_checkpoint(folder)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    answers = []
    for path in (folder, folder.with_name("new.ckpt")):
        if fitted.global_rank in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[fitted.global_rank], room[1]))
        try:
            fitted.save_checkpoint(path)
        except CheckpointError as error:
            answers.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, room)
    fitted.save_checkpoint(folder)
    return answers


def save_onto(paths: Sequence[Path], world_size: int) -> list[str | None]:
    """Save a checkpoint to each path, and return the errors."""
    fitted = runs.trainer(ReallocStrategy("static"), world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    answers: list[str | None] = []
    for path in paths:
        try:
            fitted.save_checkpoint(path)
            answers.append(None)
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def forget_checksums(folder: Path) -> None:
    """Write ``realloc.json`` as earlier versions did."""
    description = json.loads((folder / "realloc.json").read_text())
    del description["files"], description["checksum"]
    (folder / "realloc.json").write_text(json.dumps(description, indent=1))
