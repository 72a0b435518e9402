"""Advantages from rewards by hand: RLOO, REINFORCE++ and ReMax, and the divergence as part of a reward."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc import (
    GRPO,
    RLOO,
    Correction,
    DynamicSampling,
    PolicyGradient,
    ReinforcePlusPlus,
    ReMax,
    SamplingParams,
)
from lightning_realloc.algorithms.losses.advantages import group_advantages
from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError, PlanError
from tests.algorithms import test_grpo
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

LENGTHS = [len(response) for response in test_grpo.RESPONSES]  # 2, 4, 1, 2


def made(kind: type[PolicyGradient], **settings: Any) -> Any:
    """Return an algorithm on a tiny model."""
    settings = {"sampling": runs.SAMPLING, "tokenizer": byte_tokenizer(), **settings}
    return kind(tiny_model("llama"), test_grpo.fixed, **settings)


def compared(module: Any, **columns: Any) -> dict[str, Any]:
    """Return the columns of judging and comparing the rollout, with a reference 1/8 nat away per token."""
    samples = test_grpo.rollout()
    behaviour = samples.ragged("behaviour_logprobs")
    samples = samples.with_columns(
        ref_logprobs=Ragged(behaviour.values - 0.125, behaviour.lengths),
        finish_reason=torch.tensor([0, 1, 0, 0]), **columns,
    )  # fmt: skip
    judged = module.judge(samples)
    return {**judged, **module.compare(samples.with_columns(**judged))}


def test_rloo_subtracts_the_divergence_of_the_whole_response_from_its_reward() -> None:
    found = compared(made(RLOO, kl_coef=0.1))
    assert found["kl_k1"].tolist() == pytest.approx([0.125 * length for length in LENGTHS])
    # Rewards 1, 0, 1/2, 1/2 less 0.1 / 8 per token, each less the other one of its pair.
    first = (1 - 0.0125 * 2) - (0 - 0.0125 * 4)
    second = (0.5 - 0.0125) - (0.5 - 0.0125 * 2)
    assert found["advantages"].tolist() == pytest.approx([first, -first, second, -second], abs=1e-6)
    assert compared(made(RLOO, kl=KL(place="loss")))["advantages"].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_kl_place_decides_which_call_needs_the_reference() -> None:
    flow = made(RLOO).dataflow
    assert flow.call("compare").needs == ("rollout", "rewards", "ref_logprobs")
    assert flow.call("actor.train").needs == ("rollout", "advantages")
    flow = made(GRPO, kl_coef=0.1).dataflow
    assert flow.call("compare").needs == ("rollout", "rewards")
    assert flow.call("actor.train").needs == ("rollout", "advantages", "ref_logprobs")
    assert made(RLOO, kl_coef=0.0).dataflow.roles == ("actor",)


def test_reinforce_normalises_the_returns_of_all_tokens() -> None:
    found = compared(made(ReinforcePlusPlus, kl_coef=0.1, discount=0.5))
    returns = []
    for reward, length in zip(test_grpo.REWARDS, LENGTHS, strict=True):
        row, following = [], 0.0
        for place in reversed(range(length)):
            following = -0.0125 + (reward if place == length - 1 else 0.0) + 0.5 * following
            row.append(following)
        returns.append(row[::-1])
    everything = [value for row in returns for value in row]
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    expected = [(value - mean) / deviation for value in everything]
    assert found["advantages"].values.tolist() == pytest.approx(expected, abs=1e-5)
    assert found["advantages"].lengths.tolist() == LENGTHS


def test_reinforce_can_subtract_the_group_mean_first() -> None:
    module = made(ReinforcePlusPlus, baseline="group")
    assert (module.kl.place, module.kl.estimator) == ("loss", "k2")
    found = compared(module)
    # 1/2 and -1/2 in the first group, of two and four tokens; 0 in the second, of three: mean -1/9.
    tokens = [0.5] * 2 + [-0.5] * 4 + [0.0] * 3
    deviation = statistics.pstdev(tokens)
    assert found["advantages"].values.tolist() == pytest.approx([(t + 1 / 9) / deviation for t in tokens], abs=1e-5)


def test_remax_subtracts_the_greedy_reward_and_the_divergence_still_to_come() -> None:
    greedy = torch.tensor([0.25, 0.25, math.nan, 0.5])
    for settings, per_token in (({"kl_coef": 0.1}, 0.0125), ({"kl_coef": 0.0}, 0.0), ({"kl": KL(place="loss")}, 0.0)):
        found = compared(made(ReMax, **settings), greedy_rewards=greedy)
        rows = found["advantages"].to_lists()
        for row, better, length in zip(rows, [0.75, -0.25, math.nan, 0.0], LENGTHS, strict=True):
            to_come = [better - per_token * (length - place) for place in range(length)]
            assert row == pytest.approx(to_come, abs=1e-6, nan_ok=True)
        assert ("kl_k1" in found) == bool(per_token)


@pytest.mark.parametrize("kind", [GRPO, ReinforcePlusPlus, ReMax])
def test_truncated_responses_are_rewarded_and_not_trained_on(kind: type[PolicyGradient]) -> None:
    columns = {"greedy_rewards": torch.zeros(4)} if kind is ReMax else {}
    whole, found = (compared(made(kind, kl_coef=0.0, learn_truncated=learn), **columns) for learn in (True, False))
    assert torch.equal(whole["rewards"], found["rewards"])
    advantages = found["advantages"]
    rows = advantages.split() if isinstance(advantages, Ragged) else list(advantages)
    assert [bool(row.isnan().all()) for row in rows] == [False, True, False, False]
    if kind is GRPO:
        assert torch.equal(advantages[[0, 2, 3]], whole["advantages"][[0, 2, 3]])


def above_half(samples: Samples) -> Tensor:
    """Return rewards above one half."""
    return samples.tensor("rewards") - 0.5


class AboveHalf:
    """A rule that must be made first."""

    def __call__(self, samples: Samples) -> Tensor:
        """Return what `above_half` does."""
        return above_half(samples)


def by_place(samples: Samples) -> Ragged:
    """Return each token's place in its response, and NaN in the third one."""
    places = [torch.arange(length) * (1.0 if length > 1 else math.nan) for length in LENGTHS]
    return Ragged.from_list(places, dtype=torch.float32)


def test_a_function_of_samples_gives_advantages_of_responses_or_tokens() -> None:
    for rule in (above_half, f"{__name__}:above_half"):
        module = made(PolicyGradient, advantages=rule, kl=KL(0.1, place="reward"))
        assert module.learns_whole_groups
        found = compared(module)["advantages"]
        expected = [reward - 0.0125 * n - 0.5 for reward, n in zip(test_grpo.REWARDS, LENGTHS, strict=True)]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
    found = compared(made(GRPO, advantages=by_place, learn_truncated=False))["advantages"]
    rows = found.to_lists()
    assert (rows[0], rows[3]) == ([0.0, 1.0], [0.0, 1.0])
    assert all(math.isnan(value) for value in (*rows[1], *rows[2])), "cut off, and left out by the rule"
    named = compared(made(PolicyGradient, advantages="leave_one_out", kl_coef=0.0))["advantages"]
    assert named.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_advantages_of_other_tokens_than_the_responses_are_refused() -> None:
    with pytest.raises(PlanError, match=r"one value per token, of shape \(9,\); it returned a tensor of shape \(2,\)"):
        compared(made(GRPO, advantages=lambda samples: Ragged.from_list([[1.0], [2.0]], dtype=torch.float32)))


def test_advantages_may_be_whole_numbers_and_other_values_name_the_function() -> None:
    found = compared(made(GRPO, advantages=lambda samples: samples.tensor("rewards").long(), learn_truncated=False))
    assert found["advantages"].dtype == torch.float32
    places = [torch.arange(length) for length in LENGTHS]
    found = compared(made(GRPO, advantages=lambda samples: Ragged.from_list(places, dtype=torch.int64)))
    assert found["advantages"].to_lists() == [list(map(float, range(length))) for length in LENGTHS]

    def plain(samples: Samples) -> Any:
        return samples.tensor("rewards").tolist()

    message = r"advantages=plain must return .* of shape \(4,\), or a Ragged of one per response token; .* a list"
    with pytest.raises(PlanError, match=message):
        compared(made(GRPO, advantages=plain))


def test_a_base_without_a_rule_asks_for_one() -> None:
    with pytest.raises(NotImplementedError, match=r"must define advantages\(rewards, samples\), or get a rule as adv"):
        compared(made(PolicyGradient))


def test_invalid_combinations_are_refused() -> None:
    for kind, settings, message in (
        (RLOO, {"sampling": SamplingParams(n=1)}, "set n >= 2"),
        (ReinforcePlusPlus, {"baseline": "mean"}, "baseline='mean' must be one of batch, group"),
        (ReinforcePlusPlus, {"baseline": "group", "sampling": SamplingParams(n=1)}, "set n >= 2"),
        (ReinforcePlusPlus, {"discount": 2.0}, "discount=2.0 must lie between 0 and 1"),
        (ReMax, {"dynamic_sampling": DynamicSampling()}, "ReMax each with the greedy one; leave it out"),
        (GRPO, {"correction": Correction(), "ratio_to": "behaviour"}, "use ratio_to='proximal'"),
        *(
            (
                kind,
                {"kl": KL(target=6.0)},
                r"kl=KL\(target=6.0\) steers .* as PPO does alone; leave target and gain out",
            )
            for kind in (RLOO, GRPO)  # whose default weight is 0
        ),
        (GRPO, {"kl": {"coef": 0.1}}, r"kl=\{'coef': 0.1\} is a dict; write KL\(...\)"),
        (GRPO, {"kl_coef": -1.0}, "kl_coef=-1.0 may not be negative"),
        (RLOO, {"kl_coef": 0.04, "kl": KL(0.2)}, r"kl_coef=0.04 and kl=KL\(0.2\) contradict each other"),
        (GRPO, {"dynamic_sampling": True}, r"dynamic_sampling=True is a bool; write DynamicSampling\(...\)"),
        (
            GRPO,
            {"advantages": "mean"},
            "advantages='mean' must be one of group, group_each, group_mean, group_turns",
        ),
        (GRPO, {"advantages": "gae"}, "advantages='gae' compares with the values of a critic; use PPO"),
        (GRPO, {"advantages": "no.such:rule"}, "advantages 'no.such:rule' cannot be imported"),
        (GRPO, {"advantages": {}}, r"advantages=\{\} must be one of group"),
        (GRPO, {"advantages": group_advantages}, r"group_advantages cannot be called with samples alone \(missing"),
        (GRPO, {"advantages": f"{__name__}:AboveHalf"}, r"advantages AboveHalf must be .* make an instance: Abo"),
        (
            ReMax,
            {"advantages": "group"},
            "advantages='group' would replace the rule of ReMax; leave it out, or use Pol",
        ),
        (ReinforcePlusPlus, {"advantages": "group"}, "would replace the rule of ReinforcePlusPlus"),
        (PolicyGradient, {"advantages": "group", "sampling": SamplingParams(n=1)}, "set n >= 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(kind, **settings)


class Doubled(PolicyGradient):
    """A custom advantage estimator."""

    def advantages(self, rewards: torch.Tensor, samples: Samples) -> torch.Tensor:
        """Return twice the reward."""
        return 2 * rewards


def test_a_custom_estimator_needs_one_method() -> None:
    assert compared(made(Doubled))["advantages"].tolist() == [2.0, 0.0, 1.0, 1.0]
