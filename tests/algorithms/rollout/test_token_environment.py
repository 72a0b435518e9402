"""Conversations with environments: masks, losses and advantages by hand, and invalid settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_realloc import GAE
from lightning_realloc.algorithms.base.rollout_columns import Dialogue, RowEnvironment, response_summary, rollout_of
from lightning_realloc.algorithms.rollout.conversations.token_environment import (
    EnvironmentSource,
    import_environment,
    make_environment,
)
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.environments.environment_factory import EnvironmentFactory, is_message_source
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Completion, Conversation, Turn
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

CPU = torch.device("cpu")


def silent(turn: Turn) -> None:
    """Return no tokens, so that every response is one turn."""


class Echo:
    """An environment made from the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, turn: Turn) -> list[int]:
        """Repeat the last token of the turn."""
        return [turn.token_ids[-1]]


class Limited(Echo):
    """An environment with a setting of its own."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        super().__init__(tokenizer)
        self.limit = limit


class Mute:
    """A class whose objects are not callable."""

    def __init__(self, tokenizer: Any) -> None:
        pass


def completion(sample_id: int, mask: str, reason: Any, error: str | None = None) -> Completion:
    """Return a response with tokens from 11 on; ``m`` marks a token of the model, ``e`` one of the environment."""
    chosen = tuple(letter == "m" for letter in mask)
    tokens = tuple(range(11, 11 + len(mask)))
    logprobs = tuple(-4.5 if one else 0.0 for one in chosen)
    return Completion(sample_id, 0, tokens, logprobs, reason, chosen, (0,) * len(mask), ModelInput((5, 6)), error)


TOLD = [
    completion(0, "mmeeem", "environment"),  # the environment answered once, and ended the second turn
    completion(1, "mem", "length"),
    completion(2, "memem", "max_turns"),
    completion(3, "mm", "failure", "the tool raised"),
]


def conversations() -> Samples:
    """Return the rollout of four conversations."""
    prompts = Samples(
        torch.arange(4), {"prompt_id": torch.tensor([0, 0, 1, 1]), "prompt_ids": Ragged.from_list([[5, 6]] * 4)}
    )
    return rollout_of(prompts, TOLD, Dialogue(silent, Conversation(max_turns=3)))  # type: ignore[arg-type]


def test_a_rollout_records_model_tokens_turns_and_what_ended_responses() -> None:
    samples = conversations()
    assert samples.ragged("model_mask").to_lists() == [
        [True, True, False, False, False, True], [True, False, True], [True, False, True, False, True], [True, True],
    ]  # fmt: skip
    assert samples.tensor("num_model_tokens").tolist() == [3, 2, 3, 2]
    assert samples.tensor("num_turns").tolist() == [2, 2, 3, 1]
    assert {name: value.item() for name, value in response_summary(samples.lengths_only()).items()} == {
        "response_length": 2.5, "response_length/min": 2.0, "response_length/max": 3.0, "turns": 2.0,
        "stopped/model": 0.0, "stopped/length": 0.25, "stopped/environment": 0.25, "stopped/max_turns": 0.25,
        "stopped/failure": 0.25,
    }  # fmt: skip


def test_failed_responses_are_counted_and_the_first_cause_is_named(caplog: pytest.LogCaptureFixture) -> None:
    conversations()
    assert "1 of 4 responses have failed with their environment; the first one: the tool raised" in caplog.text


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_response_mask_of_a_pack_keeps_the_tokens_of_the_model(share_prompts: bool) -> None:
    batch = pack_columns(conversations().select([0, 1]), CPU, share_prompts=share_prompts)
    first, second = "..mmeeem", ("mem" if share_prompts else "..mem")
    assert batch.response_mask.tolist() == [letter == "m" for letter in first + second]


def with_values(samples: Samples, **columns: float) -> Samples:
    """Return the samples with columns of random numbers around the given means, one for every response token."""
    generator = torch.Generator().manual_seed(3)
    lengths = samples.ragged("response_ids").lengths
    for name, mean in columns.items():
        values = torch.randn(int(lengths.sum()), generator=generator) + mean
        samples = samples.with_columns(**{name: Ragged(values, lengths)})
    return samples


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_the_loss_is_that_of_a_loop_over_the_models_tokens(average: Any) -> None:
    model = tiny_model("llama")
    module = runs.grpo(actor=model, kl_coef=0.1, loss_average=average, environment=silent)
    samples = with_values(conversations(), behaviour_logprobs=-4.8, ref_logprobs=-4.8)
    samples = samples.with_columns(advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))
    loss = module.actor_loss(model, pack_columns(samples, CPU), Totals(4, 10)).value
    by_sequence = []
    for row, told in enumerate(TOLD):
        logits = model(torch.tensor([[*told.prompt, *told.token_ids]])).logits[0, 1:-1].log_softmax(-1)
        values = []
        for place, (token, chosen) in enumerate(zip(told.token_ids, told.model_mask, strict=True)):
            if chosen:
                before, reference = (
                    samples.ragged(name).to_lists()[row][place] for name in ("behaviour_logprobs", "ref_logprobs")
                )
                now, advantage = logits[place, token], samples.tensor("advantages")[row]
                ratio, apart = (now - before).exp(), now - reference
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                values.append(-surrogate + 0.1 * ((-apart).exp() - 1 + apart))
        by_sequence.append(torch.stack(values))
    expected = (
        torch.cat(by_sequence).mean() if average == "token" else torch.stack([v.mean() for v in by_sequence]).mean()
    )
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def floats(*rows: list[float]) -> Ragged:
    """Return sequences of numbers."""
    return Ragged.from_list([torch.tensor(row) for row in rows], dtype=torch.float32)


def test_advantages_skip_the_tokens_of_the_environment() -> None:
    # One response: model, environment twice, model. Score 2; discount 0.5, lambda 1, no divergence: rewards 0 and 2.
    # The value after the first token is that before the last one, 1: advantages 0 + 0.5 * 1 - 0.4 + 0.5 * (2 - 1) = 0.6
    # and 2 - 1 = 1. Values at the environment's tokens (100) change nothing.
    samples = Samples(
        torch.arange(1),
        {
            "response_ids": Ragged.from_list([[1, 2, 3, 4]]),
            "model_mask": Ragged.from_list([[True, False, False, True]], dtype=torch.bool),
            "num_model_tokens": torch.tensor([2]),
            "behaviour_logprobs": floats([-1.0, 0.0, 0.0, -1.0]),
            "values": floats([0.4, 100.0, 100.0, 1.0]),
            "scores": torch.tensor([2.0]),
        },
    )
    settings: dict[str, Any] = {"kl_coef": 0.0, "environment": silent}
    rule = GAE(discount=0.5, gae_lambda=1.0)
    module = runs.ppo(**settings, advantages=replace(rule, normalize_advantages=False, normalize_values=True))
    made = estimated(module, samples)
    assert made["advantages"] == pytest.approx([0.6, 0.0, 0.0, 1.0])
    # Returns are 0.6 + 0.4 and 1 + 1, with mean 1.5 and deviation 0.5.
    assert made["returns"] == pytest.approx([-1.0, 0.0, 0.0, 1.0])
    assert made["return_sums"] == [3.0]
    whitened = estimated(runs.ppo(**settings, advantages=rule), samples)
    assert whitened["advantages"] == pytest.approx([-1.0, 0.0, 0.0, 1.0])


def estimated(module: Any, samples: Samples) -> dict[str, list[float]]:
    """Return the values of PPO's estimates for one sample."""
    made = type(module).__mro__[1].estimate_advantages(module, samples)
    return {name: (c.values if isinstance(c, Ragged) else c).tolist() for name, c in made.items()}


def test_an_environment_gets_the_columns_of_its_prompts_row() -> None:
    prompts = Samples(
        torch.tensor([7, 9]), {"prompt": ("a", "b"), "answer": (1, 2), "prompt_ids": Ragged.from_list([[5], [6]])}
    )
    seen = []

    def listen(turn: Turn) -> None:
        seen.append((turn.sample_id, dict(turn.columns), turn.number))

    environment = RowEnvironment(listen, prompts, num_responses=3)
    for sample_id in (29, 21, 23, 27):  # samples 3i to 3i + 2 are of prompt i
        asyncio.run(environment(Turn(sample_id, 0, (5,), (11,), 2)))
    first, second = {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}
    assert seen == [(29, second, 2), (21, first, 2), (23, first, 2), (27, second, 2)]
    assert Turn(0, 0, (5,), (11,), 1).columns == {}


# ---- settings
def test_environments_are_functions_classes_or_import_paths() -> None:
    tokenizer = byte_tokenizer()
    assert make_environment(import_environment(silent), tokenizer) is silent  # type: ignore[comparison-overlap]
    for source in (Echo, f"{__name__}:Echo"):
        environment: Any = make_environment(import_environment(source), tokenizer)
        assert isinstance(environment, Echo) and environment.tokenizer is tokenizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": 3}, "environment=3 is a int; give a class of MessageEnvironment"),
        ({"environment": "nowhere:tool"}, "environment 'nowhere:tool' cannot be imported"),
        ({"environment": "tool"}, "^an import path is 'package.module:name'; got 'tool' for environment"),
        ({"environment": Limited}, r"Limited cannot be called with the tokenizer alone \(.*'limit'\); give its"),
        ({"environment": lambda turn, rng: None}, r"environment <lambda> cannot be called with a Turn alone"),
        ({"conversation": Conversation(max_turns=2)}, "bounds a conversation without environment"),
    ],
)
def test_invalid_environment_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.grpo(**settings)


def test_a_class_whose_objects_are_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment=Mute makes a Mute, which cannot be called with a Turn"):
        make_environment(Mute, byte_tokenizer())


class Leveled:
    """TRL's contract, with a setting."""

    def __init__(self, level: int) -> None:
        self.level = level

    def reset(self, **columns: Any) -> str:
        """Begin."""
        return f"Level {self.level}."


def test_a_file_gives_arguments_to_classes_with_trls_contract_and_to_those_of_tokens() -> None:
    parser = ArgumentParser()
    parser.add_argument("--environment", type=EnvironmentSource)

    def read(kind: type, **settings: Any) -> Any:
        given = {"class_path": f"{__name__}.{kind.__name__}", "init_args": settings}
        return parser.instantiate(parser.parse_object({"environment": given})).environment

    source = read(Leveled, level=3)
    (begun,) = asyncio.run(EnvironmentFactory(source).make({}).reset({}))  # type: ignore[arg-type, misc]
    assert begun == {"role": "user", "content": "Level 3."} and is_message_source(source)
    assert import_environment(read(Echo, tokenizer="t")).tokenizer == "t"  # type: ignore[attr-defined]
