"""Every algorithm trains adapters, leaves the base bitwise unchanged, and by default uses it as the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_realloc import (
    GRPO,
    KTO,
    RLOO,
    SFT,
    BestOfN,
    OnlineDPO,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    ReMax,
)
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix, selected
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.peft.peft_runs import LORA
from tests.workers import WorkerPool

GIVEN: Mapping[str, Any] = {"optimizer": partial(SGD, lr=0.2), "tokenizer": byte_tokenizer(), "peft_config": LORA}


def _of_rewards(kind: Callable[..., Any], **settings: Any) -> Any:
    return kind(tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, **GIVEN, **settings)


def _of_pairs(name: str, **settings: Any) -> Any:
    return getattr(preferences, name)(**GIVEN, **settings)


CASES: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sft": (lambda: SFT(tiny_model("llama"), **GIVEN), lambda: runs.Batches(2, responses=True)),
    "dpo": (lambda: _of_pairs("dpo", reference=None), preferences.pairs),
    "kto": (lambda: KTO(tiny_model("llama"), **GIVEN), preferences.judged),
    "orpo": (lambda: _of_pairs("orpo"), preferences.pairs),
    "reward model": (lambda: _of_pairs("reward_model"), preferences.pairs),
    "process reward": (lambda: _of_pairs("process_reward"), preferences.steps),
    "grpo": (lambda: _of_rewards(GRPO, kl_coef=0.1), lambda: runs.Batches(2)),
    "ppo": (lambda: _of_rewards(PPO), lambda: runs.Batches(2)),
    "rloo": (lambda: _of_rewards(RLOO), lambda: runs.Batches(2)),
    "reinforce++": (lambda: _of_rewards(ReinforcePlusPlus), lambda: runs.Batches(2)),
    "remax": (lambda: _of_rewards(ReMax), lambda: runs.Batches(2)),
    "best of n": (lambda: _of_rewards(BestOfN), lambda: runs.Batches(2)),
    "online dpo": (lambda: _of_rewards(OnlineDPO), lambda: runs.Batches(2)),
    "distillation": (
        lambda: OnPolicyDistillation(tiny_model("llama"), tiny_model("llama", seed=1), sampling=runs.SAMPLING, **GIVEN),
        lambda: runs.Batches(2),
    ),
}  # fmt: skip
WITH_REFERENCE = {"dpo", "kto", "grpo", "ppo", "rloo", "reinforce++", "remax", "online dpo"}
Trained = tuple[list[dict[str, float]], dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]], tuple[str, ...]]


EXHAUSTIVE = {"orpo", "kto", "process reward", "rloo", "reinforce++", "remax", "best of n"}
"""Cases that have the roles of others: of SFT, of DPO, of a reward model, and of GRPO."""


def train_all(names: Sequence[str]) -> dict[str, Trained]:
    """Train cases on one rank; return the metrics, weights before and after, and roles with weights."""
    found, world_size = {}, runs.world_size()
    for name in names:
        make, data = CASES[name]
        module, record, strategy = make(), runs.Record(), ReallocStrategy("heuristic")
        trained = [role for role in module.roles() if role.has_adapters]
        before = {role.name: role.build(seed=module.seed).state_dict() for role in trained}
        runs.trainer(strategy, world_size, callbacks=[record]).fit(module, data())
        after = {role.name: strategy.full_weights(role.name) for role in trained}
        found[name] = (record.logged, before, after, strategy.pool.roles)
    return found


@pytest.fixture(scope="module")
def trained(workers: WorkerPool, request: pytest.FixtureRequest) -> dict[str, Trained]:
    """The results of the selected cases."""
    names = selected(request, "name")
    found: dict[str, Trained] = workers.run(train_all, names, world_size=1, init_process_group=False, deadline_s=180.0)[
        0
    ]
    return found


@pytest.mark.parametrize("name", matrix(CASES, *set(CASES) - EXHAUSTIVE))
def test_every_algorithm_trains_adapters_and_leaves_the_base_unchanged(trained: dict[str, Trained], name: str) -> None:
    logged, before, after, placed = trained[name]
    assert len(logged) == 2 and before
    assert "reference" not in placed
    if name in WITH_REFERENCE:
        assert set(placed) == set(before)  # only trained roles
    for role, weights in after.items():
        assert logged[0][f"{role}/grad_norm"] > 0
        frozen = {n for n in weights if "lora_" not in n and "score" not in n}
        assert all(torch.equal(weights[n], before[role][n]) for n in frozen)
        adapters = [n for n in weights if "lora_" in n]
        assert adapters and runs.largest_difference(
            {n: weights[n] for n in adapters}, {n: before[role][n] for n in adapters}
        ) > 1e-6  # fmt: skip
