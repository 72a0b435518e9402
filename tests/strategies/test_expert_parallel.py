"""Layouts that divide experts generate, infer and train as one rank does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

PLANS = (
    calls(actor_train="fsdp4.ep2", actor_generate="dp4.ep4", reference_infer="dp2.ep2@1,3"),
    calls(actor_train="dp2.fsdp2.ep4", actor_generate="fsdp4.ep2", reference_infer="fsdp4.ep4"),
    calls(actor_train="pp2.fsdp2.ep2", actor_generate="dp2.fsdp2.ep2@3,1,2,0", reference_infer="pp2.dp2.ep2"),
    calls(actor_train="dp4.ep4", actor_generate="pp2.dp2.ep2", reference_infer="fsdp2@1,3"),
    calls(actor_train="fsdp2.cp2.ep2", actor_generate="dp2.ep2@0-1", reference_infer="dp2@2-3"),
    calls(actor_train="fsdp2.tp2.ep2", actor_generate="dp2.tp2@3,1,2,0", reference_infer="dp4.ep4"),
    calls(actor_train="pp2.tp2", actor_generate="dp2.tp2.ep2", reference_infer="cp2.tp2"),
)
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def _train(family: str, plans: Sequence[Any], precision: str = "32-true") -> list[Outcome]:
    """Train a fresh mixture of experts under each plan on all ranks of this run."""
    world_size, found = runs.world_size(), []
    for plan in plans:
        actor, reference = (tiny_model(family, seed=seed) for seed in (0, 1))
        trained = runs.options(micro_batch_tokens=18, num_minibatches=2)
        module = runs.grpo(actor=actor, reference=reference, optimizer=partial(SGD, lr=0.5), train_options=trained)
        # A batch of five prompts gives ranks other numbers of samples, and one of them none in a micro-batch.
        found.append(runs.train(module, plan, world_size, Batches(2, size=5), precision=precision))
    return found


@pytest.mark.parametrize(
    ("family", "number"),
    matrix([(family, n) for family in FAMILIES for n in range(len(PLANS))]),
)
def test_every_plan_gives_the_results_of_one_rank(workers: WorkerPool, family: str, number: int) -> None:
    ((alone,),) = workers.run(_train, family, ["heuristic"], world_size=1, init_process_group=False)
    everyone = workers.run(_train, family, PLANS[number : number + 1], init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_narrow_precisions_train_close_to_one_rank(workers: WorkerPool, precision: str) -> None:
    ((alone,),) = workers.run(_train, "mixtral", ["static"], precision, world_size=1, init_process_group=False)
    plans = [
        calls(actor_train=layout, actor_generate=layout, reference_infer=layout) for layout in ("fsdp4.ep4", "dp4.ep2")
    ]
    for outcome in workers.run(_train, "mixtral", plans, precision, init_process_group=False, deadline_s=150.0)[0]:
        assert outcome.logged[0]["actor/loss"] == pytest.approx(alone.logged[0]["actor/loss"], abs=2e-2)
        assert runs.mean_difference(outcome.weights, alone.weights) < 2e-3
