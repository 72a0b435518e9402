"""GRPO's loss compared with a loop over sequences, group advantages by hand, and runs without a reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc import GenerationOptions
from lightning_realloc.algorithms.losses.functional import ClippedLoss
from lightning_realloc.algorithms.losses.policy_losses import Clip
from lightning_realloc.algorithms.remax import ReMax
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, TrainOptions, pack_columns
from lightning_realloc.errors import ConfigError, PlanError, RewardError
from lightning_realloc.generation import RolloutBudget
from tests.models import tiny_model
from tests.strategies import runs

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [8]]
RESPONSES = [[11, 12], [13, 14, 15, 2], [20], [100, 2]]
REWARDS = [1.0, 0.0, 0.5, 0.5]
CPU = torch.device("cpu")


def rollout() -> Samples:
    """Return two groups of two responses, with the columns that a training call needs."""
    generator = torch.Generator().manual_seed(3)
    responses = Ragged.from_list(RESPONSES)
    around = Ragged(torch.randn(responses.num_tokens, generator=generator) - 4.8, responses.lengths)
    reference = Ragged(torch.randn(responses.num_tokens, generator=generator) - 4.8, responses.lengths)
    return Samples(
        torch.arange(4),
        {
            "prompt_ids": Ragged.from_list(PROMPTS),
            "response_ids": responses,
            "behaviour_logprobs": around,
            "ref_logprobs": reference,
            "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0]),
            "prompt_id": torch.tensor([0, 0, 1, 1]),
            "prompt": ("first", "first", "second", "second"),
        },
    )


def response_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Return the response tokens' log-probabilities by a plain forward pass."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def naive_loss(model: Any, samples: Samples, *, average: str, kl_coef: float, temperature: float) -> Tensor:
    """Return the loss of the whole batch, one token at a time."""
    columns = [samples.ragged(name).to_lists() for name in ("behaviour_logprobs", "ref_logprobs")]
    advantages = samples.tensor("advantages").tolist()
    by_sequence = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        values = []
        for position, now in enumerate(response_logprobs(model, prompt, response, temperature)):
            before, reference = columns[0][row][position], columns[1][row][position]
            ratio = (now - before).exp()
            surrogate = torch.min(ratio * advantages[row], ratio.clamp(0.8, 1.3) * advantages[row])
            apart = now - reference
            values.append(-surrogate + kl_coef * ((-apart).exp() - 1 + apart))
        by_sequence.append(torch.stack(values))
    if average == "token":
        return torch.cat(by_sequence).mean()
    return torch.stack([values.mean() for values in by_sequence]).mean()


@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_and_its_gradient_are_those_of_a_loop_over_tokens(average: str, temperature: float) -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    sampling = runs.SamplingParams(n=2, temperature=temperature)
    module = runs.grpo(actor=model, sampling=sampling, kl_coef=0.1, policy_loss=Clip(high=0.3), loss_average=average)
    samples, totals = rollout(), Totals(4, 9)
    parts = [module.actor_loss(model, pack_columns(samples.select(rows), CPU), totals) for rows in ([0, 3], [1, 2])]
    loss = parts[0].value + parts[1].value
    loss.backward()
    expected = naive_loss(reference, samples, average=average, kl_coef=0.1, temperature=temperature)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=2e-6)


def loss_and_gradient(module: Any, model: Any, samples: Samples) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of all samples in one pack, and the gradient of every weight."""
    model.zero_grad()
    loss = module.actor_loss(model, pack_columns(samples, CPU), Totals(4, 9))
    loss.value.backward()
    return loss.value.detach(), [parameter.grad.clone() for parameter in model.parameters()]


class Linear(runs.RecordedGRPO):
    """GRPO with an unclipped loss that is linear in the ratio."""

    def token_losses(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return minus the ratio times the advantage."""
        ratio = (logprobs - before).exp()
        return ClippedLoss(-ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool))


def test_a_subclass_replaces_the_formula_of_the_policy_loss() -> None:
    model, batch = tiny_model("llama"), pack_columns(rollout(), CPU)
    unclipped = runs.grpo(policy_loss=Clip(low=9.0, high=1e9))
    own = Linear(model, fixed, sampling=runs.SAMPLING, kl_coef=0.04, loss_average="sequence")
    ours, theirs = (module.actor_loss(model, batch, Totals(4, 9)) for module in (own, unclipped))
    assert ours.value.item() == pytest.approx(theirs.value.item(), rel=1e-5)
    assert ours.metrics.keys() == theirs.metrics.keys()


@pytest.mark.parametrize(
    ("advantages", "found"),
    [(torch.zeros(2), r"shape \(2,\)"), (torch.zeros(4, 1), r"shape \(4, 1\)"), ([0.0] * 4, "a list")],
)
def test_advantages_of_another_shape_are_refused(advantages: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs.grpo(reward=fixed), ReMax(tiny_model("llama"), fixed)):
        monkeypatch.setattr(module, "advantages", lambda rewards, samples: advantages)
        samples = rollout().with_columns(rewards=torch.tensor(REWARDS))
        with pytest.raises(PlanError, match=rf"one value per response, of shape \(4,\).*; it returned .*{found}"):
            module.compare(samples)


def test_token_losses_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = runs.grpo(), pack_columns(rollout(), CPU)
    for made, message in (
        (torch.zeros(batch.num_tokens), "must return a ClippedLoss .* it returned a Tensor: write ClippedLoss"),
        (ClippedLoss(torch.zeros(()), torch.zeros(())), r"one value per token, of shape \(\d+,\); .* of shape \(\)"),
    ):
        monkeypatch.setattr(module, "token_losses", lambda *args, made=made: made)
        with pytest.raises(PlanError, match=message):
            module.actor_loss(tiny_model("llama"), batch, Totals(4, 9))


def test_in_one_step_proximal_ratios_are_1_for_any_recorded_logprobs() -> None:
    model, samples = tiny_model("llama"), rollout()
    now = [response_logprobs(model, p, r, 1.0).detach() for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    exact = samples.with_columns(behaviour_logprobs=Ragged.from_list(now))
    expected = loss_and_gradient(runs.grpo(actor=model), model, exact)
    module = runs.grpo(actor=model, ratio_to="proximal")
    loss, gradients = loss_and_gradient(module, model, samples)
    assert torch.allclose(loss, expected[0], atol=1e-6)
    assert all(torch.allclose(*pair, atol=2e-6) for pair in zip(gradients, expected[1], strict=True))
    _, others = loss_and_gradient(module, model, exact)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))
    assert [call.name for call in module.dataflow.calls] == [call.name for call in runs.grpo().dataflow.calls]


def test_over_several_steps_ratios_are_to_the_logprobs_before_the_first() -> None:
    model, samples = tiny_model("llama"), rollout()
    several = {"train_options": TrainOptions(num_epochs=2), "actor": model}
    module = runs.grpo(ratio_to="proximal", **several)
    call = module.dataflow.call("actor.infer")
    assert (call.kind, call.needs, call.produces) == ("infer", ("rollout",), ("proximal_logprobs",))
    assert "proximal_logprobs" in module.dataflow.call("actor.train").needs
    scored = getattr(module, call.method)(model, pack_columns(samples, CPU))
    now = torch.cat([response_logprobs(model, p, r, 1.0) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert torch.allclose(scored[pack_columns(samples, CPU).response_mask], now, atol=1e-5)
    expected = loss_and_gradient(runs.grpo(**several), model, samples)
    moved = samples.with_columns(
        proximal_logprobs=samples["behaviour_logprobs"], behaviour_logprobs=samples["ref_logprobs"]
    )
    loss, gradients = loss_and_gradient(module, model, moved)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(*pair) for pair in zip(gradients, expected[1], strict=True))


def test_clipped_tokens_and_divergence_are_measured() -> None:
    model = tiny_model("llama")
    module = runs.grpo(actor=model, kl_coef=0.1)
    loss = module.actor_loss(model, pack_columns(rollout(), CPU), Totals(4, 9))
    with torch.no_grad():
        now = torch.cat([response_logprobs(model, p, r, 1.0) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    samples = rollout()
    ratio = (now - samples.ragged("behaviour_logprobs").values).exp()
    advantages = torch.repeat_interleave(samples.tensor("advantages"), samples.ragged("response_ids").lengths)
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    fraction = loss.metrics["clip_fraction"]
    assert 0 < int(clipped.sum()) < 9
    assert (float(fraction.total), float(fraction.weight)) == (float(clipped.sum()), 9.0)
    apart = now - samples.ragged("ref_logprobs").values
    kl = loss.metrics["kl"]
    assert (kl.total / kl.weight).item() == pytest.approx((torch.expm1(-apart) + apart).mean().item(), abs=1e-4)


def test_without_divergence_there_is_no_reference() -> None:
    module = runs.grpo(kl_coef=0.0)
    assert [role.name for role in module.roles()] == ["actor"]
    assert [call.name for call in module.dataflow.calls] == ["actor.generate", "judge", "compare", "actor.train"]
    assert module.dataflow.call("actor.train").needs == ("rollout", "advantages")
    loss = module.actor_loss(
        tiny_model("llama"), pack_columns(rollout().without_columns("ref_logprobs"), CPU), Totals(4, 9)
    )
    assert "kl" not in loss.metrics
    module.kl = replace(module.kl, coef=0.1)
    assert [role.name for role in module.roles()] == list(module.dataflow.roles) == ["actor", "reference"]


def fixed(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the reward that the test assigns to each response."""
    return [REWARDS[RESPONSES.index(ids)] for ids in completion_ids]


def half(completions: list[str], **columns: Any) -> list[float]:
    """Give every completion the same reward."""
    return [0.5] * len(completions)


def judged(module: Any) -> dict[str, Any]:
    """Return the columns of judging and comparing the rollout."""
    columns = module.judge(rollout())
    return {**columns, **module.compare(rollout().with_columns(**columns))}


def test_rewards_and_group_advantages_are_those_computed_by_hand() -> None:
    found = judged(runs.grpo(reward=fixed))
    assert found["rewards"].tolist() == REWARDS
    # Group 1: mean 1/2, standard deviation sqrt(1/2); group 2: equal rewards, no advantage.
    scale = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert found["advantages"].tolist() == pytest.approx([scale, -scale, 0.0, 0.0], abs=1e-6)
    assert set(found) == {"rewards", "advantages", "tokens"}
    plain = judged(runs.grpo(reward=fixed, advantages="group_mean"))
    assert plain["advantages"].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_several_reward_functions_are_weighted_and_logged_separately() -> None:
    module = runs.grpo(reward=[fixed, half], reward_weights=[2.0, 1.0])
    columns = module.judge(rollout())
    assert columns["rewards"].tolist() == [2.5, 0.5, 1.5, 1.5]
    samples = rollout().with_columns(**columns, finish_reason=torch.tensor([0, 1, 0, 0]))
    summary = {name: float(value) for name, value in module.summarize(samples).items()}
    lengths = rollout().ragged("response_ids").lengths.tolist()
    assert summary == pytest.approx({
        "reward": 1.5, "reward/fixed": 0.5, "reward/half": 0.5, "response_length": 2.25, "stopped/model": 0.75,
        "response_length/min": min(lengths), "response_length/max": max(lengths), "stopped/length": 0.25,
        # The squares of 1, -1, 0 and 0 over one less than four; the second group's rewards are equal.
        "reward_std": math.sqrt(2 / 3), "frac_reward_zero_std": 0.5,
    })  # fmt: skip


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="a group needs 2 or more responses to compare; set n >= 2"):
        runs.grpo(sampling=runs.SamplingParams(n=1))
    with pytest.raises(ConfigError, match=r"ratio_to='proximal' leaves out .* RolloutBudget\(tokens=9.* older weights"):
        runs.grpo(ratio_to="proximal", generation=GenerationOptions(rollout_budget=RolloutBudget(tokens=9)))
    with pytest.raises(ConfigError, match=r"temperature=0 gives every response of a group the same tokens"):
        runs.grpo(sampling=runs.SamplingParams(n=2, temperature=0.0))
    with pytest.raises(RewardError, match="cannot be imported"):
        runs.grpo(reward="no.such:function")
    for settings, name in (
        ({"loss_average": "group"}, "loss_average='group'"),
        ({"policy_loss": {"low": 0.1}}, r"policy_loss=\{'low': 0.1\} is a dict; write a name"),
        ({"ratio_level": "group"}, "ratio_level='group'"),
        ({"policy_loss": "vespo", "ratio_level": "sequence"}, "by itself; set ratio_level='token' in place of"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"ratio_to": "reference"}, "ratio_to='reference'"),
    ):
        with pytest.raises(ConfigError, match=name):
            runs.grpo(**settings)


def test_a_reference_that_reads_other_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="reference has another vocabulary than the actor: 256 tokens, the actor has"):
        runs.grpo(kl_coef=0.1, reference=tiny_model("llama", vocab_size=256)).configure_model()
    runs.grpo(kl_coef=0.0, reference=tiny_model("llama", vocab_size=256)).configure_model()  # it is not used


def test_held_out_prompts_get_one_greedy_response_by_default() -> None:
    assert runs.grpo().evaluation_sampling == replace(runs.SAMPLING, n=1, temperature=0.0)
    chosen = runs.SamplingParams(n=3)
    assert runs.grpo(evaluation_sampling=chosen).evaluation_sampling == chosen
