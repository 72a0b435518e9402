"""Any plan of PPO's seven calls trains as on one rank, ends, and leaves every rank at the same step."""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
from torch import Tensor
from torch.optim import SGD

from lightning_realloc import GAE, KL
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import tiny_model, tiny_scorer
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

MODEL_CALLS = {
    "actor.generate": "generate", "reference.infer": "infer", "critic.infer": "infer", "reward.infer": "score",
    "actor.train": "train", "critic.train": "train",
}  # fmt: skip
SCHEDULES = ("1f1b", "zero_bubble")
DEADLINE_S = 120.0
NAMES = ("llama", "mixtral")
NUM_BLOCKS = {4: 2, 6: 2, 8: 4}
"""Number of ranks -> blocks of the models."""
# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
SETTINGS = {
    "optimizer": partial(SGD, lr=0.2),
    "train_options": runs.options(num_minibatches=2),
    "kl": KL(target=0.5),
    "advantages": GAE(normalize_values=True),
}


def _plan(generate: str, reference: str, critic: str, reward: str, train: str, train_critic: str) -> dict[str, Any]:
    return calls(
        actor_generate=generate, reference_infer=reference, critic_infer=critic, reward_infer=reward,
        actor_train=train, critic_train=train_critic,
    )  # fmt: skip


HAND_PICKED = {
    "all sharded": _plan("fsdp4", "fsdp4", "fsdp4", "fsdp4", "fsdp4", "fsdp4"),
    "all replicated": _plan("dp4", "dp4", "dp4", "dp4", "dp4", "dp4"),
    "one rank per role": _plan("dp1@0", "dp1@1", "dp1@2", "dp1@3", "dp1@0", "dp1@2"),
    "training side by side": _plan("dp4", "dp2@0-1", "dp2@2-3", "dp2@0-1", "fsdp2@0-1", "fsdp2@2-3"),
    "everything side by side": _plan("dp2.tp2", "tp2@0-1", "tp2@2-3", "fsdp2@2-3", "fsdp2.tp2", "fsdp4"),
    "generation apart from training": _plan("dp2@2-3", "dp1@2", "dp1@3", "dp1@3", "fsdp2@0-1", "tp2@0-1"),
    "a critic of its own": _plan("dp3@0-2", "fsdp3@0-2", "dp1@3", "dp3@0,2,1", "fsdp3@0-2", "dp1@3"),
    "ranks in another order": _plan("dp2.tp2@3,2,1,0", "tp2@3,0", "dp2@2,1", "fsdp2@1,3", "tp4@1,0,3,2", "dp4@3,1,2,0"),
    "pipelines": _plan("dp4", "pp2@0-1", "pp2@2-3", "dp2@1-2", "pp2.fsdp2", "pp2.dp2"),
    "a pipeline beside shards": _plan("tp2@0-1", "dp2@2-3", "fsdp2@0-1", "dp1@1", "pp2@0-1", "fsdp2@2-3"),
    "overlapping teams": _plan("tp4", "dp3@1-3", "dp2@0,3", "tp2@1-2", "dp2.fsdp2", "tp2@2-3"),
    "training on the last rank": _plan("dp4", "dp4", "dp4", "dp4", "dp1@3", "dp1@3"),
}
ON_EIGHT_RANKS = {
    "stages that generate": _plan("pp2.dp4", "cp2.tp2@4-7", "fsdp2.tp2@0-3", "dp2@2,6", "pp2.fsdp2.tp2", "fsdp4@4-7"),
    "runs of blocks": _plan(
        "pp4.tp2", "pp2.vpp2.dp2@0-3", "pp2.vpp2.cp2@4-7", "tp2@1,5", "pp2.vpp2.fsdp2.tp2", "pp4.fsdp2"
    ),
}


def run_ppo(family: str, num_blocks: int, plan: Any) -> tuple[runs.Outcome, dict[str, Tensor]]:
    """Train PPO with models of a family for two iterations under a plan; also return the critic's weights."""
    strategy, blocks = ReallocStrategy(plan), {"num_hidden_layers": num_blocks}
    actor, reference, critic = (tiny_model(family, seed=seed, **blocks) for seed in range(3))
    reward = tiny_scorer("llama", seed=5, **blocks)
    models = {"actor": actor, "reference": reference, "critic": critic, "reward": reward}
    module = runs.ppo(**models, **SETTINGS)
    outcome = runs.train(module, strategy, runs.world_size(), Batches(2))
    return outcome, strategy.full_weights("critic")


_alone: dict[tuple[str, int], tuple[runs.Outcome, dict[str, Tensor]]] = {}


def _check_plan(workers: WorkerPool, family: str, plan: Any, world_size: int) -> None:
    """Assert that all ranks have the results of one rank."""
    models = family, NUM_BLOCKS[world_size]
    if models not in _alone:
        (_alone[models],) = workers.run(
            run_ppo, *models, "heuristic", world_size=1, init_process_group=False, deadline_s=DEADLINE_S
        )
    one, one_critic = _alone[models]
    everyone = workers.run(
        run_ppo, *models, plan, world_size=world_size, init_process_group=False, deadline_s=DEADLINE_S
    )
    outcome, critic = everyone[0]
    assert all(others.steps == [1, 2] for others, _ in everyone)
    assert all(others.logged == outcome.logged for others, _ in everyone)
    assert outcome.tokens == one.tokens
    # Metrics of training on some ranks may come an iteration late; the last iteration waits for them.
    assert outcome.logged[-1] == pytest.approx(one.logged[-1], abs=1e-5, rel=1e-5)
    for ours, theirs in zip(outcome.rewards, one.rewards, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert runs.largest_difference(outcome.weights, one.weights) <= 1e-5
    assert runs.largest_difference(critic, one_critic) <= 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name"), [*product(["llama"], HAND_PICKED), *product(NAMES, ON_EIGHT_RANKS)])
def test_hand_picked_plans_give_the_results_of_one_rank(workers: WorkerPool, family: str, name: str) -> None:
    world_size = 8 if name in ON_EIGHT_RANKS else 4
    _check_plan(workers, family, {**HAND_PICKED, **ON_EIGHT_RANKS}[name], world_size)


def _degrees(kind: str, family: str, most: int) -> list[ParallelDims]:
    """Return the degrees that a call of the tiny models may have on at most ``most`` ranks."""
    has_experts = family == "mixtral" and kind != "score"
    return [
        ParallelDims(pp=pp, vpp=vpp, dp=dp, fsdp=fsdp, cp=cp, tp=tp, ep=ep)
        for pp in (1, 2, 4)
        for vpp in ((1,) if pp == 1 or kind == "generate" else (1, 2))
        if pp * vpp <= NUM_BLOCKS[most]
        for dp in (1, 2, 3)
        for fsdp in (1, 2, 3, 4)
        for cp in ((1,) if kind == "generate" else (1, 2, 3, 4))
        for tp in (1, 2, 4)  # of four query heads; cp also divides the tokens of one
        if pp * dp * fsdp * cp * tp <= most
        for ep in ParallelDims(dp=dp, fsdp=fsdp).expert_degrees
        if ep == 1 or (has_experts and ep in (2, 4))  # of four experts
    ]


def _draw_plan(family: str, seed: int, world_size: int) -> dict[str, Any]:
    """Draw degrees, ranks in any order and options for every call, so that every rank has a call."""
    rng, unused, plan = Random(seed), set(range(world_size)), dict[str, Any]()
    for name, kind in MODEL_CALLS.items():
        dims = rng.choice(_degrees(kind, family, world_size))
        order = rng.sample(range(world_size), world_size)
        ranks = tuple(sorted(order, key=lambda rank: rank not in unused)[: dims.size])
        unused -= set(ranks)
        plan[name] = {"layout": str(Layout(dims, ranks))}
        if kind == "train":
            plan[name]["micro_batch_tokens"] = rng.choice([18, 64])
        if kind == "train" and dims.pp > 1:
            plan[name]["pipeline_schedule"] = rng.choice(SCHEDULES)
    if unused:
        plan["actor.generate"] = {"layout": str(Layout(ParallelDims(dp=world_size), tuple(range(world_size))))}
    return {"calls": plan}


@pytest.mark.slow
# On six ranks, with every axis but vpp: it trains a pipeline with divided experts next to a critic with divided rows.
@pytest.mark.parametrize("seed", matrix(range(60), 45))
def test_random_plans_give_the_results_of_one_rank(workers: WorkerPool, seed: int) -> None:
    family, world_size = NAMES[seed % 2], (6, 8)[seed // 2 % 2]
    _check_plan(workers, family, _draw_plan(family, seed, world_size), world_size)
