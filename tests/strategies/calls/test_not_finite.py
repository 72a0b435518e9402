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
from lightning_realloc.strategies.checkpoints.verification import verify_checkpoint
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

BAD = 1
"""Iteration in which the number arises, of three."""
NORM, HEAD, EMBEDDING = "model.norm.weight", "score.weight", "model.embed_tokens.weight"
PLANS = {
    "sft": runs.calls(actor_train="fsdp2"),
    "grpo": runs.calls(actor_generate="fsdp2", reference_infer="fsdp2", actor_train="fsdp2"),
    "ppo": runs.calls(
        actor_generate="fsdp2", reference_infer="fsdp2", critic_infer="fsdp2", actor_train="fsdp2", critic_train="fsdp2"
    ),
}


class At(Callback):
    """Runs a function in a hook of the bad iteration, and undoes it after the iteration if it returns how."""

    def __init__(self, hook: str, action: Callable[[Any], Callable[[], None] | None]) -> None:
        self.undo: Callable[[], None] | None = None

        def run(trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_idx == BAD:
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


def scale_loss(module: Any, role: str, factor: float) -> None:
    """Multiply the loss of a role in the bad iteration."""
    name = f"{role}_loss"
    loss_of = getattr(module, name)

    def loss(model: Any, batch: Any, totals: Any) -> Any:
        found = loss_of(model, batch, totals)
        is_bad = module.trainer.fit_loop.epoch_loop.batch_idx == BAD
        return replace(found, value=found.value * (factor if is_bad else 1.0))

    setattr(module, name, loss)


def infinite_reward(completion_ids: Any, **_: Any) -> list[float]:
    """Give one sample an infinite reward."""
    return [math.inf] + [0.0] * (len(completion_ids) - 1)


@dataclass(frozen=True)
class Place:
    """Where a number that is not finite arises, and what must follow."""

    algorithm: str
    spoil: Callable[[], Callback] | tuple[str, float] | None = None
    """Callback, or role and factor of its loss."""
    settings: Callable[[], dict[str, Any]] = dict
    precision: str = "32-true"
    skipped: str = "actor"
    """Role whose step is skipped."""
    error: str | None = None
    """Part of the error that ends the run; None: the run goes on."""
    resumes: bool = False
    """Whether the run is resumed first."""


PLACES: dict[str, Place] = {
    "reward": Place("grpo", settings=lambda: {"reward": infinite_reward}, error="reward"),
    "loss": Place("sft", ("actor", math.inf)),
    "one rank": Place("sft", lambda: At("on_after_backward", lambda trainer: spoil_gradient(trainer, 1))),
    "critic": Place("ppo", ("critic", math.nan), skipped="critic"),
    "reference": Place(
        "grpo", lambda: At("on_train_batch_start", spoil_weight("reference", NORM, for_good=False)),
        error="ref_logprobs of reference are not finite for sample ids [",
    ),
    "head": Place(
        "ppo", lambda: At("on_train_batch_start", spoil_weight("critic", HEAD, for_good=True)),
        error=f"the weights of critic are not finite in iteration {BAD}, the first in {HEAD}",
    ),
    "bf16 overflow": Place("sft", ("actor", 1e38), precision="bf16-true"),
    "embedding": Place(
        "sft", lambda: At("on_train_batch_start", spoil_weight("actor", EMBEDDING, for_good=True)),
        error="the weights of actor are not finite",
    ),
    "optimizer state": Place("sft", lambda: At("on_train_batch_start", spoil_optimizer_state), error="not finite"),
    "after resume": Place("sft", lambda: At("on_after_backward", spoil_gradient), resumes=True),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """What a rank saw."""

    error: str
    skipped: list[float]
    are_finite: bool
    """Whether all trained weights were finite at the end."""
    checkpoint: str
    """Summary of the latest checkpoint."""
    resumed: list[float]
    """Gradient norms of a run that continued from it."""


def run(name: str, folder: str) -> Ended:
    """Train three iterations, and continue from the latest checkpoint without the fault."""
    place, world_size = PLACES[name], runs.world_size()
    last = Path(folder, "last.ckpt")

    def fit(num_steps: int, *callbacks: Callback, is_spoilt: bool = True, resumes: bool = False) -> Any:
        settings = place.settings() if is_spoilt else {}
        module = getattr(runs, place.algorithm)(**settings)
        if is_spoilt and isinstance(place.spoil, tuple):
            scale_loss(module, *place.spoil)
        saved = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
        trainer = runs.trainer(
            ReallocStrategy(PLANS[place.algorithm]), world_size, callbacks=[*callbacks, saved],
            max_steps=num_steps, max_epochs=-1, enable_checkpointing=True, precision=place.precision,
        )  # fmt: skip
        data = Batches(3, responses=place.algorithm == "sft")
        trainer.fit(module, data, ckpt_path=str(last) if resumes else None)
        return trainer

    def finite(trainer: Any) -> bool:
        roles = ("actor", "critic") if place.algorithm == "ppo" else ("actor",)
        homes = [trainer.strategy.pool.home(role).model for role in roles]
        return all(bool(local_tensor(p.detach()).isfinite().all()) for home in homes for p in home.parameters())

    if place.resumes or (place.algorithm == "grpo" and place.error):
        fit(3, is_spoilt=False)  # a good checkpoint exists
    record, told, are_finite = runs.Record(), "", True
    faults = [place.spoil()] if callable(place.spoil) else []
    try:
        trainer = fit(6 if place.resumes else 3, record, *faults, resumes=place.resumes)
        are_finite = finite(trainer)
    except ReallocError as error:
        told = str(error)
    summary = verify_checkpoint(last)
    after = runs.Record()
    fit(7 if place.resumes else 4, after, is_spoilt=False, resumes=True)
    return Ended(
        told, [metrics[f"{place.skipped}/skipped_steps"] for metrics in record.logged], are_finite, summary,
        [metrics["actor/grad_norm"] for metrics in after.logged],
    )  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_number_that_is_not_finite_does_no_lasting_harm(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    place = PLACES[name]
    for ended in workers.run(run, name, str(tmp_path), world_size=2, init_process_group=False):
        if place.error is None:
            assert ended.error == "" and ended.are_finite
            assert ended.skipped == [0.0, 1.0, 0.0]
        else:
            assert place.error in ended.error
        assert ended.resumed and all(map(math.isfinite, ended.resumed))


def test_a_nan_in_the_data_is_refused_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin} for margin in (1.0, math.nan)]
    with pytest.raises(DataError, match="'margin' must be a finite number"):
        PreferenceDataModule(rows, batch_size=2, tokenizer=byte_tokenizer()).setup("fit")
