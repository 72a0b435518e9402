"""Rewards start before weights are loaded, close with the run, and may fail on single samples."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import Failed, PooledReward
from lightning_realloc.rewards.failure_rule import Outcome
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.rewards import judges
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

PLAN = runs.calls(
    actor_generate="dp2", reference_infer="dp2", critic_infer="dp2", actor_train="fsdp2", critic_train="fsdp2"
)


class Kept:
    """Fails on a third of all responses, and records its calls."""

    on_failure = "mask"

    def __init__(self, *, refuses: str = "") -> None:
        self.refuses = refuses
        self.notes: list[str] = []

    def start(self) -> None:
        """Begin."""
        self.notes.append("start")
        if self.refuses == "start":
            raise RewardError("there is no server at tests:1")

    def close(self) -> None:
        """End."""
        self.notes.append("close")

    def __call__(self, completion_ids: list[list[int]], trainer_state: Any, **columns: Any) -> list[Outcome]:
        """Reward low tokens."""
        self.notes.append(f"judge {trainer_state.global_step} of {trainer_state.max_steps} at {trainer_state.epoch}")
        if self.refuses == "judge":
            raise RewardError("the server has gone")
        if self.refuses == "overflow" and trainer_state.global_step == 1 and os.environ.get("RANK") == "1":
            return [1e39 for _ in completion_ids]
        rewards = runs.low_tokens(completion_ids)
        pairs = zip(rewards, completion_ids, strict=True)
        return [Failed("no luck") if sum(ids) % 3 == 0 else reward for reward, ids in pairs]


def fit(make: Callable[..., Any], refuses: str = "") -> tuple[list[str], list[dict[str, float]], bool, str]:
    """Train on two ranks; return the reward's calls, the logged metrics, whether models were built, and the error."""
    reward = Kept(refuses=refuses)
    module = make(reward=reward)
    record = runs.Record()
    trainer = runs.trainer(
        runs.ReallocStrategy(PLAN if make is runs.ppo else grpo_plan()), 2, callbacks=[record], max_epochs=1
    )
    told = ""
    try:
        trainer.fit(module, Batches(2))
    except RewardError as error:
        told = str(error)
    return reward.notes, record.logged, bool(module.models()), told


def grpo_plan() -> dict[str, Any]:
    """Return the plan without a critic."""
    return {"calls": {call: layout for call, layout in PLAN["calls"].items() if "critic" not in call}}


@pytest.mark.parametrize("make", matrix([runs.grpo, runs.ppo], runs.ppo))
def test_samples_whose_reward_failed_are_left_out(workers: WorkerPool, make: Any) -> None:
    ranks = workers.run(fit, make, world_size=2, init_process_group=False)
    assert ranks[0][1] == ranks[1][1]  # every rank logs the same
    for notes, logged, _, told in ranks:
        assert told == ""
        assert notes == ["start", "judge 0 of 2 at 0.0", "judge 1 of 2 at 0.5", "close"]
        assert len(logged) == 2
        for metrics in logged:
            assert 0 < metrics["reward_failures/Kept"] < 12
            assert all(math.isfinite(value) for name, value in metrics.items()), metrics


def test_a_reward_that_cannot_start_ends_the_run_before_models_are_built(workers: WorkerPool) -> None:
    for notes, logged, built, told in workers.run(fit, runs.grpo, "start", world_size=2, init_process_group=False):
        assert told == "there is no server at tests:1"
        assert (notes, logged, built) == (["start", "close"], [], False)


def test_a_reward_is_closed_when_a_run_fails(workers: WorkerPool) -> None:
    for notes, _, _, told in workers.run(fit, runs.grpo, "judge", world_size=2, init_process_group=False):
        assert "the server has gone" in told
        assert notes == ["start", "judge 0 of 2 at 0.0", "close"]


def test_a_reward_that_float32_cannot_hold_ends_a_run_on_all_ranks(workers: WorkerPool) -> None:
    for _, logged, _, told in workers.run(fit, runs.grpo, "overflow", world_size=2, init_process_group=False):
        assert told.startswith("reward function 'Kept' must return finite numbers") and "1e+39 for the comp" in told
        assert len(logged) == 1 and math.isfinite(logged[0]["reward"])


def fit_with_a_pool() -> list[int]:
    """Train with a pool of reward processes; return the processes that are left after the fit."""
    reward = PooledReward(judges.obedient, workers=2, chunk_size=4)
    seen: list[int] = []

    class Watch(runs.Record):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.extend(reward.pids)

    runs.trainer("realloc", 1, callbacks=[Watch()], max_steps=1).fit(runs.grpo(reward=reward), Batches(1))
    assert len(seen) == 2, seen
    return judges.wait_until_gone(seen)


def test_reward_processes_end_with_the_fit(workers: WorkerPool) -> None:
    assert workers.run(fit_with_a_pool, world_size=1, init_process_group=False) == [[]]


def right_length(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Reward answers of the right length."""
    return [float(len(text) == len(right)) for text, right in zip(completions, answer, strict=True)]


def hold_out_rows_without_answers() -> tuple[str, int, int]:
    """Return the error, the steps before it, and those of a run that does not evaluate."""
    rows = [{"prompt": "a", "answer": "b"}] * 2
    settings = {"batch_size": 2, "val_data": [{"prompt": "a", "level": 1}], "tokenizer": byte_tokenizer()}
    module = runs.grpo(reward=right_length, actor=tiny_model("llama", vocab_size=259), kl_coef=0.0)
    first, second = (runs.trainer("realloc", 1, limit_val_batches=limit) for limit in (1.0, 0))
    with pytest.raises(RewardError) as caught:
        first.fit(module, PromptDataModule(rows, **settings))
    second.fit(module, PromptDataModule(rows, **settings))
    return str(caught.value), first.global_step, second.global_step


def test_columns_of_held_out_rows_are_checked_before_the_first_step(workers: WorkerPool) -> None:
    ((told, *steps),) = workers.run(hold_out_rows_without_answers, world_size=1, init_process_group=False)
    assert "'right_length' needs the columns ['answer'], the held-out data has ['level', 'prompt']; add them" in told
    assert steps == [0, 1]
