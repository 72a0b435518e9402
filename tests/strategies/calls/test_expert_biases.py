"""Biases by which tokens choose experts follow the loads of each step, alike in every layout, mode and resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD
from transformers import PreTrainedModel

from lightning_realloc import TrainOptions
from lightning_realloc.runtime.model.choice_biases import choice_biases
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

RATE = 0.03
LEARNING_RATE = 0.3
PLANS = [
    (calls(actor_train="dp2@1-2", actor_generate="pp2.dp2"), {"overlap": "none"}),
    (calls(actor_train="pp2.fsdp2", actor_generate="dp4"), {}),
    (calls(actor_train="dp1@3", actor_generate="dp3@0-2"), {"max_staleness": 2}),
]


def _mixture(family: str) -> PreTrainedModel:
    """Return a model with a router in each block, so in each pipeline stage."""
    return tiny_model(family, first_k_dense_replace=0)


def _options(**settings: Any) -> TrainOptions:
    return TrainOptions(max_grad_norm=None, router_bias_update_rate=RATE, **settings)


def _final_biases(strategy: ReallocStrategy, module: Any) -> list[Tensor]:
    """Return the biases that this rank would save."""
    strategy.pool.sync_biases()
    return [bias.clone() for bias in choice_biases(module.actor)]


def _supervised(family: str) -> tuple[Outcome, list[Tensor]]:
    options = _options(micro_batch_tokens=24)
    module = runs.sft(actor=_mixture(family), optimizer=partial(SGD, lr=LEARNING_RATE), train_options=options)
    strategy = ReallocStrategy("static")
    outcome = runs.train(module, strategy, runs.world_size(), Batches(3, size=7, responses=True))
    return outcome, _final_biases(strategy, module)


def _policies(cases: Sequence[tuple[Any, Any]], family: str) -> list[tuple[Outcome, list[Tensor]]]:
    world_size, found = runs.world_size(), []
    for plan, settings in cases:
        options = _options(num_minibatches=2, micro_batch_tokens=24 if world_size > 1 else None)
        module = runs.grpo(
            actor=_mixture(family), kl_coef=0.0, optimizer=partial(SGD, lr=LEARNING_RATE), train_options=options
        )
        strategy = ReallocStrategy(plan if world_size > 1 else "static", **settings)
        outcome = runs.train(module, strategy, world_size, Batches(3, size=5))
        found.append((outcome, _final_biases(strategy, module)))
    return found


def _resumed(folder: str, *, stops: bool) -> tuple[Outcome, list[Tensor]]:
    """Train two epochs on the last rank, in one run or with a checkpoint between them."""
    world_size, found = runs.world_size(), None
    plan = calls(actor_train="dp1@1", actor_generate="dp2")
    for epochs in (1, 2) if stops else (2,):
        module = runs.grpo(actor=_mixture("glm4_moe"), kl_coef=0.0, train_options=_options())
        strategy, record = ReallocStrategy(plan), runs.Record()
        trainer = runs.trainer(strategy, world_size, max_epochs=epochs, callbacks=[record])
        trainer.fit(module, Batches(1), ckpt_path=f"{folder}/last.ckpt" if epochs == 2 and stops else None)
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        weights = strategy.full_weights("actor")
        found = Outcome(record.logged[-1:], record.steps[-1:], weights), _final_biases(strategy, module)
    assert found is not None
    return found


def _naive_step(model: PreTrainedModel, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    """Take a supervised step of transformers' padded model, and update its biases in loops over tokens."""
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    mask, ids = (pad_sequence(part, batch_first=True) for part in ([torch.ones_like(row) for row in rows], rows))
    labels = ids.where(mask.bool(), -100)
    for row, prompt in zip(labels, prompts, strict=True):
        row[: len(prompt)] = -100
    routers, seen = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")], {}
    handles = [m.register_forward_hook(lambda m, _, output: seen.update({m: output[2]})) for m in routers]
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for handle in handles:
        handle.remove()
    SGD(model.parameters(), lr=LEARNING_RATE).step()
    model.zero_grad()
    for router in routers:
        loads = [0] * router.num_experts
        for chosen, counts in zip(seen[router].tolist(), mask.flatten().tolist(), strict=True):
            for expert in chosen:
                loads[expert] += counts
        mean = sum(loads) / len(loads)
        for expert, load in enumerate(loads):
            router.e_score_correction_bias[expert] += RATE * ((load < mean) - (load > mean))


@pytest.mark.parametrize("family", matrix(["deepseek_v3", "glm4_moe"], "deepseek_v3"))
def test_every_step_moves_biases_against_the_loads_of_all_its_tokens(workers: WorkerPool, family: str) -> None:
    ((outcome, biases),) = workers.run(_supervised, family, world_size=1, init_process_group=False)
    model = _mixture(family)
    for batch in Batches(3, size=7, responses=True):
        _naive_step(model, *(batch.ragged(name).split() for name in ("prompt_ids", "response_ids")))
    torch.testing.assert_close(biases, choice_biases(model))
    assert all(bias.any() for bias in biases)
    assert runs.largest_difference(outcome.weights, dict(model.named_parameters())) <= 1e-5


@pytest.mark.parametrize(
    ("family", "number"),
    matrix([(family, n) for family in ("deepseek_v3", "glm4_moe") for n in range(len(PLANS))],
           ("deepseek_v3", 2)),
)  # fmt: skip
def test_rollouts_and_ranks_see_the_biases_of_one_rank(workers: WorkerPool, family: str, number: int) -> None:
    cases = PLANS[number : number + 1]
    (alone,) = workers.run(_policies, cases, family, world_size=1, init_process_group=False)
    everyone = workers.run(_policies, cases, family, init_process_group=False, deadline_s=150.0)
    for found in zip(*everyone, strict=True):
        (reference, expected), outcomes = alone[0], [outcome for outcome, _ in found]
        runs.check_equal_to_one_rank(outcomes, reference)
        for _, biases in found:
            torch.testing.assert_close(biases, expected, rtol=0, atol=0)


@pytest.mark.exhaustive  # buffers of other models: tests/strategies/checkpoints
def test_a_resumed_run_has_the_same_biases(workers: WorkerPool, tmp_path: Path) -> None:
    whole, resumed = (
        workers.run(partial(_resumed, stops=stops), str(tmp_path), world_size=2, init_process_group=False)
        for stops in (False, True)
    )
    for (ours, biases), (theirs, expected) in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, biases, expected)) and ours.logged == theirs.logged
        assert all(ours.weights[name].equal(weight) for name, weight in theirs.weights.items())
