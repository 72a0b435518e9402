"""Training and inference through pipeline stages give the same tokens, losses and weights as one rank."""

from __future__ import annotations

import pytest

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.strategies.test_realloc import assert_same, on_ranks, run_grpo, run_sft
from tests.workers import WorkerPool


@pytest.mark.parametrize("layout", matrix(["pp2.fsdp2", "pp2.dp2", "pp2.tp2@3,1,2,0"], "pp2.tp2@3,1,2,0"))
def test_sft_gives_the_same_results_through_stages(workers: WorkerPool, layout: str) -> None:
    batches = Batches(2, responses=True)
    settings = {"train_options": runs.options(micro_batch_tokens=18, max_grad_norm=0.05)}
    (one,) = on_ranks(workers, run_sft, ["heuristic"], settings, batches, 1)
    (two,) = on_ranks(workers, run_sft, [calls(actor_train="pp2")], settings, batches, 2)
    assert_same(two, one)
    (four,) = on_ranks(workers, run_sft, [calls(actor_train=layout)], settings, batches, 4)
    assert_same(four, one)


@pytest.mark.parametrize("number", matrix([0, 1, 2], 0))
def test_grpo_trains_through_stages_and_generates_without_them(workers: WorkerPool, number: int) -> None:
    batches = Batches(2)
    settings = {"train_options": runs.options(num_minibatches=2, micro_batch_tokens=18)}
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], settings, batches, 1)
    plans = [
        calls(actor_train="pp2.cp2", actor_generate="dp2.tp2", reference_infer="cp2@1,3"),
        calls(actor_train="pp2.fsdp2", actor_generate="dp2.tp2", reference_infer="pp2@1,3"),
        calls(actor_train="pp2.tp2", actor_generate="dp4", reference_infer="pp2.fsdp2"),
    ]
    (outcome,) = on_ranks(workers, run_grpo, plans[number : number + 1], settings, batches, 4)
    assert_same(outcome, one, weights=2e-5)


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_generation_in_a_pipeline_or_on_parts_of_rows_is_refused(axis: str) -> None:
    layouts = {"actor_train": f"{axis}2.tp2", "actor_generate": f"{axis}2@0-1", "reference_infer": f"{axis}2@2-3"}
    plan = ExecutionPlan.from_mapping(calls(**layouts))

    refusal = rf"calls.actor.generate: layout {axis}2@0-1 has {axis}=2, .*train and infer with {axis}"
    with pytest.raises(PlanError, match=refusal):
        plan.check(runs.grpo().dataflow, 4)
