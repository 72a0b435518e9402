"""Training with environments that talk to models of the run: the same talks in every layout and mode."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig
from torch import Tensor

from lightning_realloc import GRPO, ActorAverage, OnPolicyDistillation, Role
from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.algorithms.rollout.conversations.partner_roles import PartnerSource
from lightning_realloc.batch.json_column import json_values
from lightning_realloc.environments import StepResult
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Conversation, SamplingParams
from lightning_realloc.runtime.messages.objects import gather_objects
from tests.environments.guessing import END, chat_model, chat_tokenizer
from tests.environments.talking import MAX_REPLY, Talking
from tests.environments.test_partners import said_by
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_agents import Games
from tests.strategies.calls.test_sample_reallocation import Moved
from tests.strategies.runs import Outcome
from tests.workers import WorkerPool

LORA = LoraConfig(r=2, target_modules=["q_proj"])


def talk(partner: str, layout: str, world_size: int, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of two iterations, with the actor or a frozen model in the other seat."""
    strategy, moved = settings.pop("strategy", {}), Moved()
    moves = settings.get("generation", GenerationOptions()).sample_reallocation
    module = runs.RecordedGRPO(
        chat_model(), reference=chat_model(1), tokenizer=chat_tokenizer(), environment=Talking,
        sampling=SamplingParams(n=2, max_new_tokens=40), conversation=Conversation(max_turns=3),
        partners={"other": chat_model(2) if partner == "frozen" else partner}, learning_rate=1e-2, **settings,
    )  # fmt: skip
    with moving(every=1, plan_balance=at_random) if moves else nullcontext():
        outcome = runs.train_in_layout(module, layout, world_size, Games(), strategy, callbacks=[moved])
    assert not moves or min(moved.counts) > 0
    return outcome


def run(workers: WorkerPool, partner: str, layout: str, world_size: int, **settings: Any) -> Outcome:
    """Return the first rank's outcome."""
    return runs.outcome_of(workers, talk, partner, layout, world_size, settings, world_size=world_size)


@pytest.mark.parametrize(
    ("partner", "layout"),
    matrix(
        [("actor", "dp2"), ("actor", "tp2"), ("frozen", "dp2"), ("frozen", "tp2"), ("actor", "pp2"), ("frozen", "pp2")],
        ("actor", "pp2"),
    ),
)  # fmt: skip
def test_every_layout_gives_the_talks_of_one_rank(workers: WorkerPool, partner: str, layout: str) -> None:
    alone, together = run(workers, partner, "dp1", 1), run(workers, partner, layout, 2)
    assert together.tokens == alone.tokens
    assert together.rewards == alone.rewards
    for name in ("partner_replies/actor.generate", "partner_tokens/actor.generate"):
        assert [logged[name] for logged in together.logged] == [logged[name] for logged in alone.logged]
    assert alone.logged[0]["stopped/failure"] == 0.0 and alone.logged[0]["turns"] > 1.5
    assert len({reward for rewards in alone.rewards for reward in rewards}) > 3


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": {"generation_chunks": 3}}, marks=pytest.mark.exhaustive),
        pytest.param({"generation": GenerationOptions(max_cache_bytes=1 << 16)}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": {"max_staleness": 1}}, marks=pytest.mark.exhaustive),
    ],
)
def test_other_modes_change_no_talk(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plain, other = run(workers, "frozen", "dp2", 2), run(workers, "frozen", "dp1@0", 2, **settings)
    assert other.tokens[0] == plain.tokens[0]


@pytest.mark.exhaustive  # of the engine: tests/generation/rebalance/test_home_conversations.py
def test_a_sample_on_another_rank_reads_the_replies_of_its_home(workers: WorkerPool) -> None:
    plain = run(workers, "frozen", "dp2", 2)
    moved = run(workers, "frozen", "dp2", 2, generation=GenerationOptions(sample_reallocation="all"))
    assert moved.tokens == plain.tokens
    assert moved.rewards == plain.rewards


class Recalling(Talking):
    """Talks to a past self and to the reference, and keeps what they say."""

    heard: ClassVar[list[tuple[str, list[dict[str, str]], str]]] = []

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Return the reference's reply."""
        self.talk.append({"role": "user", "content": message["content"]})
        for name in ("past", "reference"):
            reply = await self.partners[name].reply(self.talk, max_new_tokens=MAX_REPLY, temperature=0.0)
            self.heard.append((name, list(self.talk), reply["content"]))
        self.talk.append(reply)
        return StepResult([{"role": "user", "content": reply["content"]}], reward=0.1 * len(message["content"]))


class Heard(Callback):
    """Keeps the replies of every iteration, and the actor's full weights before it."""

    def __init__(self) -> None:
        self.replies: list[list[tuple[str, list[dict[str, str]], str]]] = []
        self.actors: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Gather the weights, on every rank."""
        everyone = gather_objects(trainer.strategy.full_weights("actor"))
        self.actors.append(everyone[0])

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Take the replies, which a metric counts with its seconds."""
        logged = trainer.callback_metrics
        assert 0 < logged["partner_s/actor.generate"] < logged["seconds/actor.generate"]
        counts = gather_objects(len(Recalling.heard))
        assert logged["partner_replies/actor.generate"] == sum(counts) > 0
        self.replies.append(Recalling.heard[:])
        Recalling.heard.clear()


class Following(runs.RecordedGRPO):
    """GRPO whose reference follows the actor, so that its replica for the talks becomes stale."""

    def roles(self) -> tuple[Role, ...]:
        """Return GRPO's roles with another reference."""
        actor, reference, *others = super().roles()
        return (actor, replace(reference, average_of="actor", average_rate=0.25), *others)


def recall(layouts: dict[str, str], world_size: int) -> list[set[str]]:
    """Check the replies of two iterations against the models' own ``generate``.

    Returns:
        For each iteration, the partners that did not answer as they would have at the start.
    """
    module = Following(
        chat_model(), reference=chat_model(1), tokenizer=chat_tokenizer(), environment=Recalling,
        sampling=SamplingParams(n=2, max_new_tokens=30), conversation=Conversation(max_turns=2), learning_rate=0.05,
        partners={"past": ActorAverage(0.5), "reference": "reference"},
    )  # fmt: skip
    heard = Heard()
    runs.train(module, runs.calls(**layouts), world_size, Games(), callbacks=[heard])  # type: ignore[arg-type]
    models, tokenizer = {"past": chat_model(), "reference": chat_model(1)}, chat_tokenizer()
    rates, changed = {"past": 0.5, "reference": 0.25}, list[set[str]]()

    def reply(model: Any, talk: list[dict[str, str]]) -> str:
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        return str(tokenizer.decode([word for word in said_by(model, ids, MAX_REPLY) if word != END]))

    starts = {"past": chat_model(), "reference": chat_model(1)}
    for number, replies in enumerate(heard.replies):
        for name, model in models.items() if number else ():
            rate, actor = rates[name], heard.actors[number]
            model.load_state_dict({k: (1 - rate) * w + rate * actor[k] for k, w in model.state_dict().items()})
        assert all(text == reply(models[name], talk) for name, talk, text in replies)
        # Before any update, both are the models of the start.
        answers = {name: [(talk, text) for of, talk, text in replies if of == name] for name in models}
        changed.append({
            name for name, said in answers.items()
            if number and any(text != reply(starts[name], talk) for talk, text in said)
        })  # fmt: skip
    return changed


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(
            {"actor_generate": "dp1", "reference_infer": "dp1", "actor_train": "dp1"}, marks=pytest.mark.exhaustive
        ),
        {"actor_generate": "dp2", "reference_infer": "tp2", "actor_train": "fsdp2"},
    ],
)
def test_a_past_self_and_the_reference_answer_with_their_weights_of_now(
    workers: WorkerPool, layouts: dict[str, str]
) -> None:
    world_size = 1 if layouts["actor_train"] == "dp1" else 2
    for changed in workers.run(recall, layouts, world_size, world_size=world_size, init_process_group=False):
        assert changed == [set(), {"past", "reference"}]


@pytest.mark.exhaustive
def test_ranks_that_share_a_model_answer_with_its_own_generate(workers: WorkerPool) -> None:
    first = run(workers, "frozen", "tp2", 2, engine="hf").logged[0]
    assert first["stopped/failure"] == 0.0 and first["turns"] > 1.5


def test_layouts_in_which_ranks_cannot_answer_are_refused_by_name(workers: WorkerPool) -> None:
    with pytest.raises(Exception, match=r"layout tp2@0-1, whose ranks answer for models together, .* give it tp=1"):
        run(workers, "actor", "tp2", 2, generation=GenerationOptions(sample_reallocation=True))
    with pytest.raises(Exception, match=r"calls\.actor\.generate: all ranks of layout fsdp2@0-1 .* with fsdp=1"):
        run(workers, "actor", "fsdp2", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": None}, "there is none; give environment="),
        ({"partners": {}}, "must name models"),
        ({"partners": {"the other": "actor"}}, "needs a name of letters"),
        ({"partners": {"other": 3}}, "is a int; give a model: .* or 'actor' for self-play"),
        ({"partners": {"other": "actr"}}, "is no role; did you mean 'actor'\\? A model of the hub has an owner"),
        ({"partners": {"other": "critic"}}, "scores and says nothing; give 'actor', 'reference' or a language model"),
        ({"engine": "vllm"}, "needs an engine that lets environments talk to models"),
        ({"partners": {"other": "reference"}}, "a role that the algorithm does not have; .* kl_coef above 0"),
        (
            {"partners": {"other": "reference"}, "kl_coef": 0.1, "peft_config": LORA},
            "is the base of actor, whose adapters are merged into it during generation",
        ),
        ({"partners": {"other": ActorAverage()}, "peft_config": LORA}, "its adapters alone are trained; give 'actor'"),
    ],
)
def test_settings_that_exclude_each_other_are_named(settings: dict[str, Any], message: str) -> None:
    given = {"environment": Talking, "partners": {"other": "actor"}, **settings}
    with pytest.raises(ConfigError, match=message):
        _ = GRPO(chat_model(), lambda completions, **columns: [0.0], tokenizer=chat_tokenizer(), **given).dataflow


def test_files_may_name_an_average_or_a_model() -> None:
    parser = ArgumentParser()
    parser.add_argument("--partners", type=Mapping[str, PartnerSource])
    found = parser.parse_args(['--partners={"past": {"rate": 0.5}, "self": "actor"}'])
    assert parser.instantiate(found).partners == {"past": ActorAverage(0.5), "self": "actor"}


@pytest.mark.parametrize("algorithm", [GRPO, OnPolicyDistillation])
def test_a_frozen_partner_is_a_role_of_the_plan(algorithm: Any) -> None:
    settings = {"reward": lambda completions, **columns: [0.0]} if algorithm is GRPO else {"teacher": chat_model(1)}
    module = algorithm(
        chat_model(), **settings, tokenizer=chat_tokenizer(), environment=Talking,
        partners={"other": chat_model(2), "self": "actor"},
    )  # fmt: skip
    flow = module.dataflow
    assert "partner_other" in flow.roles and "partner_other" not in flow.trained_roles
    assert flow.home_call("partner_other").name == "actor.generate" and flow.home_call("actor").name == "actor.train"
    assert flow.call("actor.generate").partners == ("partner_other", "actor")
    assert {"actor", "partner_other"} <= set(type(module).dataflow_of(flow.roles).roles)


@pytest.mark.exhaustive  # a resumed run: test_agents.py
def test_a_run_that_resumes_with_another_kind_of_partner_warns(tmp_path: Path) -> None:
    for number, partner in enumerate((chat_model(2), "actor"), start=1):
        module = GRPO(
            chat_model(), tokenizer=chat_tokenizer(), environment=Talking, sampling=SamplingParams(n=2),
            partners={"other": partner},
        )  # fmt: skip
        trainer = runs.trainer(runs.ReallocStrategy("static"), 1, max_steps=number, max_epochs=-1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, Games(), ckpt_path=tmp_path / "run.ckpt" if number == 2 else None)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
    said = [str(warning.message) for warning in caught if "was saved" in str(warning.message)]
    assert len(said) == 1 and "run.ckpt was saved with partner_other=a module, which this run lacks" in said[0]


@pytest.mark.parametrize("partner", matrix(["actor", "frozen"], "frozen"))
def test_test_and_predict_talk_to_partners(partner: str) -> None:
    module = GRPO(
        chat_model(), tokenizer=chat_tokenizer(), environment=Talking, conversation=Conversation(max_turns=3),
        partners={"other": chat_model(2) if partner == "frozen" else partner},
        evaluation_sampling=SamplingParams(max_new_tokens=40),
    )  # fmt: skip
    trainer = runs.trainer(runs.ReallocStrategy("static"), 1)
    (tested,) = trainer.test(module, Games(), verbose=False)
    assert tested["test/turns"] > 1.5 and tested["test/stopped/failure"] == 0.0
    talks = json_values(trainer.predict(module, Games())[0]["record/conversation"])
    assert any(message["role"] == "user" for talk in talks for message in talk["messages"][1:])
