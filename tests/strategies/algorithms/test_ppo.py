"""PPO with four models trains the same on one rank as on two, and learns a simple task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.optim import SGD

from lightning_realloc import GAE, KL
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import tiny_scorer
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
DESCENT = partial(SGD, lr=0.2)
EVERYTHING = {
    "advantages": GAE(normalize_values=True, reward_scale=2.0, reward_clip=1.5), "entropy_coef": 0.01,
    "critic_train_options": runs.options(num_epochs=2, num_minibatches=3), "critic_learning_rate": 0.1,
}  # fmt: skip
CASES: Sequence[Mapping[str, Any]] = (
    {"optimizer": DESCENT},
    {"optimizer": DESCENT, "kl": KL(0.3, place="loss", target=0.5), "loss_average": "sequence", **EVERYTHING},
)
PLANS = (
    calls(
        actor_generate="dp2", reference_infer="tp2", critic_infer="dp2", reward_infer="dp2", actor_train="fsdp2",
        critic_train="fsdp2",
    ),
    calls(
        actor_generate="tp2", reference_infer="dp1@0", critic_infer="fsdp2", reward_infer="dp1@1", actor_train="tp2",
        critic_train="dp2",
    ),
)  # fmt: skip


def run_ppo(plans: Sequence[Any]) -> list[tuple[runs.Outcome, dict[str, Tensor]]]:
    """Train a fresh PPO with a reward model for each case, under its plan; also return the critic's weights."""
    found, world_size = [], runs.world_size()
    for settings, plan in zip(CASES, plans, strict=True):
        strategy = ReallocStrategy(plan)
        module = runs.ppo(reward=tiny_scorer("llama", seed=5), **settings)
        outcome = runs.train(module, strategy, world_size, Batches(2))
        found.append((outcome, strategy.full_weights("critic")))
    return found


@pytest.mark.parametrize("swaps", matrix([False, True], False))
def test_ppo_gives_the_same_results_on_one_rank_and_on_two(workers: WorkerPool, swaps: bool) -> None:
    plans = PLANS[::-1] if swaps else PLANS  # the plans of the two cases
    (alone,) = workers.run(run_ppo, ["heuristic"] * 2, world_size=1, init_process_group=False, deadline_s=120.0)
    everyone = workers.run(run_ppo, plans, world_size=2, init_process_group=False, deadline_s=240.0)
    for index, (outcome, critic) in enumerate(everyone[0]):
        one, one_critic = alone[index]
        assert outcome.logged == everyone[1][index][0].logged
        assert outcome.tokens == one.tokens
        assert outcome.steps == one.steps == [1, 2]
        for ours, theirs in zip(outcome.logged, one.logged, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
        assert runs.largest_difference(outcome.weights, one.weights) <= 1e-5
        assert runs.largest_difference(critic, one_critic) <= 1e-5
    plain, everything = (outcome.logged for outcome, _ in alone)
    names = {"score", "score_std", "reward", "kl_k1", "kl_k3", "kl_coef", "explained_variance", "response_length",
             "response_length/min", "response_length/max", "stopped/model", "stopped/length"}  # fmt: skip
    trained = {"actor/ratio", "actor/entropy", "actor/clip_fraction", "actor/behaviour_kl", "actor/loss",
               "actor/grad_norm", "critic/loss", "critic/clip_fraction", "critic/grad_norm",
               "actor/skipped_steps", "critic/skipped_steps"}  # fmt: skip
    assert names | trained == set(plain[0])
    # The first step is taken from the policy that drew the tokens.
    assert plain[0]["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert plain[0]["kl_coef"] == plain[1]["kl_coef"] == pytest.approx(0.05)
    assert everything[0]["kl_coef"] == pytest.approx(0.3)
    assert everything[1]["kl_coef"] != everything[0]["kl_coef"]


def run_with_limits(limits: Sequence[Mapping[str, float]]) -> list[tuple[runs.Outcome, float]]:
    """Train with each limit; also return the largest change of an actor's weight."""
    found, world_size = [], runs.world_size()
    layouts = {name: layout for name, layout in PLANS[0]["calls"].items() if name != "reward.infer"}
    for limit in limits:
        options = runs.options(num_epochs=3, num_minibatches=2, stop_above=limit)
        module = runs.ppo(optimizer=DESCENT, train_options=options, critic_train_options=runs.options())
        module.configure_model()
        before = {name: value.clone() for name, value in module.actor.state_dict().items()}
        outcome = runs.train(module, {"calls": layouts} if world_size == 2 else "heuristic", world_size, Batches(1))
        moved = runs.largest_difference(outcome.weights, before) if outcome.weights else 0.0
        found.append((outcome, moved))
    return found


def test_steps_stop_after_a_mini_batch_exceeds_a_limit(workers: WorkerPool) -> None:
    limits = ({"ratio": 50.0}, {"behaviour_kl": 1e-6}, {"entropy": 0.0})
    (alone,) = workers.run(run_with_limits, limits, world_size=1, init_process_group=False, deadline_s=120.0)
    together = workers.run(run_with_limits, limits[1:], world_size=2, init_process_group=False, deadline_s=120.0)[0]
    assert [outcome.logged[0]["actor/steps"] for outcome, _ in alone] == [6.0, 1.0, 0.0]
    for (ours, _), (theirs, _) in zip(together, alone[1:], strict=True):
        assert ours.logged[0] == pytest.approx(theirs.logged[0], abs=1e-5, rel=1e-5)
    assert alone[2][1] == 0.0 < alone[1][1] < alone[0][1]
    assert "critic/steps" not in alone[0][0].logged[0]


def warm_up() -> list[float]:
    """Return, per iteration, 1 if an actor loss was logged, plus 2 for a critic loss; the warm-up takes two."""
    module = runs.ppo(critic_warmup=2, kl_coef=0.0)
    record = runs.Record()
    runs.trainer(ReallocStrategy("heuristic"), 1, callbacks=[record]).fit(module, Batches(3))
    return [float("actor/loss" in logged) + 2 * float("critic/loss" in logged) for logged in record.logged]


def test_only_the_critic_trains_during_its_warm_up(workers: WorkerPool) -> None:
    assert workers.run(warm_up, world_size=1, init_process_group=False, deadline_s=60.0) == [[2.0, 2.0, 3.0]]


def learn_low_tokens() -> list[float]:
    """Return the mean score of every iteration on a task that any policy gradient learns."""
    module = runs.ppo(learning_rate=1e-2, kl_coef=0.01, advantages=GAE(normalize_values=True),
                      train_options=runs.options(num_epochs=2))  # fmt: skip
    outcome = runs.train(module, "heuristic", 1, Batches(8, size=8))
    return [logged["score"] for logged in outcome.logged]


def test_rewards_rise(workers: WorkerPool) -> None:
    (scores,) = workers.run(learn_low_tokens, world_size=1, init_process_group=False, deadline_s=120.0)
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.2, scores
