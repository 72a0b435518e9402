"""Under bf16-mixed frozen weights are stored in bfloat16, and trained ones in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import few_and_more, matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA, ChangeOfPlan, adapted_grpo
from tests.strategies.runs import calls
from tests.workers import WorkerPool

PLANS = (
    calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2"),
    calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="dp2"),
    calls(actor_train="pp2", actor_generate="dp1@1", reference_infer="tp2"),
)
SIZES = {"vocab_size": 256, "hidden_size": 64}


def fine_tune(homes: Sequence[str], precision: str) -> list[tuple[list[float], dict[str, int], dict[str, Tensor]]]:
    """Train adapters with SFT in each layout; return losses, this rank's bytes by dtype, and all weights."""
    found, world_size = [], runs.world_size()
    for home in homes:
        record, strategy = runs.Record(), ReallocStrategy(calls(actor_train=home))
        trainer = runs.trainer(strategy, world_size, precision=precision, callbacks=[record])
        module = runs.sft(actor=tiny_model("qwen3", **SIZES), peft_config=LORA, optimizer=partial(SGD, lr=0.05))
        trainer.fit(module, runs.Batches(4, responses=True))
        held: dict[str, int] = {}
        for tensor in local_tensors(strategy.pool.home("actor").model).values():
            name = str(tensor.dtype).removeprefix("torch.")
            held[name] = held.get(name, 0) + tensor.nbytes
        found.append(([logged["actor/loss"] for logged in record.logged], held, strategy.full_weights("actor")))
    return found


def _distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference between adapters."""
    return math.hypot(*(float((ours[name] - theirs[name]).norm()) for name in theirs if "lora_" in name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("homes", matrix(["fsdp2", "dp2", "tp2 pp2"], "fsdp2"))
def test_a_base_takes_half_the_bytes_and_losses_are_close_to_fp32(workers: WorkerPool, homes: str) -> None:
    ((expected, whole, weights),) = workers.run(fine_tune, ("dp1",), "32-true", world_size=1, init_process_group=False)[
        0
    ]
    ((alone, half, _),) = workers.run(fine_tune, ("dp1",), "bf16-mixed", world_size=1, init_process_group=False)[0]
    begun = Role(name="actor", source=tiny_model("qwen3", **SIZES), trained=True, peft=LORA).build(seed=0).state_dict()
    adapters = sum(4 * weight.numel() for name, weight in weights.items() if "lora_" in name)
    assert half == {"bfloat16": (whole["float32"] - adapters) // 2, "float32": adapters}
    everyone: Any = workers.run(
        fine_tune, homes.split(), "bf16-mixed", world_size=2, init_process_group=False, deadline_s=150.0
    )
    for at, home in enumerate(homes.split()):
        losses, _, ours = everyone[0][at]
        assert losses == pytest.approx(expected, abs=2e-2), home
        assert _distance(ours, weights) < 0.2 * _distance(begun, weights), home
        parts = [rank[at][1] for rank in everyone]
        if home in ("fsdp2", "pp2"):  # every weight is on one rank; shards may be padded
            assert {name: sum(part[name] for part in parts) for name in half} == pytest.approx(half, rel=0.02)
        for name, weight in ours.items():
            assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
            plain = tiny_model("qwen3", **SIZES).state_dict().get(name.replace(".base_layer", ""))
            assert plain is None or torch.equal(weight, plain.bfloat16())
    assert alone == pytest.approx(expected, abs=2e-2)


def explore(plans: tuple[Any, ...]) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    """Run GRPO with adapters in mixed precision under each plan, and with a change from the first to the last plan."""
    found, world_size = [], runs.world_size()
    for plan, callbacks in [*((plan, []) for plan in plans), (plans[0], [ChangeOfPlan(plans[-1])])]:
        outcome = runs.train(
            adapted_grpo(), ReallocStrategy(plan), world_size, runs.Batches(2), precision="bf16-mixed",
            callbacks=callbacks,
        )  # fmt: skip
        found.append((outcome.logged, outcome.weights))
    return found


@few_and_more((PLANS[0], PLANS[2]), PLANS)
def test_reference_and_generation_use_a_base_in_bf16(workers: WorkerPool, cases: list[Any]) -> None:
    together: Any = workers.run(explore, tuple(cases), world_size=2, init_process_group=False, deadline_s=150.0)
    base = tiny_model("qwen3").state_dict()
    for logged, weights in together[0]:
        assert len(logged) == 2
        # Merged adapters generate and separate ones train: one policy, up to the rounding of bf16.
        assert logged[0]["actor/kl"] > 1e-3
        assert all(math.isfinite(value) for values in logged for value in values.values())
        rounded = weights["model.layers.0.mlp.down_proj.base_layer.weight"]
        assert torch.equal(rounded, base["model.layers.0.mlp.down_proj.weight"].bfloat16())
    (changed, weights), (first, _) = together[0][-1], together[0][0]
    assert changed[0] == first[0]  # the plan changes after it
    assert weights["model.layers.0.mlp.down_proj.lora_A.default.weight"].dtype == torch.float32


def criticise() -> list[list[dict[str, float]]]:
    """Run PPO in mixed precision, with adapters and float32 heads, and with full models whose embeddings are frozen."""
    found, world_size = [], runs.world_size()
    partly = tiny_model("llama")
    partly.get_input_embeddings().requires_grad_(False)
    for settings in ({"peft_config": LORA}, {"actor": partly}):
        module = runs.ppo(learning_rate=1e-3, **settings)
        plan = {call.name: f"dp{world_size}" for call in module.dataflow.model_calls}
        strategy, record = ReallocStrategy({"calls": plan}), runs.Record()
        runs.trainer(strategy, world_size, precision="bf16-mixed", callbacks=[record]).fit(module, runs.Batches(2))
        found.append(record.logged)
    return found


@pytest.mark.parametrize("world_size", matrix([1, 2]))
def test_heads_in_fp32_train_on_top_of_frozen_weights_in_bf16(workers: WorkerPool, world_size: int) -> None:
    together: Any = workers.run(criticise, world_size=world_size, init_process_group=False, deadline_s=120.0)
    for logged in together[0]:
        assert len(logged) == 2
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert all(0 < values[name] < 1e3 for values in logged), name
