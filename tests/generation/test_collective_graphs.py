"""Tensor-parallel ranks capture and replay their steps together. Without CUDA, a "graph" runs its work again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.generation import Completion, GenerationEngine, engine_parts
from lightning_realloc.generation.forward.cuda_graphs import Record, StepGraphs, _CudaRecord
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from tests.generation.test_ranks import PARAMS, PROMPTS, _alone
from tests.matrices import matrix
from tests.models import tiny_model
from tests.workers import WorkerPool


class Recorder:
    """Stand-in for CUDA that counts replays, and cannot capture from some capture on."""

    def __init__(self, first_failing: int | None) -> None:
        self.num_captured = self.num_replayed = 0
        self._first_failing = first_failing

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        if self._first_failing is not None and self.num_captured >= self._first_failing:
            raise RuntimeError("CUDA error: out of memory")

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def _generate(failing_rank: int | None, *, moves_weights: bool) -> tuple[list[list[Completion]], int, list[str]]:
    """Generate three times on ranks that share a model; return completions, replays, and warnings of this rank."""
    layout = Layout.parse("tp2")
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    meshes.create([layout])
    model = tiny_model("llama")
    model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    recorder = Recorder(2 if rank == failing_rank else None)
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        made: Callable[[], Record] = lambda: recorder  # noqa: E731
        patch.setattr(engine_parts, "StepGraphs", partial(StepGraphs, make_record=made, device_type="cpu"))
        patch.setattr(TensorParallelGroup, "is_in_device_order", property(lambda group: True))
        log = "lightning_realloc.generation.forward.cuda_graphs._log.warning"
        patch.setattr(log, lambda text, *values: warnings.append(text % values))
        engine = GenerationEngine(model, max_slots=3, cuda_graphs="collective")
        completions = []
        for _ in range(3):
            completions.append(engine.generate(PROMPTS, PARAMS))
            if moves_weights and rank == 1:  # the other rank's graphs would still hold
                for weight in model.parameters():
                    weight.data = weight.data.clone()
    return completions, recorder.num_replayed, warnings


@pytest.mark.parametrize("moves_weights", matrix([False, True], True))
def test_ranks_replay_the_same_steps_and_draw_the_tokens_of_one_rank(workers: WorkerPool, moves_weights: bool) -> None:
    results = workers.run(partial(_generate, moves_weights=moves_weights), None, world_size=2)
    (completions, num_replayed, _), (others, num_of_other, _) = results
    assert completions == others
    assert num_replayed == num_of_other > 0
    for made in completions:
        assert {completion.sample_id: completion.token_ids for completion in made} == _alone("llama")


@pytest.mark.parametrize("failing_rank", matrix([0, 1], 1))
def test_a_rank_that_cannot_capture_makes_all_go_on_without_graphs(workers: WorkerPool, failing_rank: int) -> None:
    results = workers.run(partial(_generate, moves_weights=False), failing_rank, world_size=2)
    for rank, (completions, _, warnings) in enumerate(results):
        for made in completions:
            assert {completion.sample_id: completion.token_ids for completion in made} == _alone("llama")
        reason = "CUDA error: out of memory" if rank == failing_rank else "another rank could not"
        assert [warning.rsplit(": ", 1)[-1] for warning in warnings] == [reason.rsplit(": ", 1)[-1]]


def _sum_in_a_graph() -> list[float]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = TensorParallelGroup(dist.group.WORLD, (0,), 0)  # type: ignore[arg-type]
        assert group.is_in_device_order
        values, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

        def work() -> None:
            total.copy_(group.sum_without_gradient(values * 2))
            total.add_(group.gather(values)[0])

        work()  # connects the ranks
        replay = _CudaRecord()(work)
        values.fill_(5)
        replay()
        return total.tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_collectives_of_nccl_are_part_of_a_graph(workers: WorkerPool) -> None:
    assert workers.run(_sum_in_a_graph, world_size=1, init_process_group=False) == [[15.0] * 4]
