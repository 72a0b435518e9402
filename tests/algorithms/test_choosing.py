"""Responses chosen for training: groups that differ, the best responses, pairs of the best and the worst."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from lightning_realloc import BestOfN, DynamicSampling, OnlineDPO, SamplingParams
from lightning_realloc.algorithms.best_of_n import best_rows
from lightning_realloc.algorithms.online_dpo import pair_rows
from lightning_realloc.algorithms.rollout.dynamic_sampling import Refill, differing
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.errors import ConfigError, DataError
from tests.algorithms import test_grpo
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

NAN = math.nan


def judged(first: int, *groups: list[float]) -> Samples:
    """Return rewarded responses to prompts counted from ``first``."""
    size = len(groups[0])
    ids = torch.arange(first * size, (first + len(groups)) * size)
    return Samples(
        ids,
        {
            "prompt_id": ids // size,
            "rewards": torch.tensor([float(reward) for group in groups for reward in group]),
            "response_ids": Ragged.from_list([[int(number)] for number in ids]),
            "prompt": tuple(f"prompt {int(number) // size}" for number in ids),
        },
    )


def test_a_group_is_kept_if_its_rewards_differ() -> None:
    groups = torch.tensor([4, 4, 2, 2, 7, 7, 5, 5, 9, 9])
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN, 1.0, NAN, NAN, -2.0, -3.0])
    assert differing(rewards, groups).tolist() == [True, True, False, False] + [False] * 4 + [True, True]


def test_batches_are_filled_up_from_further_prompts() -> None:
    refill = Refill(DynamicSampling(max_refills=3), group_size=2)
    assert refill.add(judged(0, [0, 0], [1, 0], [1, 1]), num_minibatches=1) is None
    assert refill.metrics == {"refills": 0.0, "differing_groups": pytest.approx(1 / 3), "waiting_groups": 1.0}
    assert refill.add(judged(3, [1, 1], [0, 0], [1, 1]), num_minibatches=1) is None
    chosen = refill.add(judged(6, [0, 1], [0, 0], [1, 0]), num_minibatches=1)
    assert chosen is not None
    assert chosen.tensor("prompt_id").tolist() == [1, 1, 6, 6, 8, 8]
    assert chosen.ragged("response_ids").to_lists() == [[2], [3], [12], [13], [16], [17]]
    assert refill.metrics["refills"] == 2.0
    # The next step begins with no groups, and surplus groups are dropped.
    chosen = refill.add(judged(9, [0, 1], [1, 0]), num_minibatches=1)
    assert chosen is not None and chosen.tensor("prompt_id").tolist() == [9, 9, 10, 10]
    assert refill.metrics["refills"] == 0.0
    assert refill.add(judged(11, [0, 1], [0, 0]), num_minibatches=1) is None
    chosen = refill.add(judged(13, [0, 1], [0, 1]), num_minibatches=1)
    assert chosen is not None and chosen.tensor("prompt_id").tolist() == [11, 11, 13, 13]


def test_groups_of_a_fit_that_ended_are_forgotten() -> None:
    refill = Refill(DynamicSampling(max_refills=3), group_size=2)
    assert refill.add(judged(0, [0, 0], [1, 0]), num_minibatches=1) is None
    refill.forget()
    chosen = refill.add(judged(2, [0, 1]), num_minibatches=1)
    assert chosen is not None and chosen.tensor("prompt_id").tolist() == [2, 2]
    assert refill.metrics["refills"] == 0.0


def test_after_the_last_refill_the_batch_is_smaller_or_an_error_is_raised() -> None:
    first, second = judged(0, [0, 0], [1, 0]), judged(2, [0, 0], [1, 1])
    smaller = Refill(DynamicSampling(max_refills=1), group_size=2)
    assert smaller.add(first, num_minibatches=1) is None
    chosen = smaller.add(second, num_minibatches=1)
    assert chosen is not None and chosen.tensor("prompt_id").tolist() == [1, 1]
    failing = Refill(DynamicSampling(max_refills=1, when_short="fail"), group_size=2)
    failing.add(first, num_minibatches=1)
    with pytest.raises(DataError, match=r"1 of 2 groups have rewards that differ, after 2 batches .* when_short="):
        failing.add(second, num_minibatches=1)
    nothing = Refill(DynamicSampling(max_refills=0), group_size=2)
    with pytest.raises(DataError, match="0 of 2 groups have rewards that differ, after 1 batches"):
        nothing.add(second, num_minibatches=1)
    with pytest.raises(ConfigError, match="when_short='wait' must be one of train, fail"):
        DynamicSampling(when_short="wait")  # type: ignore[arg-type]


def test_waiting_groups_are_part_of_a_checkpoint() -> None:
    rounds = [judged(0, [0, 0], [1, 0]), judged(2, [0, 0], [1, 1]), judged(4, [0, 1], [1, 1])]
    through, resumed = (runs.grpo(dynamic_sampling=DynamicSampling()) for _ in range(2))
    for part in rounds[:2]:
        assert through._refill.add(part, num_minibatches=1) is None
    checkpoint: dict[str, Any] = {}
    through.on_save_checkpoint(checkpoint)
    resumed.on_load_checkpoint(copy.deepcopy(checkpoint))
    expected, found = (module._refill.add(rounds[2], num_minibatches=1) for module in (through, resumed))
    assert found.equals(expected)
    assert found.tensor("prompt_id").tolist() == [1, 1, 4, 4]
    assert found.objects("prompt") == ("prompt 1", "prompt 1", "prompt 4", "prompt 4")


def test_the_best_responses_of_every_group() -> None:
    groups = torch.tensor([3, 3, 3, 1, 1, 1, 2, 2, 2])
    rewards = torch.tensor([0.0, 2.0, 2.0, NAN, -1.0, -3.0, NAN, NAN, NAN])
    assert best_rows(rewards, groups, keep=1) == [1, 4]
    assert best_rows(rewards, groups, keep=2) == [1, 2, 4, 5]
    assert best_rows(rewards, groups, keep=2, min_reward=-1.0) == [1, 2, 4]


def test_pairs_are_the_best_and_the_worst_where_they_differ() -> None:
    groups = torch.tensor([3, 3, 3, 1, 1, 1, 2, 2, 4, 4])
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 5.0, 5.0, NAN, 1.0, 7.0, 8.0])
    assert pair_rows(rewards, groups) == [2, 1, 9, 8]


def test_best_of_n_is_supervised_fine_tuning_on_the_best_responses() -> None:
    model = tiny_model("llama")
    module = BestOfN(model, runs.low_tokens, tokenizer=byte_tokenizer(), sampling=runs.SAMPLING)
    assert [call.name for call in module.dataflow.calls] == ["actor.generate", "judge", "actor.train"]
    samples = test_grpo.rollout().select([0, 3])
    loss = module.actor_loss(model, pack_columns(samples, test_grpo.CPU), Totals(2, 4))
    pairs = [(test_grpo.PROMPTS[row], test_grpo.RESPONSES[row]) for row in (0, 3)]
    expected = -sum(float(test_grpo.response_logprobs(model, *pair, 1.0).sum().detach()) for pair in pairs) / 4
    assert loss.value.item() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match=r"keep=3 must lie between 1 and sampling.n=2"):
        BestOfN(model, runs.low_tokens, keep=3, sampling=runs.SAMPLING)


def test_online_dpo_is_the_logistic_loss_of_log_ratios() -> None:
    model = tiny_model("llama")
    module = OnlineDPO(model, runs.low_tokens, tokenizer=byte_tokenizer(), beta=0.3)
    samples = test_grpo.rollout()
    loss = module.actor_loss(model, pack_columns(samples, test_grpo.CPU, share_prompts=True), Totals(4, 9, 2))
    total = 0.0
    for chosen, rejected in ((0, 1), (2, 3)):
        ratios = []
        for row in (chosen, rejected):
            now = test_grpo.response_logprobs(model, test_grpo.PROMPTS[row], test_grpo.RESPONSES[row], 1.0).sum()
            ratios.append(now.item() - sum(samples.ragged("ref_logprobs").to_lists()[row]))
        total += math.log1p(math.exp(-0.3 * (ratios[0] - ratios[1])))
    assert loss.value.item() == pytest.approx(total / 2, abs=1e-5)
    for settings, message in (
        ({"loss": "aot"}, "loss='aot' must be one of"),
        ({"loss": "exo_pair"}, "above 0 with loss='exo_pair'"),
        ({"beta": 0.0}, "beta=0.0 must be positive"),
        ({"sampling": SamplingParams(n=1)}, "set n >= 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            OnlineDPO(model, runs.low_tokens, **settings)
