"""The demo of a real model with a calculator: its data, its tool, all stages on a tiny model, and what it learns.

``make demo-agent`` makes the model; then ``pytest -m real tests/examples/test_demo_agent.py`` takes ten minutes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerBase

from examples import demo_agent
from lightning_realloc.environments import ToolEnvironment
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import TurnParser
from tests.models import byte_tokenizer, tiny_model
from tests.workers import WorkerPool


def write_model(folder: Path) -> Path:
    """Write a tiny model with the tokens that SmolLM2's turns begin and end with."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(folder)
    tiny_model(
        "llama", vocab_size=320, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a tiny model with the demo's chat template."""
    with mock.patch.object(demo_agent, "model_folder", lambda: write_model(tmp_path)):
        return demo_agent.chat_tokenizer()


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize(("sign", "result"), [("+", "712"), ("-", "-654"), ("*", "19807")])
def test_a_demonstration_is_what_the_model_and_the_calculator_say(
    sign: str, result: str, calls: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    # 29 + 683 = 712, 29 - 683 = -654, 29 * 683 = 29 * 700 - 29 * 17 = 20300 - 493 = 19807
    row = demo_agent.demonstration(29, 683, sign, calls=calls)
    (asked, *talk), tools = row["messages"], row["tools"]
    turns, parser = ChatTurns(tokenizer, stop_token_ids=[tokenizer.eos_token_id]), TurnParser(tokenizer)
    turns.check(tools)
    parser.check(tools)
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "29{sign}683"}}}}</tool_call>'
    said = f"The answer is {result}."
    found, ids = [], turns.prompt_ids([asked], tools)
    for text in (call, said) if calls else (said,):
        message = parser.parse(text, first_call=0, tools=tools)
        answer = asyncio.run(ToolEnvironment([demo_agent.calculator]).step(message)).messages
        own = tokenizer(f"{text}<|im_end|>")["input_ids"]
        ids = [*ids, *own, *turns.answer_ids(own, message, answer, tools)]
        found += [message, *answer]
    assert found == talk
    whole = tokenizer.apply_chat_template(row["messages"], tools=tools, add_generation_prompt=True, tokenize=False)
    assert ids == tokenizer(whole)["input_ids"]


def test_an_answer_of_the_calculator_is_no_answer_of_the_model() -> None:
    asked, *talk = demo_agent.demonstration(29, 683, "*", calls=True)["messages"]
    assert demo_agent.REWARD([[asked]] * 2, [talk, talk[:2]], answer=["19807"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("expression", ["", "29", "29**683", "9" * 10 + "*2", "29*683*2", "__import__('os')", "29×683"])
def test_the_calculator_refuses_other_expressions(expression: str) -> None:
    with pytest.raises(ValueError, match=r"is not two whole numbers with \+, - or \* between them"):
        demo_agent.calculator(expression)


def test_demonstrations_show_both_ways_and_no_pair_of_numbers_is_asked_twice() -> None:
    talks = demo_agent.demonstrations(random.Random(0), 200)
    assert {len(talk["messages"]) for talk in talks} == {2, 4}
    assert not any("*" in talk["messages"][0]["content"] for talk in talks)
    assert len(set(demo_agent.pairs(random.Random(0), 20_000))) == 20_000


def accuracies(folder: str, settings: demo_agent.Settings) -> dict[str, float]:
    """Run the demo, and return the shares of right answers by stage."""
    found = demo_agent.main(replace(settings, folder=Path(folder)))
    for name in demo_agent.LABELS:
        assert all(name in examined.scores for examined in found.values())
    return {stage: examined.scores["val/accuracy"] for stage, examined in found.items()}


def run_on_tiny_model(model: Path, folder: str) -> Mapping[str, float]:
    """Run every stage on a tiny model."""
    few = replace(demo_agent.SETTINGS, num_ranks=1, num_demonstrations=8, num_iterations=1)
    with (
        mock.patch.object(demo_agent, "model_folder", lambda: model),
        mock.patch.object(demo_agent, "NUM_HELD_OUT", 2),
    ):
        return accuracies(folder, few)


@pytest.mark.exhaustive
def test_every_stage_runs(workers: WorkerPool, tmp_path: Path) -> None:
    given = (write_model(tmp_path / "model"), str(tmp_path))
    (found,) = workers.run(run_on_tiny_model, *given, world_size=1, init_process_group=False, deadline_s=120.0)
    assert found == {"at the start": 0.0, "after the warm-up": 0.0, "after GRPO": 0.0}
    assert (tmp_path / "trained/model.safetensors").exists()
    assert list(tmp_path.glob("logs/*/record*"))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_learns_more_by_rewards_than_by_imitation(workers: WorkerPool, tmp_path: Path) -> None:
    given = (str(tmp_path), demo_agent.SETTINGS)
    found, *_ = workers.run(accuracies, *given, world_size=2, init_process_group=False, deadline_s=1800.0)
    assert found["at the start"] < 0.1
    assert found["after the warm-up"] < 0.6
    assert found["after GRPO"] > found["after the warm-up"] + 0.2
