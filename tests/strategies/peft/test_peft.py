"""Adapters train under every plan as on one device, and their base moves once and is stored once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import ParameterReallocation
from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.model.adapter_layers import merge_permanently
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.pool.replica import refuse_thawed
from tests.devices import CPU_ALONE
from tests.matrices import few_and_more, matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA, ChangeOfPlan, adapted_grpo, train, train_checked, train_ppo
from tests.strategies.runs import calls
from tests.workers import WorkerPool

PLANS = [
    calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2"),
    calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="dp2"),
    calls(actor_train="tp2", actor_generate="dp1@1", reference_infer="fsdp2"),
]
"""Other kinds of adapters train in a pipeline, too."""


@few_and_more([(PLANS[0], False), (PLANS[1], True)], [(PLANS[2], True)])
def test_adapters_train_the_same_under_every_plan(workers: WorkerPool, cases: list[tuple[Any, bool]]) -> None:
    alone: Any = workers.run(train, ["heuristic"], {}, 2, world_size=1, init_process_group=False, deadline_s=90.0)
    plans = [plan for plan, _ in cases]
    together: Any = workers.run(train, plans, {}, 2, world_size=2, init_process_group=False, deadline_s=150.0)
    ((expected, moved),) = alone[0]
    assert not moved
    assert expected.logged[0]["actor/kl"] > 1e-3  # the adapters have an effect from the beginning
    adapters = sum(4 * weight.numel() for name, weight in expected.weights.items() if "lora_" in name)
    everything = sum(4 * weight.numel() for weight in expected.weights.values())
    for (outcome, moved), (_, base_moves) in zip(together[0], cases, strict=True):
        assert outcome.tokens == expected.tokens
        for ours, theirs in zip(outcome.logged, expected.logged, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-4)
        assert runs.largest_difference(outcome.weights, expected.weights) <= 1e-5
        first = sum(size for iteration, _, size in moved if iteration == 0)
        assert (first > everything / 2) == base_moves
        sizes = {call: size for iteration, call, size in moved if iteration == 1}
        assert sizes.keys() == ({"actor.generate"} if base_moves else set())
        assert sum(sizes.values()) <= adapters


@pytest.mark.exhaustive  # DoRA: test_peft_files.py
@pytest.mark.parametrize("kind", matrix(["use_rslora", "use_dora", "use_rslora use_dora"], "use_rslora use_dora"))
def test_other_kinds_of_adapters_train_the_same_under_every_plan(workers: WorkerPool, kind: str) -> None:
    settings = {"peft_config": {**LORA, **dict.fromkeys(kind.split(), True)}}
    plans = [
        calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="fsdp2"),
        calls(actor_train="pp2", actor_generate="dp1@1", reference_infer="dp2"),
    ]
    ((expected, _),) = workers.run(train, ["heuristic"], settings, 2, world_size=1, init_process_group=False)[0]
    together: Any = workers.run(train, plans, settings, 2, world_size=2, init_process_group=False, deadline_s=120.0)
    for outcome, _ in together[0]:
        assert outcome.tokens == expected.tokens
        assert runs.largest_difference(outcome.weights, expected.weights) <= 2e-5


@CPU_ALONE
def test_reference_and_generation_have_the_expected_outputs(workers: WorkerPool) -> None:
    plan = calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp1@1")
    other = calls(actor_train="fsdp2", actor_generate="dp1@0", reference_infer="dp2")
    callbacks = [ChangeOfPlan(other), ParameterReallocation(free_after=True)]
    found: Any = workers.run(train_checked, plan, callbacks, world_size=2, init_process_group=False, deadline_s=120.0)
    alone: Any = workers.run(train_checked, "heuristic", [], world_size=1, init_process_group=False)
    assert runs.largest_difference(found[0][0].weights, alone[0][0].weights) <= 1e-5
    for _, off_by, roles in (*found, *alone):
        assert roles == ("actor",)  # there is one model
        for differences in off_by.values():
            assert differences and max(differences) <= 1e-5
    # The policy and the reference differ.
    assert min(logged["actor/kl"] for logged in alone[0][0].logged) > 1e-3


@pytest.mark.parametrize("number", matrix([0, 1]))  # PPO on one rank: test_peft_algorithms.py
def test_an_actor_and_a_critic_train_adapters(workers: WorkerPool, number: int) -> None:
    plans = [
        calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2", critic_infer="tp2", critic_train="dp2"),
        calls(actor_train="dp1@0", actor_generate="dp1@0", reference_infer="dp1@1", critic_infer="dp1@1",
              critic_train="dp1@1"),
    ]  # fmt: skip
    (expected,) = workers.run(train_ppo, ["heuristic"], world_size=1, init_process_group=False, deadline_s=90.0)[0]
    assert any("lora_" in name for name in expected.weights)
    together: Any = workers.run(train_ppo, plans[number : number + 1], world_size=2, init_process_group=False)
    (outcome,) = together[0]
    assert outcome.tokens == expected.tokens
    assert runs.largest_difference(outcome.weights, expected.weights) <= 2e-5


def _losses_of_sft() -> list[float]:
    module = runs.sft(
        actor=tiny_model("qwen3"), optimizer=far_steps, peft_config=LORA, train_options=runs.options(max_grad_norm=None)
    )
    outcome = runs.train(module, "heuristic", 1, runs.Batches(4, responses=True))
    return [logged["actor/loss"] for logged in outcome.logged]


def far_steps(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with large steps."""
    return torch.optim.SGD(parameters, lr=1.0)


def test_losses_equal_those_of_peft_and_of_merged_weights(workers: WorkerPool) -> None:
    (losses,) = workers.run(_losses_of_sft, world_size=1, init_process_group=False, deadline_s=90.0)
    options = {name: value for name, value in LORA.items() if name != "peft_type"}
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(**options))
    begun = Role(name="actor", source=tiny_model("qwen3"), trained=True, peft=LORA).build(seed=0)
    model.base_model.model.load_state_dict(begun.state_dict())
    optimizer = far_steps([parameter for parameter in model.parameters() if parameter.requires_grad])
    for loss, batch in zip(losses, runs.Batches(4, responses=True), strict=True):
        rows = zip(batch.ragged("prompt_ids").split(), batch.ragged("response_ids").split(), strict=True)
        pairs = [(torch.cat((prompt, response)), len(prompt)) for prompt, response in rows]
        merged = merge_permanently(Role(name="judge", source=model, trained=False).build(seed=0))
        for computed in (merged, model):
            nll = [-computed(input_ids=ids[None]).logits[0, length - 1 : -1].log_softmax(-1)
                   .gather(1, ids[length:, None]) for ids, length in pairs]  # fmt: skip
            mean = torch.cat(nll).mean()
            assert mean.item() == pytest.approx(loss, abs=1e-5)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert runs.largest_difference(model.base_model.model.state_dict(), begun.state_dict()) > 0.01


class Sharing(runs.RecordedGRPO):
    """GRPO whose reference shares the base of an actor that is trained without adapters."""

    def roles(self) -> tuple[Role, ...]:
        """Return GRPO's roles with another reference."""
        actor, reference = super().roles()
        return actor, replace(reference, shares="actor")


def _refused() -> str:
    with pytest.raises(PlanError) as caught:
        runs.trainer(ReallocStrategy("heuristic"), 1).fit(
            adapted_grpo(module_class=Sharing, peft_config=None), runs.Batches(1)
        )
    return str(caught.value)


def test_a_base_is_shared_only_with_a_role_that_has_adapters(workers: WorkerPool) -> None:
    (message,) = workers.run(_refused, world_size=1, init_process_group=False)
    assert message == (
        "role 'reference' shares the base of 'actor', which is no role with adapters; give actor a peft_config, or "
        "reference a model of its own"
    )


def test_a_parameter_that_is_unfrozen_during_training_is_refused() -> None:
    model = tiny_model("llama")
    refuse_thawed("actor", model, frozenset())
    with pytest.raises(
        PlanError, match=r"actor parameter model\.norm\.weight was frozen when actor was laid out and is"
    ):
        refuse_thawed("actor", model, frozenset({"model.norm.weight"}))


class Freezing(Callback):
    """Freezes the first block of the actor when training starts, and unfreezes it before an iteration."""

    def __init__(self, thaws_at: int) -> None:
        self.thaws_at = thaws_at

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Freeze the block."""
        first_block(pl_module.models()["actor"]).requires_grad_(False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Unfreeze the block."""
        if batch_idx == self.thaws_at:
            first_block(pl_module.models()["actor"]).requires_grad_(True)


def first_block(model: Any) -> nn.Module:
    """Return the first transformer block."""
    block: nn.Module = model.model.layers[0]
    return block


def frozen_early_and_late() -> list[runs.Outcome]:
    """Freeze the first block before a run, in a run, and for a run's first iteration."""
    frozen = tiny_model("llama")
    first_block(frozen).requires_grad_(False)
    plan = calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="dp2")
    return [
        runs.train(runs.grpo(actor=actor), plan, 2, runs.Batches(2), callbacks=callbacks)
        for actor, callbacks in ((frozen, []), (None, [Freezing(9)]), (None, [Freezing(1)]))
    ]


def test_parameters_may_be_frozen_in_training_and_unfrozen_again(workers: WorkerPool) -> None:
    (early, late, thawed), _ = workers.run(frozen_early_and_late, world_size=2, init_process_group=False)
    assert late.tokens == early.tokens
    assert runs.largest_difference(late.weights, early.weights) == 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(late.weights[name], tiny_model("llama").get_parameter(name))
    assert not torch.equal(thawed.weights[name], late.weights[name])
