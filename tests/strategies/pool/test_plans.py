"""Any plan of PPO's seven calls trains as on one rank, ends, and leaves every rank at the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from lightning_realloc import GAE, KL
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import tiny_scorer
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

MODEL_CALLS = {
    "actor.generate": "generate", "reference.infer": "infer", "critic.infer": "infer", "reward.infer": "score",
    "actor.train": "train", "critic.train": "train",
}  # fmt: skip
DEADLINE_S = 120.0
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


def run_ppo(plans: Sequence[Any]) -> list[tuple[runs.Outcome, dict[str, Tensor]]]:
    """Train PPO for two iterations under each plan; also return the critic's weights."""
    found, world_size = [], runs.world_size()
    for plan in plans:
        strategy = ReallocStrategy(plan)
        module = runs.ppo(reward=tiny_scorer("llama", seed=5), **SETTINGS)
        outcome = runs.train(module, strategy, world_size, Batches(2))
        found.append((outcome, strategy.full_weights("critic")))
    return found


@pytest.fixture(scope="module")
def alone(workers: WorkerPool) -> tuple[runs.Outcome, Mapping[str, Tensor]]:
    """The outcome on one rank."""
    (found,) = workers.run(run_ppo, ["heuristic"], world_size=1, init_process_group=False, deadline_s=DEADLINE_S)
    return found[0]  # type: ignore[no-any-return]


def _assert_like(everyone: Sequence[Any], index: int, alone: tuple[runs.Outcome, Mapping[str, Tensor]]) -> None:
    outcome, critic = everyone[0][index]
    one, one_critic = alone
    assert all(others[index][0].steps == [1, 2] for others in everyone)
    assert all(others[index][0].logged == outcome.logged for others in everyone)
    assert outcome.tokens == one.tokens
    # Metrics of training on some ranks may come an iteration late; the last iteration waits for them.
    assert outcome.logged[-1] == pytest.approx(one.logged[-1], abs=1e-5, rel=1e-5)
    for ours, theirs in zip(outcome.rewards, one.rewards, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert runs.largest_difference(outcome.weights, one.weights) <= 1e-5
    assert runs.largest_difference(critic, one_critic) <= 1e-5


@pytest.mark.parametrize(
    "name",
    matrix(HAND_PICKED, "pipelines"),
)
def test_hand_picked_plans_give_the_results_of_one_rank(workers: WorkerPool, alone: Any, name: str) -> None:
    everyone = workers.run(run_ppo, [HAND_PICKED[name]], world_size=4, init_process_group=False, deadline_s=DEADLINE_S)
    _assert_like(everyone, 0, alone)


def _degrees(kind: str, most: int) -> list[ParallelDims]:
    """Return the degrees that a call of the tiny models may have on at most ``most`` ranks."""
    pipelines = (1, 2) if kind in ("infer", "train") else (1,)
    found = [
        ParallelDims(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
        for pp in pipelines for dp in (1, 2, 3) for fsdp in (1, 2, 4) for tp in (1, 2, 4)
    ]  # fmt: skip
    return [dims for dims in found if dims.size <= most]


def _plans(world_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw degrees and ranks for every call, so that every rank has a call."""

    @st.composite
    def draw_plan(draw: st.DrawFn) -> dict[str, Any]:
        layouts: dict[str, str] = {}
        unused = set(range(world_size))
        for name, kind in MODEL_CALLS.items():
            dims = draw(st.sampled_from(_degrees(kind, world_size)))
            order = draw(st.permutations(range(world_size)))
            ranks = tuple(sorted(order, key=lambda rank: rank not in unused)[: dims.size])
            unused -= set(ranks)
            layouts[name] = str(Layout(dims, ranks))
        if unused:
            layouts["actor.generate"] = str(Layout(ParallelDims(dp=world_size), tuple(range(world_size))))
        return {"calls": layouts}

    return draw_plan()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "count"), matrix([(1, 1), (2, 4), (3, 1), (4, 4), (8, 2)], (3, 1)))
def test_random_plans_give_the_results_of_one_rank(
    workers: WorkerPool, alone: Any, world_size: int, count: int
) -> None:
    @settings(max_examples=count, derandomize=True, deadline=None, database=None)
    @given(_plans(world_size))
    def try_one(plan: dict[str, Any]) -> None:
        everyone = workers.run(run_ppo, [plan], world_size=world_size, init_process_group=False, deadline_s=DEADLINE_S)
        _assert_like(everyone, 0, alone)

    try_one()
