"""NaN and infinity, wherever they arise: weights stay finite, skips are counted, the latest checkpoint stays good."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.errors import DataError, ReallocError
from lightning_realloc.runtime.parallel.shards import local_tensor
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

NORM, HEAD, EMBEDDING = "model.norm.weight", "score.weight", "model.embed_tokens.weight"
PLANS = {
    "sft": runs.calls(actor_train="fsdp2"),
    "grpo": runs.calls(actor_generate="fsdp2", reference_infer="fsdp2", actor_train="fsdp2"),
    "ppo": runs.calls(
        actor_generate="fsdp2", reference_infer="fsdp2", critic_infer="fsdp2", actor_train="fsdp2", critic_train="fsdp2"
    ),
}


class At(Callback):
    """Runs a function in a hook of one iteration, and undoes it after the iteration if it returns how."""

    def __init__(self, iteration: int, hook: str, action: Callable[[Any], Callable[[], None] | None]) -> None:
        self.undo: Callable[[], None] | None = None

        def run(trainer: Any, *_: Any) -> None:
            if trainer.global_step == iteration:
                self.undo = action(trainer) or self.undo

        setattr(self, hook, run)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Undo it."""
        if self.undo is not None:
            self.undo()
            self.undo = None


def weight(trainer: Any, role: str, name: str) -> Tensor:
    """Return this rank's part of a weight of a role."""
    return local_tensor(trainer.strategy.pool.home(role).model.get_parameter(name).detach())


def spoil_weight(role: str, name: str, *, for_good: bool) -> Callable[[Any], Any]:
    """Return an action that puts NaN into a weight on rank 1; a head has one row, which rank 0 holds."""

    def spoil(trainer: Any) -> Callable[[], None] | None:
        part = weight(trainer, role, name)
        if trainer.global_rank != (1 if name != HEAD else 0):
            return None
        whole = part.clone()
        part.view(-1)[0] = math.nan

        def restore() -> None:
            part.copy_(whole)

        return None if for_good else restore

    return spoil


def spoil_gradient(trainer: Any, rank: int | None = None) -> None:
    """Put NaN into a gradient of the actor on one rank, or on all."""
    if rank in (None, trainer.global_rank):
        local_tensor(trainer.strategy.pool.home("actor").model.get_parameter(NORM).grad)[0] = math.nan


def spoil_optimizer_state(trainer: Any) -> None:
    """Put NaN into the actor's first moments on rank 1."""
    if trainer.global_rank == 1:
        for state in trainer.strategy.optimizer_of("actor").state.values():
            local_tensor(state["exp_avg"]).view(-1)[0] = math.nan


def scale_loss(role: str, iteration: int, factor: float) -> Callable[[Any], None]:
    """Return a function that makes a module multiply the loss of a role in one iteration."""

    def change(module: Any) -> None:
        name = f"{role}_loss"
        loss_of = getattr(module, name)

        def loss(model: Any, batch: Any, totals: Any) -> Any:
            found = loss_of(model, batch, totals)
            is_bad = module.trainer.global_step == iteration
            return replace(found, value=found.value * (factor if is_bad else 1.0))

        setattr(module, name, loss)

    return change


def infinite_reward(completion_ids: Any, **_: Any) -> list[float]:
    """Give one sample an infinite reward."""
    return [math.inf] + [0.0] * (len(completion_ids) - 1)


class Finite(Callback):
    """Records after every iteration whether all trained weights are finite."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self.roles = roles
        self.found: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Read this rank's parts."""
        homes = [trainer.strategy.pool.home(role).model for role in self.roles]
        self.found.append(
            all(bool(local_tensor(p.detach()).isfinite().all()) for home in homes for p in home.parameters())
        )


@dataclass(frozen=True)
class Part:
    """One fit of a run, the numbers that are not finite in it, and what must follow."""

    last_step: int
    faults: Callable[[], list[Callback]] = list
    change: Callable[[Any], None] | None = None
    """Changes the module."""
    settings: Callable[[], dict[str, Any]] = dict
    skipped: tuple[float, ...] = ()
    """Steps that are skipped in the first iterations, after which weights are finite."""
    error: str = ""
    """Part of the error that ends the fit."""


@dataclass(frozen=True)
class Run:
    """Fits, each of which continues from the latest checkpoint of the one before; the last one is without a fault."""

    algorithm: str
    parts: tuple[Part, ...]
    precision: str = "32-true"
    skipped: str = "actor"
    """Role whose steps are skipped."""


RUNS: dict[str, Run] = {
    "sft": Run("sft", (
        # A loss that is infinite, a gradient of one rank, a weight.
        Part(
            6, lambda: [
                At(3, "on_after_backward", lambda trainer: spoil_gradient(trainer, 1)),
                At(5, "on_train_batch_start", spoil_weight("actor", EMBEDDING, for_good=True)),
            ],
            scale_loss("actor", 1, math.inf), skipped=(0.0, 1.0, 0.0, 1.0, 0.0),
            error="the weights of actor are not finite",
        ),
        # A gradient after resuming, the state of an optimizer.
        Part(
            10, lambda: [
                At(6, "on_after_backward", spoil_gradient), At(8, "on_train_batch_start", spoil_optimizer_state),
            ],
            skipped=(0.0, 1.0, 0.0), error="not finite",
        ),
        Part(9),
    )),
    "bf16": Run("sft", (Part(3, change=scale_loss("actor", 1, 1e38), skipped=(0.0, 1.0, 0.0)), Part(4)), "bf16-true"),
    "grpo": Run("grpo", (
        Part(2, lambda: [At(1, "on_train_batch_start", spoil_weight("reference", NORM, for_good=False))],
             error="ref_logprobs of reference are not finite for sample ids ["),
        Part(2, settings=lambda: {"reward": infinite_reward}, error="reward"),
        Part(2),
    )),
    "ppo": Run("ppo", (
        Part(4, lambda: [At(3, "on_train_batch_start", spoil_weight("critic", HEAD, for_good=True))],
             scale_loss("critic", 1, math.nan), skipped=(0.0, 1.0, 0.0),
             error=f"the weights of critic are not finite in iteration 3, the first in {HEAD}"),
        Part(4),
    ), skipped="critic"),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """What a rank saw of a part."""

    error: str
    skipped: list[float]
    are_finite: list[bool]
    """Whether all trained weights were finite after each iteration."""
    norms: list[float]
    """Norms of the actor's gradients."""


def run(name: str, folder: str) -> list[Ended]:
    """Fit part by part; every part leaves an intact checkpoint."""
    whole, last, world_size, ended = RUNS[name], Path(folder, "last.ckpt"), runs.world_size(), list[Ended]()
    for part in whole.parts:
        module = getattr(runs, whole.algorithm)(**part.settings())
        if part.change is not None:
            part.change(module)
        record, finite = runs.Record(), Finite(("actor", "critic") if whole.algorithm == "ppo" else ("actor",))
        saved, told = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True), ""
        callbacks = [record, finite, *part.faults(), saved]
        trainer = runs.trainer(
            ReallocStrategy(PLANS[whole.algorithm]), world_size, callbacks=callbacks,
            max_steps=part.last_step, max_epochs=-1, enable_checkpointing=True, precision=whole.precision,
        )  # fmt: skip
        try:
            trainer.fit(module, Batches(3, responses=whole.algorithm == "sft"), ckpt_path=str(last) if ended else None)
        except ReallocError as error:
            told = str(error)
        verify_checkpoint(last)
        skipped = [metrics[f"{whole.skipped}/skipped_steps"] for metrics in record.logged]
        ended.append(Ended(told, skipped, finite.found, [metrics["actor/grad_norm"] for metrics in record.logged]))
    return ended


@pytest.mark.exhaustive  # steps: test_skipped_steps.py; files: test_checkpoint_files.py
@pytest.mark.parametrize("name", RUNS)
def test_a_number_that_is_not_finite_does_no_lasting_harm(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    parts = RUNS[name].parts
    for rank in workers.run(run, name, str(tmp_path), world_size=2, init_process_group=False):
        for part, ended in zip(parts, rank, strict=True):
            num_iterations = len(part.skipped)
            assert ended.skipped[:num_iterations] == list(part.skipped)
            assert len(ended.are_finite) >= num_iterations and all(ended.are_finite[:num_iterations])
            assert part.error in ended.error if part.error else ended.error == ""
        assert rank[-1].norms and all(map(math.isfinite, rank[-1].norms))


def test_a_nan_in_the_data_is_refused_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin} for margin in (1.0, math.nan)]
    with pytest.raises(DataError, match="'margin' must be a finite number"):
        PreferenceDataModule(rows, batch_size=2, tokenizer=byte_tokenizer()).setup("fit")
