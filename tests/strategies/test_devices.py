"""GRPO computes the same on a CPU, on a GPU, and on several ranks that share one."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD

from lightning_realloc.generation.forward.cuda_graphs import Graph, StepGraphs, StepShape
from lightning_realloc.strategies import ReallocStrategy
from tests.devices import DEVICES, accelerator_on
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool

DESCENT = partial(SGD, lr=1.0)
TOLERANCE = 1e-5
LAYOUTS = {
    1: runs.calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1"),
    2: runs.calls(actor_generate="tp2", reference_infer="dp2", actor_train="fsdp2"),
}
"""Ranks -> the plan that they run."""


def learn(device: str, world_size: int, micro_batch_tokens: int, precision: str = "32-true") -> Outcome:
    """Train for three iterations on ranks that share a device."""
    options = runs.options(micro_batch_tokens=micro_batch_tokens)
    module = runs.grpo(optimizer=DESCENT, train_options=options)
    strategy = ReallocStrategy(LAYOUTS[world_size], process_group_backend="gloo")
    trained_on = {"accelerator": accelerator_on(device), "precision": precision}
    return runs.train(module, strategy, world_size, Batches(3), **trained_on)


def first_rank(workers: WorkerPool, device: str, world_size: int, *, micro_batch_tokens: int) -> Outcome:
    """Return the outcome of the first rank."""
    answers = workers.run(
        learn, device, world_size, micro_batch_tokens, world_size=world_size, init_process_group=False
    )
    outcome: Outcome = answers[0]
    return outcome


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_grpo_has_the_losses_of_one_cpu_rank(workers: WorkerPool, device: str, world_size: int) -> None:
    expected = first_rank(workers, "cpu", 1, micro_batch_tokens=4096)
    actual = first_rank(workers, device, world_size, micro_batch_tokens=32)
    assert actual.tokens == expected.tokens
    assert len(actual.logged) == 3
    for ours, theirs in zip(actual.logged, expected.logged, strict=True):
        for name in ("actor/loss", "actor/kl", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=TOLERANCE), name
    assert runs.largest_difference(actual.weights, expected.weights) < TOLERANCE


def shapes_of_graphs() -> list[StepShape]:
    """Train for three iterations whose generation reads a copy of the weights; return the captured steps."""
    shapes: list[StepShape] = []
    capture = StepGraphs._capture_step

    def noting(self: StepGraphs, shape: StepShape) -> Graph[StepShape] | None:
        graph = capture(self, shape)
        shapes.extend([] if graph is None else [shape])
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_capture_step", noting)
        learn("cuda", 1, 32, precision="bf16-mixed")
    return shapes


@pytest.mark.gpu
def test_generation_in_a_fit_replays_cuda_graphs(workers: WorkerPool) -> None:
    (shapes,) = workers.run(shapes_of_graphs, world_size=1, init_process_group=False)
    assert shapes
