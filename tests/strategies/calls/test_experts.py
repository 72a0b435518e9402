"""Mixtures of experts train in every layout as on one rank, log the load of their experts, and replay their choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from transformers import PreTrainedModel

from lightning_realloc import GenerationOptions, TrainOptions
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

PLANS = [
    calls(actor_train="pp2.fsdp2", actor_generate="dp4", reference_infer="dp2@0-1"),
    calls(actor_train="fsdp2.cp2", actor_generate="pp2.dp2", reference_infer="dp2@0-1"),
    calls(actor_train="dp4.ep2", actor_generate="fsdp4.ep4", reference_infer="dp2@0-1"),
]
UNDECIDED = calls(actor_train="pp2.fsdp2", actor_infer="fsdp2.cp2", actor_generate="pp2.dp2")
UNREPLAYED = calls(actor_train="dp4", actor_infer="dp4", actor_generate="dp4")


def undecided(model: PreTrainedModel) -> PreTrainedModel:
    """Let the routers' logits differ by less than their rounding, so that other matrix products choose otherwise."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.copy_(weight[:1] * (1 + 1e-7 * torch.randn(weight.shape, generator=generator)))
    return model


def _train(plans: Sequence[Any], family: str) -> list[Outcome]:
    """Train fresh mixtures under each plan on all ranks of this run, with the experts of generation."""
    world_size, found = runs.world_size(), []
    for plan in plans:
        module = runs.grpo(
            actor=tiny_model(family),
            reference=tiny_model(family, seed=1),
            optimizer=partial(SGD, lr=0.5),
            generation=GenerationOptions(router_replay=True),
        )
        found.append(runs.train(module, plan, world_size, Batches(2)))
    return found


def _engine_differences() -> list[list[float]]:
    """Return the logged differences of engine and training of an undecided model, with replay and without."""
    world_size, found = runs.world_size(), []
    for plan, replays in ((UNDECIDED, True), (UNREPLAYED, False)):
        module = runs.grpo(
            actor=undecided(tiny_model("qwen3_moe")), kl_coef=0.0, ratio_to="proximal",
            train_options=TrainOptions(num_minibatches=2), generation=GenerationOptions(router_replay=replays),
        )  # fmt: skip
        outcome = runs.train(module, plan, world_size, Batches(1))
        found.append([logged["actor/engine_difference"] for logged in outcome.logged])
    return found


@pytest.mark.parametrize(
    ("family", "number"),
    matrix([(family, n) for family in ("qwen3_moe", "gpt_oss") for n in range(len(PLANS))]),
)
def test_every_layout_gives_the_results_and_loads_of_one_rank(workers: WorkerPool, family: str, number: int) -> None:
    ((alone,),) = workers.run(_train, ["heuristic"], family, world_size=1, init_process_group=False)
    names = [f"{name}/actor.generate" for name in ("expert_load", "unused_experts", "expert_entropy")]
    names += ["actor/expert_load", "actor/unused_experts", "actor/expert_entropy"]
    assert all(name in logged for name in names for logged in alone.logged)
    everyone = workers.run(_train, PLANS[number : number + 1], family, init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)


def test_replayed_experts_keep_log_probabilities_where_choices_flip(workers: WorkerPool) -> None:
    (replayed, plain), *_ = workers.run(_engine_differences, init_process_group=False, deadline_s=150.0)
    assert max(replayed) <= 1e-6 and min(plain) > 1e-4
