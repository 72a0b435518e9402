"""Training with environments that talk to models of the run: the same talks in every layout and mode."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc import GRPO, OnPolicyDistillation
from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Conversation, SamplingParams
from tests.environments.guessing import chat_model, chat_tokenizer
from tests.environments.talking import Talking
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_agents import Games
from tests.strategies.runs import Outcome
from tests.workers import WorkerPool


def talk(partner: str, layout: str, world_size: int, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of two iterations, with the actor or a frozen model in the other seat."""
    strategy = settings.pop("strategy", {})
    module = runs.RecordedGRPO(
        chat_model(), reference=chat_model(1), tokenizer=chat_tokenizer(), environment=Talking,
        sampling=SamplingParams(n=2, max_new_tokens=40), conversation=Conversation(max_turns=3),
        partners={"other": chat_model(2) if partner == "frozen" else partner}, learning_rate=1e-2, **settings,
    )  # fmt: skip
    return runs.train_in_layout(module, layout, world_size, Games(), strategy)


def run(workers: WorkerPool, partner: str, layout: str, world_size: int, **settings: Any) -> Outcome:
    """Return the first rank's outcome."""
    return runs.outcome_of(workers, talk, partner, layout, world_size, settings, world_size=world_size)


@pytest.mark.parametrize(
    ("partner", "layout"),
    matrix(
        [("actor", "dp2"), ("actor", "tp2"), ("frozen", "dp2"), ("frozen", "tp2")],
        ("actor", "tp2"), ("frozen", "dp2"),
    ),
)  # fmt: skip
def test_every_layout_gives_the_talks_of_one_rank(workers: WorkerPool, partner: str, layout: str) -> None:
    alone, together = run(workers, partner, "dp1", 1), run(workers, partner, layout, 2)
    assert together.tokens == alone.tokens
    assert together.rewards == alone.rewards
    assert alone.logged[0]["stopped/failure"] == 0.0 and alone.logged[0]["turns"] > 1.5
    assert len({reward for rewards in alone.rewards for reward in rewards}) > 3


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": {"generation_chunks": 3}},
        pytest.param({"generation": GenerationOptions(max_cache_bytes=1 << 16)}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": {"max_staleness": 1}}, marks=pytest.mark.exhaustive),
    ],
)
def test_other_modes_change_no_talk(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plain, other = run(workers, "frozen", "dp1@0", 2), run(workers, "frozen", "dp1@0", 2, **settings)
    assert other.tokens[0] == plain.tokens[0]


@pytest.mark.exhaustive
def test_ranks_that_share_a_model_answer_with_its_own_generate(workers: WorkerPool) -> None:
    first = run(workers, "frozen", "tp2", 2, engine="hf").logged[0]
    assert first["stopped/failure"] == 0.0 and first["turns"] > 1.5


def test_blocks_that_ranks_gather_together_are_refused_by_name(workers: WorkerPool) -> None:
    with pytest.raises(Exception, match=r"calls\.actor\.generate: all ranks of layout fsdp2@0-1 .* with fsdp=1"):
        run(workers, "actor", "fsdp2", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": None}, "there is none; give environment="),
        ({"partners": {}}, "must name models"),
        ({"partners": {"the other": "actor"}}, "needs a name of letters"),
        ({"partners": {"other": 3}}, "is a int; give a model: .* or 'actor' for self-play"),
        ({"partners": {"other": "reference"}}, "names another role than the policy; give 'actor', or the model of"),
        ({"engine": "vllm"}, "needs an engine that lets environments talk to models"),
        ({"generation": GenerationOptions(sample_reallocation=True)}, "leave one of the two out"),
    ],
)
def test_settings_that_exclude_each_other_are_named(settings: dict[str, Any], message: str) -> None:
    given = {"environment": Talking, "partners": {"other": "actor"}, **settings}
    with pytest.raises(ConfigError, match=message):
        GRPO(chat_model(), lambda completions, **columns: [0.0], tokenizer=chat_tokenizer(), **given)


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
