"""PPO's losses compared with loops over tokens, advantages by hand, calls by settings, and invalid settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from lightning_realloc.algorithms.base.loaded_weights import is_model_source
from lightning_realloc.algorithms.base.vocabulary import retokenized
from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.losses.policy_losses import Clip
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.rollout.token_advantages import GAE
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.errors import ConfigError, RewardError
from lightning_realloc.runtime.parallel.packed_forward import sequence_scores
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs

PROMPTS = [[5, 6, 7], [5, 6, 7], [8]]
RESPONSES = [[11, 12], [13, 14, 15, 2], [20]]
TOTALS = Totals(3, 7)
CPU = torch.device("cpu")


def rollout() -> Samples:
    """Return three responses with the columns that training calls need."""
    generator = torch.Generator().manual_seed(3)
    responses = Ragged.from_list(RESPONSES)

    def around(mean: float) -> Ragged:
        return Ragged(torch.randn(responses.num_tokens, generator=generator) + mean, responses.lengths)

    columns = {name: around(-4.8) for name in ("behaviour_logprobs", "ref_logprobs")}
    columns |= {name: around(0.0) for name in ("advantages", "values", "returns")}
    return Samples(torch.arange(3), {"prompt_ids": Ragged.from_list(PROMPTS), "response_ids": responses, **columns})


def token_logits(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Return the logits before each response token, by a plain forward pass."""
    logits: Tensor = model(torch.tensor([prompt + response])).logits
    return logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_actor_loss_is_that_of_a_loop_over_tokens(place: Any) -> None:
    model, samples = tiny_model("llama"), rollout()
    module = runs.ppo(actor=model, kl=KL(0.1, place=place), entropy_coef=0.01, policy_loss=Clip(high=0.3))
    parts = [module.actor_loss(model, pack_columns(samples.select(rows), CPU), TOTALS) for rows in ([0, 2], [1])]
    columns = zip(
        *(samples.ragged(name).to_lists() for name in ("behaviour_logprobs", "ref_logprobs", "advantages")), strict=True
    )
    total = torch.zeros(())
    for prompt, response, (before, reference, advantages) in zip(PROMPTS, RESPONSES, columns, strict=True):
        distribution = token_logits(model, prompt, response).log_softmax(-1)
        for position, token in enumerate(response):
            now = distribution[position, token]
            ratio = (now - before[position]).exp()
            surrogate = torch.min(ratio * advantages[position], ratio.clamp(0.8, 1.3) * advantages[position])
            entropy = -(distribution[position].exp() * distribution[position]).sum()
            apart = now - reference[position]
            kl = 0.1 * ((-apart).exp() - 1 + apart) if place == "loss" else 0.0
            total = total - surrogate - 0.01 * entropy + kl
    assert sum(part.value.item() for part in parts) == pytest.approx(total.item() / 7, abs=1e-5)
    assert set(parts[0].metrics) == {"clip_fraction", "entropy", "ratio", "behaviour_kl"}


def test_the_critic_loss_is_that_of_a_loop_over_tokens() -> None:
    module, samples = runs.ppo(value_clip=0.3, loss_average="sequence"), rollout()
    module.configure_model()
    critic = module.critic.eval()  # a token classifier's head has dropout
    loss = module.critic_loss(critic, pack_columns(samples, CPU), TOTALS)
    columns = zip(*(samples.ragged(name).to_lists() for name in ("values", "returns")), strict=True)
    means = []
    for prompt, response, (old, returns) in zip(PROMPTS, RESPONSES, columns, strict=True):
        values = token_logits(critic, prompt, response)[:, 0]
        before, target = torch.tensor(old), torch.tensor(returns)
        bounded = before + (values - before).clamp(-0.3, 0.3)
        means.append(torch.max((values - target) ** 2, (bounded - target) ** 2).mean() / 2)
    assert loss.value.item() == pytest.approx(torch.stack(means).mean().item(), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_sequences_get_the_scores_of_single_sequences(family: str, share_prompts: bool) -> None:
    scorer = tiny_scorer(family)
    packed = sequence_scores(scorer, pack_columns(rollout(), CPU, share_prompts=share_prompts))
    alone = [scorer(torch.tensor([p + r])).logits[0, 0].item() for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert packed.tolist() == pytest.approx(alone, abs=1e-4)


def floats(*rows: list[float]) -> Ragged:
    """Return sequences of numbers."""
    return Ragged.from_list([torch.tensor(row) for row in rows], dtype=torch.float32)


def test_advantages_by_hand() -> None:
    # Two responses, of two tokens and one. Scores 3 and -1, scaled to 1.5 and -0.5, the first clipped to 1.
    # k1 = behaviour - reference: 0.5, -1 and 0; of each token 0.1 of it is taken: rewards -0.05, 1.1 and -0.5.
    # discount 1, lambda 1: returns 1.05, 1.1, -0.5; less values 0.05, 0.6, 0.5: advantages 1, 0.5, -1.
    samples = Samples(
        torch.arange(2),
        {
            "response_ids": Ragged.from_list([[1, 2], [3]]),
            "behaviour_logprobs": floats([-1.0, -2.0], [-1.0]),
            "ref_logprobs": floats([-1.5, -1.0], [-1.0]),
            "values": floats([0.05, 0.6], [0.5]),
            "scores": torch.tensor([3.0, -1.0]),
            "finish_reason": torch.tensor([0, 1]),
        },
    )
    rule = GAE(gae_lambda=1.0, reward_scale=0.5, reward_clip=1.0)
    plain, settings = replace(rule, normalize_advantages=False), {"tokenizer": byte_tokenizer()}
    module = PPO(tiny_model("llama"), runs.low_tokens, advantages=plain, kl=KL(0.1, target=0.5), **settings)
    made: dict[str, Any] = dict(module.estimate_advantages(samples))
    assert made["advantages"].values.tolist() == pytest.approx([1.0, 0.5, -1.0])
    assert made["returns"].values.tolist() == pytest.approx([1.05, 1.1, -0.5])
    assert made["rewards"].tolist() == pytest.approx([1.05, -0.5])
    assert made["kl_k1"].tolist() == pytest.approx([-0.5, 0.0])
    # errors 1, 0.5, -1: mean 1/6, variance 2.25 / 3 - 1 / 36; returns: mean 0.55, variance 2.5625 / 3 - 0.3025
    assert made["explained_variance"].tolist() == pytest.approx([1 - (0.75 - 1 / 36) / (2.5625 / 3 - 0.3025)] * 2)
    known = samples.with_columns(**made).lengths_only()
    summary = {name: float(value) for name, value in module.summarize(known).items()}
    assert summary["score"] == 1.0
    assert summary["reward"] == pytest.approx(0.275)
    unscaled = {name: column for name, column in known.columns.items() if name != "rewards"}  # as in an evaluation
    evaluated = module.summarize_evaluation(Samples(known.ids, unscaled))
    assert evaluated["reward"] == evaluated["score"] == 1.0, "val/reward"
    assert (summary["response_length"], summary["stopped/model"]) == (1.5, 0.5)
    # mean k1 -0.25 against 0.5: more than 20 % below, so down by 2 %
    module.on_iteration_end(samples.with_columns(**made).lengths_only())
    assert float(module.kl_controller.coefficient) == pytest.approx(0.098)

    whole = replace(rule, normalize_values=True)
    whitened = PPO(tiny_model("llama"), runs.low_tokens, advantages=whole, kl_coef=0.1, **settings)
    made = dict(whitened.estimate_advantages(samples))
    # mean 1/6, deviation sqrt(0.75 - 1/36) = 0.84984
    assert made["advantages"].values.tolist() == pytest.approx([0.98058, 0.39223, -1.37281], abs=1e-4)
    # mean 0.55, deviation 0.74274; once they are part of the moments, values are read in the same units
    assert made["returns"].values.tolist() == pytest.approx([0.67318, 0.74050, -1.41368], abs=1e-4)
    whitened.on_iteration_end(samples.with_columns(**made).lengths_only())
    again: dict[str, Any] = dict(whitened.estimate_advantages(samples.with_columns(values=made["returns"])))
    assert again["explained_variance"].tolist() == pytest.approx([1.0, 1.0])
    assert float(whitened.return_moments.mean) == pytest.approx(0.55)
    assert float(whitened.return_moments.count) == 3.0


def test_an_environments_tokens_count_in_no_moment_of_returns() -> None:
    # No divergence and no discount: the return of each of the model's tokens is the score of its response, 2, 2 and 5.
    columns = {
        "response_ids": Ragged.from_list([[1, 2, 3, 4], [5]]),
        "model_mask": Ragged.from_list([[True, False, False, True], [True]], dtype=torch.bool),
        "num_model_tokens": torch.tensor([2, 1]),
        "behaviour_logprobs": floats([-1.0, 0.0, 0.0, -2.0], [-1.0]),
        "values": floats([0.0] * 4, [0.0]),
        "scores": torch.tensor([2.0, 5.0]),
        "finish_reason": torch.tensor([0, 0]),
    }
    samples = Samples(torch.arange(2), columns)
    module = runs.ppo(kl_coef=0.0, advantages=GAE(gae_lambda=1.0, normalize_values=True))
    module.on_iteration_end(samples.with_columns(**module.estimate_advantages(samples)).lengths_only())
    assert float(module.return_moments.count) == 3.0
    assert float(module.return_moments.mean) == pytest.approx(3.0)
    assert float(module.return_moments.std) == pytest.approx(2.0**0.5)


def names(module: PPO) -> list[str]:
    """Return the module's calls."""
    return [call.name for call in module.dataflow.calls]


def test_calls_follow_from_settings() -> None:
    plain = runs.ppo()
    assert names(plain) == [
        "actor.generate", "reference.infer", "judge", "critic.infer", "estimate_advantages", "actor.train",
        "critic.train",
    ]  # fmt: skip
    assert plain.dataflow.call("actor.train").needs == ("rollout", "advantages")
    assert plain.dataflow.call("estimate_advantages").whole_batch
    assert plain.evaluation_calls == ("actor.generate", "judge")
    model = runs.ppo(reward=tiny_scorer("llama"), kl=KL(place="loss"))
    assert "judge" not in names(model) and "reward.infer" in names(model)
    assert model.dataflow.call("actor.train").needs == ("rollout", "advantages", "ref_logprobs")
    assert model.evaluation_calls == ("actor.generate", "reward.infer")
    alone = runs.ppo(kl_coef=0.0)
    assert "reference.infer" not in names(alone)
    assert alone.dataflow.call("estimate_advantages").needs == ("rollout", "scores", "values")
    warm = runs.ppo(critic_warmup=2)
    assert [warm.runs("actor.train", iteration) for iteration in (0, 1, 2)] == [False, False, True]
    assert warm.runs("critic.train", 0)


def test_losses_may_be_sums_over_a_constant_length() -> None:
    model, batch = tiny_model("llama"), pack_columns(rollout(), CPU)
    by_average = {
        average: runs.ppo(actor=model, loss_average=average).actor_loss(model, batch, TOTALS).value.item()
        for average in ("token", "sum", "constant")
    }
    # 7 tokens in 3 responses of at most max_new_tokens=6.
    assert by_average["sum"] == pytest.approx(by_average["token"] * 7 / 3, rel=1e-5)
    assert by_average["constant"] == pytest.approx(by_average["token"] * 7 / 18, rel=1e-5)


def test_a_critic_starts_from_the_reward_model_or_the_actors_layers() -> None:
    actor, scorer = tiny_model("llama"), tiny_scorer("llama", seed=3)
    from_reward, from_actor = runs.ppo(actor=actor, reward=scorer), runs.ppo(actor=actor)
    for module, source in ((from_reward, scorer), (from_actor, actor)):
        module.configure_model()
        ours, theirs = module.critic.model.state_dict(), source.model.state_dict()
        assert runs.largest_difference(ours, theirs) == 0.0
        assert type(module.critic).__name__ == "LlamaForTokenClassification"
        assert all(parameter.requires_grad for parameter in module.critic.parameters())
    assert torch.equal(from_reward.critic.score.weight, scorer.score.weight)
    assert not any(parameter.requires_grad for parameter in from_reward.reward.parameters())
    chosen = runs.ppo(critic=tiny_model("llama", seed=9).config)
    chosen.configure_model()
    assert chosen.critic.config.num_labels == 1
    again = runs.ppo(critic=chosen.critic)
    again.configure_model()
    assert runs.largest_difference(again.critic.state_dict(), chosen.critic.state_dict()) == 0.0


def test_a_reward_is_recognised_as_a_model_or_as_functions(tmp_path: Path) -> None:
    models = ("org/name", "gpt2", str(tmp_path), tmp_path, tiny_model("llama"), tiny_model("llama").config)
    functions = ("package.module:name", "package.module.name", runs.low_tokens, [runs.low_tokens], ["a.b"])
    assert [is_model_source(source) for source in (*models, *functions)] == [True] * 6 + [False] * 5


def test_the_critic_has_its_own_options() -> None:
    options = runs.options(num_epochs=4)
    module = runs.ppo(critic_train_options=options, critic_learning_rate=0.5, learning_rate=0.25)
    module.configure_model()
    rates = {entry["optimizer"].param_groups[0]["name"]: entry["optimizer"].param_groups[0]["lr"]
             for entry in module.configure_optimizers()}  # fmt: skip
    assert rates == {"actor": 0.25, "critic": 0.5}
    assert module.train_options_of("critic") is options
    assert module.train_options_of("actor") is module.train_options
    assert runs.ppo(train_options=options).train_options_of("critic") == options
    # Limits are on metrics of the actor's loss, and the critic's loss does not measure them.
    limited = replace(options, stop_above={"behaviour_kl": 0.02})
    assert runs.ppo(train_options=limited).train_options_of("critic") == options


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = ("<unk>", "<bos>", *words)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>")


def test_texts_are_tokenized_again_for_another_tokenizer() -> None:
    ours, theirs = byte_tokenizer(), word_tokenizer("sort", "me", "now")
    rows = [("sort ", "me"), ("sort ", "now"), ("now", " sort me")]
    encode = [[ours(text, add_special_tokens=False).input_ids for text in row] for row in rows]
    samples = Samples(
        torch.arange(3),
        {"prompt_ids": Ragged.from_list([p for p, _ in encode]),
         "response_ids": Ragged.from_list([[*r, ours.eos_token_id] for _, r in encode])},
    )  # fmt: skip
    for share_prompts in (False, True):
        batch = retokenized(pack_columns(samples, CPU, share_prompts=share_prompts), ours, theirs)
        parts = [part.tolist() for part in torch.split(batch.input_ids[0], list(batch.lengths))]
        assert parts == [[2, 3], [2, 4], [4, 2, 3]]
    module = runs.ppo(reward=tiny_scorer("llama", vocab_size=5), reward_tokenizer=theirs)
    module.configure_model()
    assert module.score_sequences(module.reward, pack_columns(samples, CPU)).shape == (3,)
    # Its layers cannot be those of the critic, which reads the actor's tokens.
    assert module.critic.config.vocab_size == 128


def test_messages_are_rendered_by_the_reward_models_own_template() -> None:
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    ours.chat_template = "{{ messages[0].content }}?{{ eos_token }}"
    theirs.chat_template = (
        "{{ tools | length if tools }}{% for m in messages %}"
        "[{{ m.role[0] }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    asked = [{"role": "user", "content": "1+1"}]
    begun = [*asked, {"role": "assistant", "content": "It is "}]
    prompts = Ragged.from_list([ours.encode("1+1?<eos>")] * 4)
    responses = Ragged.from_list([ours.encode(f"{n}<eos>") for n in range(4)])
    data = {"prompt": (asked, begun, asked, "1+1"), "tools": (None, None, [{"name": "add"}], None)}
    samples = Samples(torch.arange(4), {"prompt_ids": prompts, "response_ids": responses}, data)

    def read(other: Any, **settings: Any) -> list[str]:
        batch = retokenized(pack_columns(samples, CPU, share_prompts=True), ours, other, **settings)
        return [theirs.decode(part) for part in torch.split(batch.input_ids[0], list(batch.lengths))]

    rendered = ["[u]1+1<eos>[a]0<eos>", "[u]1+1<eos>[a]It is 1<eos>", "1[u]1+1<eos>[a]2<eos>"]
    assert read(theirs) == [*rendered, "1+1?3"]
    assert read(theirs, makes_messages=True) == [*rendered, "[u]1+1<eos>[a]3<eos>"]
    assert read(byte_tokenizer()) == [f"1+1?{n}" for n in range(4)]  # without a template, the actor's text
    module = runs.ppo(reward=tiny_scorer("llama", vocab_size=259), reward_tokenizer=theirs)
    module.configure_model()
    batch = pack_columns(samples, CPU)
    expected = sequence_scores(module.reward, retokenized(batch, module.tokenizer, theirs))
    assert torch.equal(module.score_sequences(module.reward, batch), expected)


def saved(model: Any, folder: Path, tokenizer: Any = None) -> Path:
    """Write a model, and its tokenizer if given."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def test_models_with_another_tokenizer_are_refused(tmp_path: Path) -> None:
    other = saved(tiny_scorer("llama"), tmp_path / "other", word_tokenizer("a", "b"))
    actor = saved(tiny_model("llama"), tmp_path / "actor", byte_tokenizer())
    same = saved(tiny_scorer("llama"), tmp_path / "same", byte_tokenizer())
    silent = saved(tiny_scorer("llama"), tmp_path / "silent")
    runs.ppo(actor=actor, tokenizer=None, reward=same, reference=actor).configure_model()
    runs.ppo(reward=other, reward_tokenizer="retokenize").configure_model()
    for settings, message in (
        (
            {"reward": other},
            "reward has another tokenizer than the actor: token .* or set reward_tokenizer='retokenize'",
        ),
        ({"reward": silent, "reward_tokenizer": "retokenize"}, "needs the tokenizer of reward, and none lies beside"),
        (
            {"reward": tiny_scorer("llama", vocab_size=64)},
            "reward has another vocabulary than the actor: 64 tokens, the",
        ),
        (
            {"reference": tiny_model("llama", vocab_size=256)},
            "reference has another vocabulary than the actor: 256 tok",
        ),
        ({"critic": tiny_model("llama", vocab_size=256).config}, "critic has another vocabulary than the actor: 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            runs.ppo(**settings).configure_model()


def test_models_with_the_wrong_head_are_refused(tmp_path: Path) -> None:
    language_model = saved(tiny_model("llama"), tmp_path / "lm", byte_tokenizer())
    many = tiny_scorer("llama", num_labels=3)
    classes = AutoModelForTokenClassification.from_config(many.config)
    scorer = saved(tiny_scorer("llama"), tmp_path / "scorer", byte_tokenizer())
    for settings, message in (
        ({"reward": language_model}, "reward is not trained here and brings no weights for score.weight"),
        ({"actor": scorer}, "scorer' brings no weights for lm_head.weight, and random ones say nothing; give a model"),
        ({"actor": tiny_scorer("llama")}, "actor is a LlamaForSequenceClassification, which has no head that says"),
        ({"reward": tiny_model("llama")}, "reward is not trained here and brings no weights for score"),
        ({"reward": many}, "reward is a classifier of 3 labels; give one with num_labels=1"),
        ({"critic": classes}, "critic is a classifier of 3 labels; give one with num_labels=1"),
        ({"actor": tiny_model("opt")}, "critic: transformers has no AutoModelForTokenClassification of 'opt'; give"),
    ):
        with pytest.raises(ConfigError, match=message):
            runs.ppo(**settings).configure_model()


def test_invalid_options_of_the_divergence_and_of_advantages_are_refused() -> None:
    for make, message in (
        (lambda: KL(place="nowhere"), "place='nowhere' must be one of loss, reward"),
        (lambda: KL(estimator="k4"), "estimator='k4' must be one of k1, k2, k3"),
        (lambda: KL(-1.0), "coef=-1.0 may not be negative"),
        (lambda: KL(target=-1.0), "target=-1.0 must be positive"),
        (lambda: GAE(gae_lambda=1.5), "gae_lambda=1.5 must lie between 0 and 1"),
        (lambda: GAE(discount=-0.5), "discount=-0.5 must lie between 0 and 1"),
        (lambda: GAE(reward_clip=0.0), "reward_clip=0.0 must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_invalid_settings_are_refused() -> None:
    for settings, message in (
        ({"sampling": runs.SamplingParams(temperature=0.0)}, "sampling.temperature=0 gives every .* explores nothing"),
        ({"kl": "reward"}, r"kl='reward' is a str; write KL\(...\)"),
        ({"advantages": "gae"}, r"advantages='gae' is a str; write GAE\(...\)"),
        ({"loss_average": "group"}, "loss_average='group'"),
        (
            {"reward_tokenizer": "other", "reward": tiny_scorer("llama")},
            "reward_tokenizer='other' must be one of actor",
        ),
        ({"reward_tokenizer": "retokenize"}, "reward_tokenizer='retokenize' is for a reward model; reward="),
        ({"policy_loss": "clipped"}, "policy_loss='clipped' must be one of clip, cispo, sapo, vespo"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan is not a number"),
        ({"critic_warmup": -1}, "critic_warmup=-1 may not be negative"),
        ({"value_clip": 0.0}, "value_clip=0.0 must be positive; None leaves it out"),
        ({"kl": KL(target=1.0), "kl_coef": 0.0}, "target=1.0 steers coef, as PPO does alone, and coef=0 leaves"),
        ({"reward": "no/such/folder/here"}, "there is no such folder .* reward function as module:function"),
    ):
        with pytest.raises(ConfigError, match=message):
            runs.ppo(**settings).dataflow  # noqa: B018  # a folder is looked for when its role is made
    with pytest.raises(RewardError, match="cannot be imported"):
        runs.ppo(reward="no.such:function")
