"""Training and inference through pipeline stages give the same tokens, losses and weights as one rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import GenerationError, PlanError
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.forward.deferred_weights import DeferredWeights
from lightning_realloc.strategies.generation_limits import refuse_generation_layout
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.strategies.test_realloc import assert_same, on_ranks, run_grpo, run_sft
from tests.workers import WorkerPool


def run_sft_noting_deferred(plan: Any, settings: dict[str, Any], batches: Batches) -> tuple[Outcome, int]:
    """Train under a plan; also return how many backward passes left out gradients of weights."""
    deferred = 0
    compute = DeferredWeights.compute_oldest

    def noting(weights: DeferredWeights) -> None:
        nonlocal deferred
        deferred += 1
        compute(weights)

    with mock.patch.object(DeferredWeights, "compute_oldest", noting):
        (outcome,) = run_sft([plan], settings, batches)
    return outcome, deferred


@pytest.mark.parametrize("layout", matrix(["pp2.fsdp2", "pp2.dp2", "pp2.tp2@3,1,2,0"], "pp2.tp2@3,1,2,0"))
def test_sft_gives_the_same_results_through_stages(workers: WorkerPool, layout: str) -> None:
    batches = Batches(2, responses=True)
    actor = tiny_model("llama", num_hidden_layers=4)
    settings = {"actor": actor, "train_options": runs.options(micro_batch_tokens=18, max_grad_norm=0.05)}
    (one,) = on_ranks(workers, run_sft, ["heuristic"], settings, batches, 1)
    (two,) = on_ranks(workers, run_sft, [calls(actor_train="pp2.vpp2")], settings, batches, 2)
    assert_same(two, one)
    plan = calls(actor_train={"layout": layout, "pipeline_schedule": "zero_bubble"})
    everyone = workers.run(
        run_sft_noting_deferred, plan, settings, batches, world_size=4, init_process_group=False, deadline_s=120.0
    )
    assert_same(everyone[0][0], one)
    assert all(deferred > 0 for _, deferred in everyone), "the plan's schedule is not the one that ran"


@pytest.mark.parametrize(
    ("family", "number"), matrix([(family, n) for family in ("llama", "gemma2") for n in range(4)], ("gemma2", 3))
)
def test_grpo_trains_and_generates_through_stages(workers: WorkerPool, family: str, number: int) -> None:
    batches, caps = Batches(2), {"gemma2": {"final_logit_softcapping": 0.5}}.get(family, {})
    bounded = GenerationOptions(max_cache_bytes=10**5 if number == 3 else None)
    settings = {
        **{role: tiny_model(family, seed=seed, **caps) for seed, role in enumerate(("actor", "reference"))},
        "train_options": runs.options(num_minibatches=2, micro_batch_tokens=18), "generation": bounded,
    }  # fmt: skip
    (one,) = on_ranks(workers, run_grpo, ["heuristic"], settings, batches, 1)
    plans = [
        calls(actor_train="pp2.cp2", actor_generate="dp2.tp2", reference_infer="cp2@1,3"),
        calls(actor_train="pp2.fsdp2", actor_generate="dp2.tp2", reference_infer="pp2@1,3"),
        calls(actor_train="pp2.tp2", actor_generate="pp2.fsdp2", reference_infer="pp2.fsdp2"),
        calls(actor_train="fsdp4", actor_generate="pp2.dp2@3,1,0,2", reference_infer="pp2@1,3"),
    ]
    (outcome,) = on_ranks(workers, run_grpo, plans[number : number + 1], settings, batches, 4)
    assert_same(outcome, one, weights=1e-5)


@pytest.mark.parametrize(
    ("generate", "named"), [("cp2@0-1", "cp=2, .*with cp, gen"), ("pp2.vpp2@0-1", "vpp=2, .*leave vpp out")]
)
def test_generation_on_parts_of_rows_or_in_interleaved_stages_is_refused(generate: str, named: str) -> None:
    plan = ExecutionPlan.from_mapping(calls(actor_train="cp2.tp2", actor_generate=generate, reference_infer="cp2@2-3"))

    with pytest.raises(PlanError, match=rf"calls.actor.generate: layout {generate} has {named}"):
        plan.check(runs.grpo().dataflow, 4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"generation": GenerationOptions(batch_invariant=True)}, "batch_invariant=True"),
        ({"engine": "hf"}, "engine='hf'"),
    ],
)
def test_options_that_need_all_layers_on_a_rank_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(GenerationError, match=rf"pp2\.dp2@0-3, whose ranks hold a stage each, and {named} .*pp=1"):
        refuse_generation_layout(runs.grpo(**settings), "actor.generate", Layout.parse("pp2.dp2"))
