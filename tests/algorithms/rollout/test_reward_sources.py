"""Reward models next to reward functions: roles, calls, weighted sums and tokenizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from transformers import PreTrainedModel

from lightning_realloc import (
    GRPO,
    PPO,
    RLOO,
    BestOfN,
    EvaluationSet,
    OnlineDPO,
    PromptDataModule,
    ReinforcePlusPlus,
    ReMax,
)
from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS
from lightning_realloc.algorithms.losses.advantages import ADVANTAGES
from lightning_realloc.algorithms.rollout.reward_sources import RewardSources, StopProperly
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError, RewardError
from lightning_realloc.rewards import Format, OverlongPenalty, Regex, Shaped
from lightning_realloc.runtime.parallel.packed_forward import sequence_scores
from tests.algorithms import test_grpo, test_ppo
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs

SCORES = torch.tensor([0.5, -1.0, 2.0, 0.0])


def now_and_then(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Reward only the first completion."""
    return [3.0, *[None] * (len(completion_ids) - 1)]


def rollout(**columns: torch.Tensor) -> Samples:
    """Return four samples; the second response was cut off."""
    return test_grpo.rollout().with_columns(finish_reason=torch.tensor([0, 1, 0, 0]), **columns)


@pytest.mark.parametrize("wrap", [lambda source: source, lambda source: [source]])
def test_a_module_a_configuration_a_name_and_a_folder_are_models(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    config = tiny_scorer("llama").config
    config.save_pretrained(tmp_path)
    for source in (tiny_scorer("llama"), config, "gpt2", "owner/scorer-1.5", tmp_path):
        assert [role.source for role in runs.grpo(reward=wrap(source)).roles()[2:]] == [source]
    assert len(runs.grpo(reward=wrap("tests.strategies.runs:low_tokens")).roles()) == 2


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePlusPlus, ReMax, BestOfN, OnlineDPO])
def test_every_algorithm_with_rewards_takes_a_model_as_a_role_with_a_call(kind: type[Any]) -> None:
    module = kind(tiny_model("llama"), tiny_scorer("llama"), tokenizer=byte_tokenizer())
    assert [role.name for role in module.roles() if not role.trained][-1] == "reward"
    assert module.dataflow.call("reward.infer").needs == ("rollout",)
    assert module.dataflow.call("judge").needs == ("rollout", "reward_scores")
    assert module.evaluation_calls == ("actor.generate", "reward.infer", "judge")
    assert kind.dataflow_of(("actor", "reward")).call("judge").needs == ("rollout", "reward_scores")
    assert "reward" not in kind.dataflow_of(("actor",)).roles


def test_models_and_functions_are_added_by_weight_in_the_order_of_the_list() -> None:
    reward = [tiny_scorer("llama"), test_grpo.fixed, tiny_scorer("llama", seed=1)]
    module = runs.grpo(reward=reward, reward_weights=[0.5, 2.0, -1.0])
    assert [role.name for role in module.roles()] == ["actor", "reference", "reward", "reward_2"]
    calls = [call.name for call in module.dataflow.calls]
    assert calls.index("reward_2.infer") < calls.index("judge") and "reward.infer" in calls
    assert module.dataflow.call("judge").needs == ("rollout", "reward_scores", "reward_2_scores")
    other = torch.tensor([1.0, 1.0, -1.0, 0.25])
    found = module.judge(rollout(reward_scores=SCORES, reward_2_scores=other))
    functions = torch.tensor(test_grpo.REWARDS)
    assert torch.equal(found["rewards"], 0.5 * SCORES + 2.0 * functions - other)
    assert torch.equal(found["reward/reward"], SCORES) and torch.equal(found["reward/reward_2"], other)
    assert torch.equal(found["reward/fixed"], functions)


def test_a_response_whose_environment_failed_has_no_reward_and_changes_no_groups_mean() -> None:
    rewards = torch.tensor([1.0, 0.25, 3.0, 2.0])
    samples = rollout(environment_rewards=rewards).with_columns(
        finish_reason=torch.tensor([0, 1, 0, FINISH_REASONS.index("failure")])
    )
    found = RewardSources(None, {}, has_environment=True).judge(samples, byte_tokenizer())
    expected = torch.tensor([1.0, 0.25, 3.0, torch.nan])
    for made in (found.total, found.by_function["environment"]):
        assert torch.equal(made.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    advantages = ADVANTAGES["group_mean"](samples.with_columns(rewards=found.total))
    assert advantages[:3].tolist() == [0.375, -0.375, 0.0] and advantages[3].isnan()


def test_a_misspelt_short_name_and_an_empty_list_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"reward='Maths' is no short name of a reward; did you mean 'math'"):
        runs.grpo(reward=[runs.low_tokens, "Maths"])
    with pytest.raises(ConfigError, match=r"reward=\[\] names no reward; give .* or one of exact, math"):
        runs.grpo(reward=[])
    with pytest.raises(ConfigError, match=r"reward='fromat' is no short name of a reward; did you mean 'format'"):
        EvaluationSet([], reward=["math", "fromat"])
    with pytest.raises(ConfigError, match=r"reward=\[\] names no function"):
        EvaluationSet([], reward=[])


def test_a_set_of_a_mix_without_answers_is_refused_before_the_first_step() -> None:
    sets = {"sums": [{"prompt": "1+1=", "answer": "2"}], "words": [{"prompt": "a"}]}
    data = PromptDataModule(sets, batch_size=1, mix=[(0, {"sums": 1, "words": 0}), (9, {"sums": 0, "words": 1})])
    module = runs.grpo(reward="exact", actor=tiny_model("llama", vocab_size=320), kl_coef=0.0)
    with pytest.raises(RewardError, match=r"1 rows of the data have no value in \['answer'\].*'data_set': 'words'"):
        runs.trainer("realloc", 1).fit(module, data)
    assert module.trainer.global_step == 0


def test_rewards_without_an_effect_are_refused() -> None:
    low = runs.low_tokens
    with pytest.raises(RewardError, match=r"reward_weights=\[0\.0, 0\.0\] leave every reward 0"):
        runs.grpo(reward=[low, low], reward_weights=[0, 0])
    with pytest.raises(RewardError, match=r"write it as missing_eos_penalty=StopProperly\(scale=0\.5"):
        runs.grpo(reward=[low, StopProperly(scale=0.5)])
    with pytest.raises(RewardError, match=r"begins above 90 tokens, and max_new_tokens="):
        runs.grpo(reward=[low, OverlongPenalty(max_length=100, buffer=10)])


def test_each_call_scores_with_its_own_model() -> None:
    first, second = tiny_scorer("llama"), tiny_scorer("llama", seed=1)
    module = runs.grpo(reward=[first, second])
    module.configure_model()
    batch = pack(test_grpo.rollout().without_columns("ref_logprobs", "behaviour_logprobs"))
    for role, model in (("reward", first), ("reward_2", second)):
        method = getattr(module, module.dataflow.call(f"{role}.infer").method)
        torch.testing.assert_close(method(getattr(module, role), batch), sequence_scores(model, batch).float())


@pytest.mark.parametrize("make", [runs.grpo, runs.ppo])
def test_a_score_that_is_not_finite_is_refused_with_role_sample_and_response(make: Callable[..., Any]) -> None:
    module = make(reward=[tiny_scorer("llama"), tiny_scorer("llama", seed=1)])
    module.configure_model()
    with torch.no_grad():
        module.reward_2.score.weight.fill_(float("nan"))
    batch = pack(test_grpo.rollout().without_columns("ref_logprobs", "behaviour_logprobs"))
    text = byte_tokenizer().decode(test_grpo.RESPONSES[0], skip_special_tokens=True)
    module.score_sequences(module.reward, batch)
    with pytest.raises(RewardError, match="the reward model of role 'reward_2' must give finite scores") as info:
        module.score_by_reward_2(module.reward_2, batch)
    assert f"it gave nan for the completion {text!r} of sample {int(batch.ids[0])}" in str(info.value)


def test_a_weighted_sum_with_models_that_is_too_large_is_refused() -> None:
    module = runs.grpo(reward=[tiny_scorer("llama"), test_grpo.fixed], reward_weights=[1e18, 1.0])
    scores = torch.tensor([1.0, 1.0, 1e9, 1.0])
    text = byte_tokenizer().decode(test_grpo.RESPONSES[2], skip_special_tokens=True)
    with pytest.raises(RewardError, match=r"a weighted sum of rewards must be at most 1e\+18") as info:
        module.judge(rollout(reward_scores=scores))
    assert f"it is 1e+27 for the completion {text!r}" in str(info.value)


def test_a_function_may_pass_over_completions_that_a_model_scores() -> None:
    found = runs.grpo(reward=[now_and_then, tiny_scorer("llama")]).judge(rollout(reward_scores=SCORES))
    assert found["rewards"].tolist() == [3.5, -1.0, 2.0, 0.0]
    with pytest.raises(RewardError, match="at least one reward function must apply to every completion"):
        runs.grpo(reward=now_and_then).judge(rollout())


def test_special_tokens_reach_reward_functions_only_if_they_are_kept(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = [tokenizer.convert_tokens_to_ids("<think>"), 50, tokenizer.convert_tokens_to_ids("</think>")]
    responses = Ragged.from_list([[*ids, tokenizer.eos_token_id], ids, [50, 2, *ids], ids[:2]])
    samples = rollout().with_columns(response_ids=responses)
    for reward in (Format(["think"]), Shaped(Format(["think"])), Regex("(?s)^<think>.*</think>$")):
        module = runs.grpo(reward=reward, tokenizer=tokenizer)
        with pytest.raises(RewardError, match=r"looks for '<think>', '</think>', special .* keep_special_tokens"):
            module.configure_model()
        module = runs.grpo(reward=reward, tokenizer=tokenizer, keep_special_tokens=True)
        module.configure_model()
        assert module.judge(samples)["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]
    runs.grpo(reward=Format(["think"])).configure_model()  # tags of several tokens


def test_a_format_whose_first_tag_the_prompts_open_is_refused() -> None:
    tokenizer = byte_tokenizer()
    ids = Ragged.from_list([tokenizer.encode("Why?<think>\n", add_special_tokens=False)] * 4)

    def check(reward: Any, *, turn: str = "user") -> None:
        prompt = [{"role": "user", "content": "Why?"}, {"role": turn, "content": "<think>\n"}]
        module = runs.grpo(reward=reward, tokenizer=tokenizer)
        module.trainer = Trainer(accelerator="cpu", barebones=True)
        module.check_batch(Samples(torch.arange(4), {"prompt_ids": ids}, {"prompt": (prompt,) * 4}))

    for reward in (Format(), [test_grpo.fixed, Shaped(Format())]):
        with pytest.raises(RewardError, match=r"'Format' requires <think>, .*; give Format\(prompt_opens=True\)"):
            check(reward)
        check(reward, turn="assistant")  # which generation continues, and functions read
    for reward in (Format(prompt_opens=True), Format(["answer"]), test_grpo.fixed):
        check(reward)


def test_ppo_sums_several_rewards_and_uses_a_single_models_scores_directly() -> None:
    single = runs.ppo(reward=tiny_scorer("llama"))
    assert single.dataflow.call("reward.infer").produces == ("scores",)
    assert "judge" not in [call.name for call in single.dataflow.calls]
    assert single.evaluation_calls == ("actor.generate", "reward.infer")
    mixed = runs.ppo(reward=[tiny_scorer("llama"), test_grpo.fixed], reward_weights=[2.0, 1.0])
    assert mixed.dataflow.call("reward.infer").produces == ("reward_scores",)
    assert mixed.dataflow.call("judge").needs == ("rollout", "reward_scores")
    found = mixed.judge(rollout(reward_scores=SCORES))
    assert torch.equal(found["scores"], 2.0 * SCORES + torch.tensor(test_grpo.REWARDS))
    weighted = runs.ppo(reward=tiny_scorer("llama"), reward_weights=[0.5])
    assert torch.equal(weighted.judge(rollout(reward_scores=SCORES))["scores"], 0.5 * SCORES)
    assert PPO.dataflow_of(("actor", "critic", "reward")).call("reward.infer").produces == ("scores",)


def test_models_with_another_tokenizer_are_refused_or_given_texts(tmp_path: Path) -> None:
    other = test_ppo.saved(tiny_scorer("llama"), tmp_path / "other", test_ppo.word_tokenizer("a", "b"))
    with pytest.raises(ConfigError, match=r"reward_2 has another tokenizer than the actor: token .* or set reward_tok"):
        runs.grpo(reward=[tiny_scorer("llama"), other]).configure_model()
    module = runs.grpo(reward=[test_grpo.half, other], reward_tokenizer="retokenize")
    module.configure_model()
    samples = test_grpo.rollout().without_columns("ref_logprobs", "behaviour_logprobs")
    assert module.score_sequences(module.reward, pack(samples)).shape == (4,)
    with pytest.raises(ConfigError, match="reward_tokenizer='retokenize' is for a reward model"):
        runs.grpo(reward_tokenizer="retokenize")
    with pytest.raises(RewardError, match=r"each reward needs a finite weight: 2 expected; got \[1.0\]"):
        runs.grpo(reward=[test_grpo.half, other], reward_weights=[1.0])


def test_a_model_that_reads_the_actors_tokens_with_another_template_is_named(tmp_path: Path) -> None:
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    scorer = test_ppo.saved(tiny_scorer("llama"), tmp_path / "scorer", theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.grpo(reward=scorer, tokenizer=ours).configure_model()
        ours.chat_template = "{{ messages[0].content }}"
        runs.grpo(reward=scorer, tokenizer=ours).configure_model()  # it has no template
    theirs.chat_template = "{{ messages[-1].content }}"
    theirs.save_pretrained(scorer)
    with pytest.warns(UserWarning, match="reward has another chat template than the actor, .*='retokenize' to render"):
        runs.grpo(reward=scorer, tokenizer=ours).configure_model()


@pytest.mark.parametrize("training", [True, False])
def test_truncated_responses_cost_a_penalty_while_training(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = runs.grpo(reward=test_grpo.fixed, missing_eos_penalty=4.0)
    monkeypatch.setattr(type(module), "training_now", training)
    expected = torch.tensor(test_grpo.REWARDS)
    expected[1] -= 4.0 * training
    assert torch.equal(module.judge(rollout())["rewards"], expected)
    for penalty, reward in ((StopProperly(scale=0.25), test_grpo.REWARDS[1] / 4), (StopProperly(reward=-2.0), -2.0)):
        module.missing_eos_penalty = penalty
        expected[1] = reward if training else test_grpo.REWARDS[1]
        assert torch.equal(module.judge(rollout())["rewards"], expected)
    with pytest.raises(ConfigError, match=r"missing_eos_penalty=0.0 must be positive; None leaves it out"):
        runs.grpo(missing_eos_penalty=0.0)
    with pytest.raises(ConfigError, match=r"scale=2.0 must lie between 0 and 1"):
        StopProperly(scale=2.0)
    with pytest.raises(ConfigError, match=r"scale=0.5 has no effect next to reward=-1.0"):
        StopProperly(scale=0.5, reward=-1.0)


def test_the_actors_own_penalties_are_warned_of_unless_sampling_has_them() -> None:
    actor: PreTrainedModel = tiny_model("llama")
    actor.generation_config.repetition_penalty = 1.2
    with pytest.warns(UserWarning, match=r"generation_config has repetition_penalty=1.2, and rollouts follow sampling"):
        runs.grpo(actor=actor).configure_model()
    follows = runs.SamplingParams(n=2, max_new_tokens=4, repetition_penalty=1.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.grpo(actor=actor, sampling=follows).configure_model()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "best_of_n"])
def test_a_reference_that_is_not_used_is_warned_of(algorithm: str) -> None:
    given: dict[str, Any] = {"tokenizer": byte_tokenizer(), "reference": tiny_model("llama", seed=1)}
    kind, off, cause = {
        "grpo": (GRPO, {"kl_coef": 0.0}, " with kl_coef=0.*, or raise kl_coef$"),
        "ppo": (PPO, {"kl_coef": 0.0}, " with kl_coef=0.*, or raise kl_coef$"),
        "best_of_n": (BestOfN, {}, ", so the given one is not loaded; leave reference out$"),
    }[algorithm]
    with pytest.warns(UserWarning, match=f"{kind.__name__} uses no reference{cause}"):
        kind(tiny_model("llama"), runs.low_tokens, **given, **off).configure_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if off:
            kind(tiny_model("llama"), runs.low_tokens, **given, kl_coef=0.1).configure_model()
