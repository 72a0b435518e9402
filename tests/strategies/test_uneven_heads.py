"""Heads that the tensor-parallel degree does not divide give the tokens, losses and weights of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from lightning_realloc import GenerationOptions
from tests.matrices import matrix
from tests.models import UNEVEN_HEADS, tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA, adapted_grpo
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

PLANS = {
    "9/3": [
        calls(actor_train="dp4", actor_generate="dp2.tp2", reference_infer="tp3@1-3"),
        calls(actor_train="fsdp2.tp2", actor_generate="tp3@0-2", reference_infer="dp2.tp2@3,1,0,2"),
        calls(actor_train="fsdp4", actor_generate="tp4", reference_infer="tp2@2-3"),
    ],
    "14/2": [
        calls(actor_train="tp4", actor_generate="dp2.tp2", reference_infer="tp4"),
        calls(actor_train="fsdp2.tp2", actor_generate="tp4@2,0,1,3", reference_infer="fsdp4"),
    ],
}
SETTINGS = {
    "all weights": {},
    "adapters": {"peft_config": LORA},
    "bounded cache": {"generation": GenerationOptions(max_cache_bytes=20_000)},
}
CASES = (
    *((heads, "all weights", plan) for heads in PLANS for plan in range(len(PLANS[heads]))),
    ("9/3", "adapters", 1), ("14/2", "adapters", 0), ("9/3", "bounded cache", 0), ("14/2", "bounded cache", 1),
)  # fmt: skip
"""Heads, settings and the number of a plan. Adapters train, and caches are bounded, in one plan for each."""
BOUNDARY = ("14/2", "all weights", 0)
"""9/3 heads and adapters are in `tests/runtime/parallel/test_parallelize.py`, bounded caches in `tests/generation`."""


def _train(heads: str, plans: Sequence[Any], settings: dict[str, Any]) -> list[Outcome]:
    """Train a fresh model with these heads under each plan on all ranks of this run."""
    world_size, found = runs.world_size(), []
    family = "qwen2" if heads == "14/2" else "llama"  # tied, with biases; not tied
    for plan in plans:
        actor, reference = (tiny_model(family, seed=seed, **UNEVEN_HEADS[heads]) for seed in (0, 1))
        if "peft_config" in settings:
            module = adapted_grpo(actor=actor)
        else:
            module = runs.grpo(actor=actor, reference=reference, optimizer=partial(SGD, lr=0.5), **settings)
        found.append(runs.train(module, plan, world_size, Batches(2)))
    return found


@pytest.mark.parametrize(("heads", "name", "plan"), matrix(CASES, BOUNDARY))
def test_every_plan_gives_the_results_of_one_rank(workers: WorkerPool, heads: str, name: str, plan: int) -> None:
    settings, plans = SETTINGS[name], PLANS[heads][plan : plan + 1]
    ((alone,),) = workers.run(_train, heads, ["heuristic"], settings, world_size=1, init_process_group=False)
    everyone = workers.run(_train, heads, plans, settings, init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)
