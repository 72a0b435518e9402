"""GRPO computes the same on a CPU, on a GPU, and on several ranks that share one."""

from __future__ import annotations

from functools import partial

import pytest
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.optim import SGD

from lightning_realloc import GenerationOptions
from lightning_realloc.generation.forward.cuda_graphs import Graph, StepGraphs, StepShape
from lightning_realloc.strategies import ReallocStrategy
from tests.devices import DEVICES, accelerator_of_nccl, accelerator_on
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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("device", DEVICES)
def test_grpo_has_the_losses_of_one_cpu_rank(workers: WorkerPool, device: str, plan: str) -> None:
    expected = first_rank(workers, "cpu", "one rank", micro_batch_tokens=4096)
    actual = first_rank(workers, device, plan, micro_batch_tokens=32)
    assert actual.tokens == expected.tokens
    assert len(actual.logged) == 3
    for ours, theirs in zip(actual.logged, expected.logged, strict=True):
        for name in ("actor/loss", "actor/kl", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=TOLERANCE), name
    assert runs.largest_difference(actual.weights, expected.weights) < TOLERANCE


def shapes_of_graphs(plan: str, accelerator: CUDAAccelerator | str) -> tuple[list[StepShape], Outcome]:
    """Train for three iterations whose generation reads a copy of the weights; return the captured steps, too."""
    shapes: list[StepShape] = []
    capture = StepGraphs._capture_step

    def noting(self: StepGraphs, shape: StepShape) -> Graph[StepShape] | None:
        graph = capture(self, shape)
        shapes.extend([] if graph is None else [shape])
        return graph

    options = runs.options(micro_batch_tokens=32)
    module = runs.grpo(optimizer=DESCENT, train_options=options, generation=GenerationOptions(cuda_graphs="collective"))
    strategy = ReallocStrategy(runs.calls(actor_generate=plan, reference_infer=plan, actor_train="dp1@0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_capture_step", noting)
        trained_on = {"accelerator": accelerator, "precision": "bf16-mixed"}
        return shapes, runs.train(module, strategy, runs.world_size(), Batches(3), **trained_on)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["dp1", "tp2"])
def test_generation_in_a_fit_replays_cuda_graphs(workers: WorkerPool, plan: str) -> None:
    world_size = int(plan[-1])
    accelerator = accelerator_of_nccl(world_size)
    made = workers.run(shapes_of_graphs, plan, accelerator, world_size=world_size, init_process_group=False)
    shapes, outcome = made[0]
    assert shapes
    assert all(others == shapes for others, _ in made)
    assert len(outcome.logged) == 3
