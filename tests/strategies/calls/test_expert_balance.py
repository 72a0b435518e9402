"""The loss that balances experts is transformers' own over the tokens of a step, in every layout."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD
from transformers import PreTrainedModel

from lightning_realloc import GenerationOptions, TrainOptions
from lightning_realloc.batch.samples import Samples
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

COEFFICIENT = 2.0
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
RATE = 0.5
PLANS = [
    calls(actor_train="pp2.fsdp2", actor_generate="dp4"),
    calls(actor_train="fsdp2.cp2.ep2", actor_generate="dp4"),
    calls(actor_train="dp2.fsdp2.ep4", actor_generate="pp2.dp2"),
    calls(actor_train="pp2.dp2.ep2", actor_generate="dp4"),
    calls(actor_train="dp4", actor_generate="fsdp4"),
    calls(actor_train="cp4", actor_generate="dp4"),
    calls(actor_train="fsdp2.tp2", actor_generate="dp4"),
]


def _mixture(family: str, **settings: Any) -> PreTrainedModel:
    """Return a model whose routers prefer some experts, so that their balance has a gradient."""
    model = tiny_model(family, router_aux_loss_coef=COEFFICIENT, **settings)
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(3))
    return model


def _options(**settings: Any) -> TrainOptions:
    return TrainOptions(max_grad_norm=None, **settings)


def _supervised(plan: Any, family: str, batches: int, options: TrainOptions, world_size: int) -> Outcome:
    model = _mixture(family, output_router_logits=True)
    module = runs.sft(actor=model, optimizer=partial(SGD, lr=RATE), train_options=options)
    plan = plan if world_size == 1 else {"calls": {"actor.train": plan["calls"]["actor.train"]}}
    return runs.train(module, plan, world_size, Batches(batches, size=7, responses=True))


def _policy(plan: Any, family: str, batches: int, options: TrainOptions, world_size: int) -> Outcome:
    module = runs.grpo(
        actor=_mixture(family), kl_coef=0.0, optimizer=partial(SGD, lr=RATE), train_options=options,
        generation=GenerationOptions(router_replay=True),
    )  # fmt: skip
    return runs.train(module, plan, world_size, Batches(batches, size=5))


KINDS = {"supervised": _supervised, "by rewards": _policy}


def _train(kind: str, plan: Any, family: str, *, micro_batch_tokens: int | None) -> Outcome:
    options = TrainOptions(
        micro_batch_tokens=micro_batch_tokens, num_minibatches=2, router_aux_loss_coef=COEFFICIENT, max_grad_norm=0.2
    )
    return KINDS[kind](plan, family, 2, options, runs.world_size())


def _transformers(model: PreTrainedModel, batch: Samples) -> tuple[Any, Tensor]:
    """Return the padded forward pass of transformers with router logits, and the mask of response tokens."""
    prompts, responses = (batch.ragged(name).split() for name in ("prompt_ids", "response_ids"))
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True)
    labels = ids.where(mask.bool(), -100)
    for row, prompt in zip(labels, prompts, strict=True):
        row[: len(prompt)] = -100
    return model(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True), labels


@pytest.mark.parametrize("family", matrix(FAMILIES, "mixtral"))
def test_a_supervised_step_is_that_of_transformers_with_its_loss(workers: WorkerPool, family: str) -> None:
    options = _options(micro_batch_tokens=10_000)
    (ours,) = workers.run(_supervised, "static", family, 1, options, 1, world_size=1, init_process_group=False)
    model = _mixture(family, output_router_logits=True)
    output, _ = _transformers(model, next(iter(Batches(1, size=7, responses=True))))
    output.loss.backward()  # the mean over labels, and the weighted balance
    SGD(model.parameters(), lr=RATE).step()
    assert output.aux_loss > 1.01 * model.config.num_experts_per_tok, "experts are used unevenly"
    assert ours.logged[0]["actor/expert_balance_loss"] == pytest.approx(output.aux_loss.item(), abs=1e-5)
    assert ours.logged[0]["actor/loss"] == pytest.approx(output.loss.item(), abs=1e-5)
    assert runs.largest_difference(ours.weights, dict(model.named_parameters())) <= 1e-5


def test_a_policy_s_step_adds_the_gradient_of_transformers_loss(workers: WorkerPool) -> None:
    plain, balanced = (
        workers.run(_policy, "static", "qwen3_moe", 1, _options(micro_batch_tokens=24, router_aux_loss_coef=weight),
                    1, world_size=1, init_process_group=False)[0]
        for weight in (None, COEFFICIENT)
    )  # fmt: skip
    assert plain.tokens == balanced.tokens and "actor/expert_balance_loss" not in plain.logged[0]
    prompts = [row for row in next(iter(Batches(1, size=5))).ragged("prompt_ids").split() for _ in range(2)]
    rows = [torch.cat([prompt, torch.tensor(tokens)]) for prompt, tokens in zip(prompts, plain.tokens[0], strict=True)]
    model, mask = _mixture("qwen3_moe"), pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    loss = model(
        input_ids=pad_sequence(rows, batch_first=True), attention_mask=mask, output_router_logits=True
    ).aux_loss
    loss.backward()
    for name, parameter in model.named_parameters():
        added = (plain.weights[name] - balanced.weights[name]) / RATE
        expected = torch.zeros_like(parameter) if parameter.grad is None else COEFFICIENT * parameter.grad
        torch.testing.assert_close(added, expected, atol=1e-5, rtol=0)
    assert balanced.logged[0]["actor/expert_balance_loss"] == pytest.approx(loss.item(), abs=1e-5)
    excess = balanced.logged[0]["actor/loss"] - plain.logged[0]["actor/loss"]
    assert excess == pytest.approx(COEFFICIENT * loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "family", "number"),
    # By rewards, on one rank: above. Both kinds compute the loss in the same training call.
    matrix(product(KINDS, FAMILIES, range(len(PLANS))), ("supervised", "qwen3_moe", 1)),
)
def test_every_layout_trains_as_one_micro_batch_on_one_rank(
    workers: WorkerPool, kind: str, family: str, number: int
) -> None:
    whole, small = (partial(_train, kind, micro_batch_tokens=tokens) for tokens in (10_000, 24))
    (alone,) = workers.run(whole, "static", family, world_size=1, init_process_group=False)
    everyone = workers.run(small, PLANS[number], family, init_process_group=False, deadline_s=150.0)
    runs.check_equal_to_one_rank(everyone, alone)
