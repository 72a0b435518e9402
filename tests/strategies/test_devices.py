"""GRPO computes the same on a CPU, on a GPU, and on several ranks that share one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn
from torch.optim import SGD

from lightning_realloc import GenerationOptions
from lightning_realloc.generation.forward import cuda_graphs
from lightning_realloc.generation.forward.cuda_graphs import Graph, StepGraphs, StepShape
from lightning_realloc.generation.forward.fused_layers import joined_linears
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.calls.train_call import TrainCalls
from tests.devices import DEVICES, accelerator_of_nccl, accelerator_on
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool

DESCENT = partial(SGD, lr=1.0)
TOLERANCE = 1e-5
PLANS = {
    "one rank": runs.calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1"),
    "layouts change": runs.calls(actor_generate="tp2", reference_infer="dp2", actor_train="fsdp2"),
    "rows are exchanged": runs.calls(actor_generate="dp2", reference_infer="dp2", actor_train="dp2"),
}


def learn(device: str, plan: str, micro_batch_tokens: int) -> Outcome:
    """Train for three iterations on ranks that share a device."""
    options = runs.options(micro_batch_tokens=micro_batch_tokens)
    module = runs.grpo(optimizer=DESCENT, train_options=options)
    strategy = ReallocStrategy(PLANS[plan], process_group_backend="gloo")
    return runs.train(module, strategy, runs.world_size(), Batches(3), accelerator=accelerator_on(device))


def first_rank(workers: WorkerPool, device: str, plan: str, *, micro_batch_tokens: int) -> Outcome:
    """Return the outcome of the first rank."""
    world_size = 1 if plan == "one rank" else 2
    answers = workers.run(learn, device, plan, micro_batch_tokens, world_size=world_size, init_process_group=False)
    outcome: Outcome = answers[0]
    return outcome


@pytest.fixture(scope="module")
def expected(workers: WorkerPool) -> Outcome:
    """The outcome of one rank on the CPU."""
    return first_rank(workers, "cpu", "one rank", micro_batch_tokens=4096)


@pytest.mark.parametrize("plan", matrix(PLANS, "layouts change"))
@pytest.mark.parametrize("device", matrix(DEVICES, DEVICES[1]))  # layouts on CPUs: test_realloc.py, test_set_plan.py
def test_grpo_has_the_losses_of_one_cpu_rank(workers: WorkerPool, expected: Outcome, device: str, plan: str) -> None:
    actual = first_rank(workers, device, plan, micro_batch_tokens=32)
    assert actual.tokens == expected.tokens
    assert len(actual.logged) == 3
    for ours, theirs in zip(actual.logged, expected.logged, strict=True):
        for name in ("actor/loss", "actor/kl", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=TOLERANCE), name
    assert runs.largest_difference(actual.weights, expected.weights) < TOLERANCE


def shapes_of_graphs(plan: str, accelerator: CUDAAccelerator | str) -> tuple[list[StepShape], set[int], Outcome]:
    """Train for three iterations whose generation reads a copy of the weights.

    Returns:
        The captured steps, the numbers of groups of joined layers in them, and the outcome.
    """
    shapes: list[StepShape] = []
    groups: set[int] = set()
    capture = StepGraphs._capture_step

    def noting(self: StepGraphs, shape: StepShape) -> Graph[StepShape] | None:
        graph = capture(self, shape)
        shapes.extend([] if graph is None else [shape])
        return graph

    @contextmanager
    def joining(model: nn.Module) -> Iterator[None]:
        with joined_linears(model) as num_groups:
            groups.add(num_groups)
            yield

    options = runs.options(micro_batch_tokens=32)
    module = runs.grpo(optimizer=DESCENT, train_options=options, generation=GenerationOptions(cuda_graphs="collective"))
    strategy = ReallocStrategy(runs.calls(actor_generate=plan, reference_infer=plan, actor_train="dp1@0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_capture_step", noting)
        patch.setattr(cuda_graphs, "joined_linears", joining)
        trained_on = {"accelerator": accelerator, "precision": "bf16-mixed"}
        return shapes, groups, runs.train(module, strategy, runs.world_size(), Batches(3), **trained_on)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["dp1", "tp2"])
def test_generation_in_a_fit_replays_cuda_graphs(workers: WorkerPool, plan: str) -> None:
    world_size = int(plan[-1])
    accelerator = accelerator_of_nccl(world_size)
    made = workers.run(shapes_of_graphs, plan, accelerator, world_size=world_size, init_process_group=False)
    shapes, groups, outcome = made[0]
    assert shapes
    assert all(others == shapes for others, *_ in made)
    assert groups == {2 * tiny_model("llama").config.num_hidden_layers}
    assert len(outcome.logged) == 3


def validated(accelerator: str) -> dict[str, float]:
    """Return the metrics of held-out prompts; on CUDA, NCCL averages them over the ranks."""
    trainer = runs.trainer(ReallocStrategy(PLANS["one rank"]), 1, accelerator=accelerator)
    (metrics,) = trainer.validate(runs.grpo(), Batches(2), verbose=False)
    found: dict[str, float] = metrics
    return found


@pytest.mark.gpu
def test_held_out_metrics_are_those_of_the_cpu(workers: WorkerPool) -> None:
    actual, expected = (
        workers.run(validated, accelerator, world_size=1, init_process_group=False)[0]
        for accelerator in ("cuda", "cpu")
    )
    assert actual == pytest.approx(expected, rel=1e-5)
    assert "val/reward" in actual


def waits_in_training(micro_batch_tokens: int) -> tuple[int, int]:
    """Return the micro-batches of an iteration's training, and how often the host waits for the device in it."""
    module = runs.grpo(optimizer=DESCENT, train_options=runs.options(micro_batch_tokens=micro_batch_tokens))
    losses, waits = [0], [0]
    train, loss = TrainCalls.run, TrainCalls._loss

    def noting(self: TrainCalls, *args: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            losses[0] = 0
            train(self, *args)
            torch.cuda.set_sync_debug_mode("default")
        waits[0] = sum("synchronizing" in str(warning.message) for warning in caught)

    def counting(self: TrainCalls, *args: Any) -> Any:
        losses[0] += 1
        return loss(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainCalls, "run", noting)
        patch.setattr(TrainCalls, "_loss", counting)
        strategy = ReallocStrategy(PLANS["one rank"])
        runs.train(module, strategy, 1, Batches(3), accelerator="cuda", precision="bf16-mixed")
    return losses[0], waits[0]


@pytest.mark.gpu
def test_training_waits_for_the_device_after_its_last_micro_batch_alone(workers: WorkerPool) -> None:
    few, many = (
        workers.run(waits_in_training, tokens, world_size=1, init_process_group=False)[0] for tokens in (4096, 32)
    )
    assert many[0] >= 3 * few[0]
    assert many[1] == few[1]
