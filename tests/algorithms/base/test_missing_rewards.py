"""A response without a reward changes nothing: losses and advantages are those of the batch without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_realloc import GAE, GRPO, KL, PPO, RLOO, BestOfN, OnlineDPO, ReinforcePlusPlus, ReMax
from lightning_realloc.algorithms.base.missing_rewards import drop_unscored, estimate_scored
from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.errors import GenerationError
from lightning_realloc.rewards import Failed
from tests.algorithms import test_grpo, test_ppo
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs

CPU = torch.device("cpu")
NAN = math.nan


class SomeFail:
    """Reward as :func:`test_grpo.fixed` does, except that token 20 alone fails."""

    on_failure = "mask"

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float | Failed]:
        rewards = dict(zip(map(tuple, test_grpo.RESPONSES), test_grpo.REWARDS, strict=True))
        return [Failed("asleep") if ids == [20] else rewards[tuple(ids)] for ids in completion_ids]


def test_tokens_without_an_advantage_leave_the_mask_in_either_column_layout() -> None:
    samples = test_grpo.rollout().with_columns(advantages=torch.tensor([1.0, NAN, 0.5, NAN]))
    per_sample = drop_unscored(pack_columns(samples, CPU), "advantages")
    assert per_sample["advantages"].tolist() == [1.0, 0.0, 0.5, 0.0]
    # prompts of 3, 3, 1 and 1 tokens with responses of 2, 4, 1 and 2: those of samples 0 and 2 are left
    assert per_sample.response_mask.nonzero().flatten().tolist() == [3, 4, 13]
    lengths = samples.ragged("response_ids").lengths
    ragged = Ragged(torch.repeat_interleave(samples.tensor("advantages"), lengths), lengths)
    per_token = drop_unscored(pack_columns(samples.with_columns(advantages=ragged), CPU), "advantages")
    assert torch.equal(per_token.response_mask, per_sample.response_mask)
    assert not per_token["advantages"].isnan().any()


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_a_grpo_loss_is_that_of_the_scored_responses(average: Any) -> None:
    model = tiny_model("llama")
    module = runs.grpo(actor=model, kl_coef=0.1, loss_average=average)
    whole = test_grpo.rollout().with_columns(advantages=torch.tensor([1.0, -1.0, NAN, 2.0]))
    totals = Totals(4, 9)
    loss = module.actor_loss(model, pack_columns(whole, CPU), totals)
    loss.value.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    without = module.actor_loss(model, pack_columns(whole.select([0, 1, 3]), CPU), totals)
    without.value.backward()
    assert loss.value.item() == pytest.approx(without.value.item(), abs=1e-6)
    assert float(loss.metrics["kl"].weight) == 8.0
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-6)


def test_a_grpo_pack_without_any_score_has_gradients_of_zero() -> None:
    model = tiny_model("llama")
    module = runs.grpo(actor=model, kl_coef=0.1)
    nothing = test_grpo.rollout().with_columns(advantages=torch.full((4,), NAN))
    loss = module.actor_loss(model, pack_columns(nothing, CPU), Totals(4, 9))
    loss.value.backward()
    assert loss.value.item() == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_grpo_scores_the_rest_of_a_group_and_counts_failures() -> None:
    module = runs.grpo(reward=SomeFail())
    judged = module.judge(test_grpo.rollout())
    judged |= module.compare(test_grpo.rollout().with_columns(**judged))
    assert judged["rewards"].nan_to_num(nan=-1.0).tolist() == [1.0, 0.0, -1.0, 0.5]
    scale = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert judged["advantages"][[0, 1, 3]].tolist() == pytest.approx([scale, -scale, 0.0], abs=1e-6)
    samples = test_grpo.rollout().with_columns(**judged, finish_reason=torch.tensor([0, 1, 0, 0]))
    summary = {name: float(value) for name, value in module.summarize(samples).items()}
    assert summary["reward"] == pytest.approx(0.5)  # (1 + 0 + 0.5) / 3
    assert summary["reward_failures/SomeFail"] == 1.0


def never_of_the_failed(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Reward as :func:`test_grpo.fixed` does, without the second response."""
    rewards: list[float | None] = [1.0, None, 0.5, 0.5]
    return rewards


ENVIRONMENT_FAILED = FINISH_REASONS.index("failure")


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePlusPlus, ReMax, BestOfN, OnlineDPO, PPO])
def test_no_algorithm_rewards_a_response_whose_environment_failed(kind: type[Any]) -> None:
    module = kind(tiny_model("llama"), [never_of_the_failed, tiny_scorer("llama")], tokenizer=byte_tokenizer())
    failed = test_grpo.rollout().with_columns(finish_reason=torch.tensor([0, ENVIRONMENT_FAILED, 0, 0]))
    judged = module.judge(failed.with_columns(reward_scores=torch.ones(4)))
    assert judged[module.reward_column].nan_to_num(nan=-9.0).tolist() == [2.0, -9.0, 1.5, 1.5]
    assert judged["reward/reward"].isnan().tolist() == [False, True, False, False]


def test_a_failed_environment_leaves_its_response_out_of_the_group_and_the_mean() -> None:
    module = runs.grpo(reward=never_of_the_failed, environment=never_of_the_failed)
    reasons = torch.tensor([0, ENVIRONMENT_FAILED, 0, 0])
    failed = test_grpo.rollout().with_columns(finish_reason=reasons)
    failed = failed.with_columns(**module.judge(failed))
    failed = failed.with_columns(**module.compare(failed))
    assert failed.tensor("advantages").nan_to_num(nan=-9.0).tolist() == [0.0, -9.0, 0.0, 0.0]
    assert float(module.summarize(failed)["reward"]) == pytest.approx(2 / 3)
    nothing = test_grpo.rollout().with_columns(finish_reason=torch.full((4,), ENVIRONMENT_FAILED))
    nothing = nothing.with_columns(**module.judge(nothing))
    assert module.compare(nothing)["advantages"].isnan().all()
    for _ in range(2):
        module._require_answers(nothing)
    module._require_answers(failed)  # begins to count anew
    for _ in range(2):
        module._require_answers(nothing)
    with pytest.raises(GenerationError, match="the environment failed in every response of 3 rollouts in a row"):
        module._require_answers(nothing)


def test_ppo_leaves_failed_environments_out_of_the_scores_of_a_single_model() -> None:
    module = runs.ppo(kl_coef=0.1, advantages=GAE(normalize_values=True))
    failed = ppo_rollout([1.0, 8.0, -1.0]).with_columns(finish_reason=torch.tensor([0, ENVIRONMENT_FAILED, 0]))
    columns, expected = module.estimate_advantages(failed), module.estimate_advantages(ppo_rollout([1.0, NAN, -1.0]))
    for name in ("advantages", "returns"):
        assert torch.equal(columns[name].values.nan_to_num(nan=-9.0), expected[name].values.nan_to_num(nan=-9.0))
    failed = failed.with_columns(**columns)
    assert float(module.summarize(failed)["score"]) == 0.0
    module.on_iteration_end(failed)
    assert float(module.return_moments.count) == 3.0  # tokens of the first and the last response


def ppo_rollout(scores: list[float]) -> Samples:
    """Return PPO's three responses with these scores."""
    return test_ppo.rollout().without_columns("advantages", "returns").with_columns(scores=torch.tensor(scores))


def test_ppo_estimates_and_losses_are_those_of_the_scored_responses() -> None:
    module = runs.ppo(kl_coef=0.1, advantages=GAE(normalize_values=True))
    whole = ppo_rollout([1.0, NAN, -1.0])
    columns, without = (module.estimate_advantages(s) for s in (whole, ppo_rollout([1.0, 0.0, -1.0]).select([0, 2])))
    for name in ("advantages", "returns"):
        rows, expected = columns[name].to_lists(), without[name].to_lists()
        assert rows[0] == pytest.approx(expected[0], abs=1e-6) and rows[2] == pytest.approx(expected[1], abs=1e-6)
        assert len(rows[1]) == 4 and all(map(math.isnan, rows[1]))
    model = tiny_model("llama")
    whole = whole.with_columns(**columns)
    totals = Totals(3, 7)
    losses = [module.actor_loss(model, pack_columns(s, CPU), totals) for s in (whole, whole.select([0, 2]))]
    assert losses[0].value.item() == pytest.approx(losses[1].value.item(), abs=1e-6)
    module.configure_model()
    critic = module.critic.eval()
    errors = [module.critic_loss(critic, pack_columns(s, CPU), totals) for s in (whole, whole.select([0, 2]))]
    assert errors[0].value.item() == pytest.approx(errors[1].value.item(), abs=1e-6)
    module.on_iteration_end(whole)
    assert float(module.return_moments.count) == 3.0  # tokens of the first and the last response
    assert math.isfinite(float(module.kl_controller.coefficient))


def test_a_nan_from_the_critic_is_not_a_missing_score() -> None:
    module, whole = runs.ppo(kl_coef=0.1, advantages=GAE(normalize_values=True)), ppo_rollout([1.0, NAN, -1.0])
    values = whole.ragged("values")
    values.values[0] = NAN
    whole = whole.with_columns(**module.estimate_advantages(whole.with_columns(values=values)))
    for name in ("advantages", "returns"):
        assert [math.isnan(row[0]) for row in whole.ragged(name).to_lists()] == [False, True, False]
    loss = module.actor_loss(tiny_model("llama"), pack_columns(whole, CPU), Totals(3, 7))
    assert not math.isfinite(loss.value.item())
    module.on_iteration_end(whole)
    assert float(module.return_moments.count) == 0.0


def test_ppo_survives_an_iteration_without_any_score() -> None:
    module = runs.ppo(kl=KL(0.1, target=1.0), advantages=GAE(normalize_values=True))
    nothing = ppo_rollout([NAN, NAN, NAN])
    columns = module.estimate_advantages(nothing)
    assert columns["advantages"].values.isnan().all() and columns["returns"].lengths.tolist() == [2, 4, 1]
    before = float(module.kl_controller.coefficient)
    module.on_iteration_end(nothing.with_columns(**columns))
    assert float(module.kl_controller.coefficient) == before
    assert float(module.return_moments.count) == 0.0


def test_nothing_is_copied_where_every_response_has_a_score() -> None:
    samples = ppo_rollout([1.0, 2.0, 3.0])
    seen: list[Samples] = []
    estimate_scored(samples, samples.tensor("scores"), lambda given: seen.append(given) or {})  # type: ignore[func-returns-value]
    assert seen[0] is samples
