"""Learning from preferences gives the same losses and weights on one rank and on two, under every kind of plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW

from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.peft.peft_runs import LORA
from tests.strategies.runs import calls
from tests.workers import WorkerPool

# Micro-batches of few tokens: each rank has several, so that their sums matter.
SMALL = {"micro_batch_tokens": 48}
REFERENCE_PLANS = (
    calls(reference_infer="dp2", actor_infer="dp2", actor_train="fsdp2"),
    calls(reference_infer="dp1@1", actor_infer="tp2", actor_train="dp2"),
)
ACTOR_PLANS = (calls(actor_infer="dp2", actor_train="fsdp2"), calls(actor_infer="tp2", actor_train="pp2"))
REWARD_PLANS = (
    calls(reward_infer="dp2", reward_train="fsdp2"),
    calls(reward_infer="dp1@1", reward_train="tp2"),
    calls(reward_infer="tp2", reward_train="pp2"),
)
CASES: Mapping[str, tuple[str, str, Mapping[str, Any], Sequence[Any]]] = {
    "dpo": ("dpo", "pairs", {"train_options": runs.options(num_epochs=2, num_minibatches=2, **SMALL)}, REFERENCE_PLANS),
    "dpo with several losses": (
        "dpo", "pairs",
        {"loss": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.2], "divergence": "js", "tail_weight": 0.5,
         "label_smoothing": 0.1, "train_options": runs.options(**SMALL)},
        REFERENCE_PLANS[1:],
    ),
    "dpo with adapters": ("dpo_with_adapters", "pairs", {"train_options": runs.options(**SMALL)}, REFERENCE_PLANS),
    "aot": ("dpo", "pairs", {"loss": "aot_unpaired", "train_options": runs.options(**SMALL)}, REFERENCE_PLANS[:1]),
    "kto": ("kto", "judged", {"train_options": runs.options(**SMALL)}, REFERENCE_PLANS),
    "kto from zero": (
        "kto", "judged",
        {"loss": "apo_zero_unpaired", "train_options": runs.options(num_minibatches=2)},
        REFERENCE_PLANS[1:],
    ),
    "orpo": ("orpo", "pairs", {"train_options": runs.options(num_minibatches=2, **SMALL)}, ACTOR_PLANS),
    "reward model": (
        "reward_model", "pairs", {"centre_coef": 0.01, "train_options": runs.options(num_minibatches=2, **SMALL)},
        REWARD_PLANS,
    ),
    "dpo of adapters": (
        "dpo", "pairs", {"peft_config": LORA, "reference": None, "train_options": runs.options(**SMALL)},
        REFERENCE_PLANS,
    ),
    "reward model of adapters": (
        "reward_model", "pairs", {"peft_config": LORA, "train_options": runs.options(num_minibatches=2, **SMALL)},
        REWARD_PLANS[::2],
    ),
    "process reward": ("process_reward", "steps", {"train_options": runs.options(**SMALL)}, REWARD_PLANS[1:]),
}  # fmt: skip


BOUNDARIES = {"dpo": 0, "reward model": 2}
"""Case -> number of its plan."""


def run_case(name: str, plans: Sequence[Any]) -> list[tuple[list[dict[str, float]], dict[str, float], Any]]:
    """Train for two iterations under each plan and validate; return the logged metrics and the trained weights."""
    algorithm, data, settings, _ = CASES[name]
    found, world_size = [], runs.world_size()
    for plan in plans:
        record, strategy = runs.Record(), ReallocStrategy(plan)
        batches = getattr(preferences, data)(**({"margins": True} if algorithm == "reward_model" else {}))
        trainer = runs.trainer(strategy, world_size, callbacks=[record])
        module = getattr(preferences, algorithm)(**settings)
        trainer.fit(module, batches, batches)
        weights = strategy.full_weights(module.dataflow.trained_roles[0])
        validated = {key: value for key, value in runs.numbers(trainer.callback_metrics).items() if "val/" in key}
        found.append((record.logged, validated, weights))
    return found


@pytest.mark.parametrize(
    ("name", "plan"), matrix(((n, p) for n in CASES for p in range(len(CASES[n][3]))), *BOUNDARIES.items())
)
def test_preference_training_gives_the_same_results_on_one_rank_and_on_two(
    name: str, plan: int, workers: WorkerPool
) -> None:
    plans = CASES[name][3][plan : plan + 1]
    ((alone, validated, weights),) = workers.run(
        run_case, name, ["heuristic"], world_size=1, init_process_group=False, deadline_s=60.0
    )[0]
    everyone = workers.run(run_case, name, plans, world_size=2, init_process_group=False, deadline_s=120.0)
    assert {"val/loss"} < set(validated)
    for (logged, held_out, ours), (theirs_logged, theirs_held_out, _) in zip(*everyone, strict=True):
        assert logged == theirs_logged
        assert held_out == theirs_held_out == pytest.approx(validated, abs=1e-5, rel=1e-5)
        for one, other in zip(logged, alone, strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
        assert runs.largest_difference(ours, weights) <= 1e-5
    role = "reward" if "reward" in name else "actor"
    # The second batch has other data, so its loss need not be lower; every step must change the weights.
    assert all(logged[f"{role}/grad_norm"] > 0 and logged[f"{role}/loss"] > 0 for logged in alone)


DATA = {"dpo": "pairs", "kto": "judged", "orpo": "pairs", "reward_model": "pairs", "process_reward": "steps"}


def learn(name: str) -> list[float]:
    """Return the losses of twelve epochs of one batch."""
    record, batches = runs.Record(), getattr(preferences, DATA[name])(1, size=8)
    trainer = runs.trainer(ReallocStrategy("heuristic"), 1, callbacks=[record], max_epochs=12)
    trainer.fit(getattr(preferences, name)(optimizer=partial(AdamW, lr=3e-3)), batches)
    role = "reward" if "reward" in name else "actor"
    return [logged[f"{role}/loss"] for logged in record.logged]


@pytest.mark.parametrize("name", matrix(DATA, "dpo"))
def test_the_loss_falls_over_epochs(name: str, workers: WorkerPool) -> None:
    (losses,) = workers.run(learn, name, world_size=1, init_process_group=False, deadline_s=60.0)
    # After twelve epochs a model has memorized one batch; KTO's loss saturates, and starts from a half.
    assert losses[-1] < (0.9 if name == "kto" else 0.7) * losses[0], losses
