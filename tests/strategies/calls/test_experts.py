"""Mixtures of experts train in every layout as on one rank, and log the load of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.optim import SGD

from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

PLANS = [
    calls(actor_train="pp2.fsdp2", actor_generate="dp4", reference_infer="dp2@0-1"),
    calls(actor_train="fsdp2.cp2", actor_generate="pp2.dp2", reference_infer="dp2@0-1"),
    calls(actor_train="dp4", actor_generate="fsdp4", reference_infer="dp2@0-1"),
]


def _train(plans: Sequence[Any], **settings: Any) -> list[Outcome]:
    """Train fresh mixtures under each plan on all ranks of this run."""
    world_size, found = runs.world_size(), []
    for plan in plans:
        module = runs.grpo(
            actor=tiny_model("qwen3_moe"),
            reference=tiny_model("qwen3_moe", seed=1),
            optimizer=partial(SGD, lr=0.5),
            **settings,
        )
        found.append(runs.train(module, plan, world_size, Batches(2)))
    return found


def test_every_layout_gives_the_results_and_loads_of_one_rank(workers: WorkerPool) -> None:
    ((alone,),) = workers.run(_train, ["heuristic"], world_size=1, init_process_group=False)
    names = [f"{name}/actor.generate" for name in ("expert_load", "unused_experts", "expert_entropy")]
    names += ["actor/expert_load", "actor/unused_experts", "actor/expert_entropy"]
    assert all(name in logged for name in names for logged in alone.logged)
    everyone = workers.run(_train, PLANS, init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)
