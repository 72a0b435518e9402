"""Fits leave no models, no optimizers and no growing number of threads in a process."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.generation import Speculation
from lightning_realloc.runtime.model.structure import combined_class
from lightning_realloc.runtime.parallel.tensor_parallel import _VocabularyEmbedding
from lightning_realloc.strategies import ReallocStrategy
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool


def of_a_local_class() -> GRPO:
    """Return a module whose class refers to a model through a method's closure."""
    held = tiny_model("llama", seed=2)

    class Local(GRPO):
        def on_train_start(self) -> None:
            super().on_train_start()
            assert held.training is not None

    return Local(
        tiny_model("llama"), runs.low_tokens, reference=tiny_model("llama", seed=1), tokenizer=byte_tokenizer(),
        sampling=runs.SAMPLING, kl_coef=0.04,
    )  # fmt: skip


def with_a_draft_model() -> GRPO:
    """Return a module with a draft model that is given as a module."""
    drafts = Speculation(drafter="model", draft_model=tiny_model("llama", seed=3), max_draft_tokens=2)
    return runs.grpo(speculation=drafts)


def that_fails() -> GRPO:
    """Return a module whose first iteration raises on every rank."""

    def refuse(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        raise ArithmeticError("no rewards")

    return runs.grpo(reward=refuse)


KINDS: dict[str, Callable[[], GRPO]] = {
    "plain": runs.grpo,
    "local class": of_a_local_class,
    "draft model": with_a_draft_model,
    "failure": that_fails,
}


def fit(kind: str, plan: Any, world_size: int) -> list[weakref.ref[Any]]:
    """Fit a module of this kind, and return weak references to objects that must not outlive the caller's variables."""
    module, strategy = KINDS[kind](), ReallocStrategy(plan)
    trainer = runs.trainer(strategy, world_size)
    try:
        trainer.fit(module, Batches(1))
    except Exception as error:
        assert "no rewards" in str(error)
    return [weakref.ref(kept) for kept in (trainer, strategy, *module.modules(), *strategy.optimizers)]


def alive(references: Sequence[weakref.ref[Any]]) -> list[str]:
    """Return the kinds of objects that are alive after a garbage collection."""
    gc.collect()
    return sorted({type(kept()).__name__ for kept in references if kept() is not None})


def num_modules() -> int:
    """Return the number of live modules, including those given to a fit or to a class."""
    gc.collect()
    return sum(issubclass(type(found), nn.Module) for found in gc.get_objects())


def fit_all(plan: Any) -> tuple[list[list[str]], list[int], list[int]]:
    """Fit modules of all kinds; return the objects left of each, modules before and after each, threads after each."""
    environment, world_size = dict(os.environ), runs.world_size()
    for make in KINDS.values():
        make()  # `tiny_model` keeps the models that it has built
    left, modules, threads = [], [num_modules()], []
    for kind in KINDS:
        os.environ.update(environment)  # Lightning clears the environment
        left.append(alive(fit(kind, plan, world_size)))
        modules.append(num_modules())
        threads.append(len(os.listdir("/proc/self/task")))
    return left, modules, threads


@CPU_ALONE
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("world_size", matrix([1, 2], 2))
def test_fits_leave_no_models_and_no_threads(workers: WorkerPool, world_size: int) -> None:
    layout = runs.calls(actor_generate="dp2", reference_infer="dp2", actor_train="fsdp2")
    plan = layout if world_size > 1 else "heuristic"
    for left, modules, threads in workers.run(fit_all, plan, world_size=world_size, init_process_group=False):
        assert left == [[]] * len(KINDS)
        assert len(set(modules)) == 1
        # A gloo group has three threads. A failure leads to new groups; blocked threads of the old ones remain.
        assert max(threads[:3]) - threads[0] < 3


def take_turns() -> list[int]:
    """Fit with two trainers, then continue with the first one; return the global step after each fit."""
    environment, world_size = dict(os.environ), runs.world_size()
    first, second = (runs.trainer("realloc", world_size, max_epochs=1) for _ in range(2))
    module, steps = runs.grpo(), []
    for trainer, fitted in ((first, module), (second, runs.grpo()), (first, module)):
        os.environ.update(environment)
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(fitted, Batches(2))
        steps.append(trainer.global_step)
    os.environ.update(environment)
    first.validate(module, Batches(1), verbose=False)
    return steps


def test_a_trainer_continues_after_another_trainers_fit(workers: WorkerPool) -> None:
    assert workers.run(take_turns, world_size=2, init_process_group=False) == [[2, 2, 4]] * 2


class LiveBytes(Callback):
    """Records the bytes of tensors before each fit's models are built."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Record the bytes."""
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        self.noted.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable automatic garbage collection, which rarely runs between large fits."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fit_four_times(same_trainer: bool) -> list[int]:
    """Return the bytes of tensors at the beginning of each fit."""
    environment, meter = dict(os.environ), LiveBytes()
    trainer = runs.trainer("realloc", 1, callbacks=[meter])
    with no_collector():
        for _ in range(4):
            os.environ.update(environment)
            trainer = trainer if same_trainer else runs.trainer("realloc", 1, callbacks=[meter])
            trainer.fit(runs.grpo(), Batches(1))
    return meter.noted


@pytest.mark.parametrize("same_trainer", matrix([False, True], True))
def test_models_of_earlier_fits_are_gone_before_new_ones_are_built(workers: WorkerPool, same_trainer: bool) -> None:
    (noted,) = workers.run(fit_four_times, same_trainer, world_size=1, init_process_group=False)
    model_bytes = sum(parameter.nbytes for parameter in tiny_model("llama").parameters())
    # The second fit finds the first one's last metrics, a few numbers.
    assert max(noted) - noted[0] < model_bytes / 100


def test_a_class_made_for_tensor_parallelism_is_freed_with_its_modules() -> None:
    class Scaled(nn.Embedding):
        """A user's class."""

    combined = combined_class(_VocabularyEmbedding, Scaled)
    assert combined_class(_VocabularyEmbedding, Scaled) is combined
    references = [weakref.ref(combined), weakref.ref(Scaled)]
    del combined, Scaled
    assert alive(references) == []
