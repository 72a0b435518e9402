"""Examples of agents that learn: their data and games, a few iterations of each, and what they learn in minutes."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.agents import Settings, chat_tokenizer
from lightning_realloc.environments import ToolEnvironment
from lightning_realloc.environments.turns.turn_parser import TurnParser
from tests.matrices import matrix
from tests.workers import WorkerPool

NAMES = ("08_calculator_tool", "09_guessing", "10_self_play")
calculator: Any = importlib.import_module(f"examples.{NAMES[0]}")
guessing: Any = importlib.import_module(f"examples.{NAMES[1]}")
self_play: Any = importlib.import_module(f"examples.{NAMES[2]}")


@pytest.mark.parametrize(
    ("kind", "said"), [("right", "579"), ("product", "56088"), ("contradiction", "700"), ("guess", "700")]
)
def test_a_demonstration_is_read_and_answered_as_the_tools_do(kind: str, said: str) -> None:
    # 123 + 456 = 579, 123 * 456 = 56088
    tokenizer = chat_tokenizer(calculator.WORDS)
    row = calculator.demonstration(123, 456, kind, 700)
    text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    turns = [turn.partition("<|end|>")[0] for turn in text.split("<|assistant|>")[1:]]
    first, *later = (TurnParser(tokenizer).parse(turn, first_call=0) for turn in turns)
    assert len(later) == (kind != "guess")
    if later:
        tools = ToolEnvironment([calculator.add, calculator.multiply])
        assert asyncio.run(tools.step(first)).messages == (row["messages"][2],)
    assert (later or [first])[-1]["content"] == said
    assert calculator.is_right([row["messages"][1:]], ["579"]) == [float(said == "579")]


def test_an_answer_of_the_tool_is_no_answer_of_the_model() -> None:
    tool = {"role": "tool", "content": "579"}
    assert calculator.is_right([[], [tool], [{"role": "assistant", "content": ""}, tool]], ["579"] * 3) == [0.0] * 3


def play(secret: int, guesses: list[str]) -> list[tuple[str | None, float | None]]:
    """Return the answer and the reward of each guess."""

    async def steps() -> list[tuple[str | None, float | None]]:
        game = guessing.Guessing()
        await game.reset({"secret": secret})
        results = [await game.step({"role": "assistant", "content": guess}) for guess in guesses]
        return [(None if r.done else r.messages[0]["content"], r.reward) for r in results]

    return asyncio.run(steps())


def test_guesses_that_hints_exclude_cost_more() -> None:
    assert play(6, ["3", "2", "7", "7", "two", "6"]) == [
        ("higher", -0.1), ("higher", -0.3), ("lower", -0.1), ("lower", -0.3), ("what?", -0.3), (None, 1.0)
    ]  # fmt: skip


def test_players_to_imitate_hear_true_hints() -> None:
    rng = random.Random(0)
    for _ in range(50):
        turns = guessing.imitated_game(rng)["messages"][1:]
        guesses = [int(turn["content"]) for turn in turns[::2]]
        hints = [turn["content"] for turn in turns[1::2]]
        low = max((g for g, hint in zip(guesses, hints, strict=False) if hint == "higher"), default=-1)
        high = min(
            (g for g, hint in zip(guesses, hints, strict=False) if hint == "lower"), default=len(guessing.NUMBERS)
        )
        assert low < high - 1 and len(guesses) <= guessing.MAX_TURNS
        if len(hints) < len(guesses):  # it was right
            assert low < guesses[-1] < high


@pytest.mark.parametrize(
    ("seat", "said", "replies", "won"),
    [
        ("speaker", "red", {"heard red": "3"}, 1.0),
        ("speaker", "blue", {"heard blue": "4"}, 0.0),
        ("listener", "3", {"name 3": "red"}, 1.0),
        ("listener", "red", {"name 3": "red"}, 0.0),
    ],
)
def test_a_game_of_signals_is_won_by_the_number_of_the_other_seat(
    seat: str, said: str, replies: Mapping[str, str], won: float
) -> None:
    class Scripted:
        """A partner with a reply to one message."""

        async def reply(self, messages: Any, **sampling: object) -> dict[str, str]:
            """Return the reply."""
            return {"role": "assistant", "content": replies[messages[-1]["content"]]}

    async def play_once() -> tuple[Any, Any]:
        game = self_play.Signals()
        game.partners = {"other": Scripted()}
        begun = await game.reset({"number": "3", "seat": seat})
        return begun, await game.step({"role": "assistant", "content": said})

    begun, result = asyncio.run(play_once())
    assert begun[0]["content"] == ("name 3" if seat == "speaker" else "heard red")
    assert result.reward == won and result.done


def run(name: str, settings: Settings) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Run an example, and return its metrics before and after."""
    scores: tuple[Mapping[str, float], Mapping[str, float]] = importlib.import_module(f"examples.{name}").main(settings)
    return scores


@pytest.mark.parametrize("name", matrix(NAMES, "09_guessing"))
def test_an_example_runs(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    few = Settings(folder=tmp_path, num_demonstrations=64, warm_up_epochs=1, num_iterations=1)
    ((before, after),) = workers.run(run, name, few, world_size=1, init_process_group=False, deadline_s=100.0)
    assert set(importlib.import_module(f"examples.{name}").LABELS) <= before.keys() & after.keys()
    assert after["val/stopped/failure"] == 0.0
    if name != "08_calculator_tool":  # every turn is rewarded, so an iteration changes the game
        assert before["val/reward"] != after["val/reward"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "num_iterations"), [(NAMES[0], 25), (NAMES[1], 45), (NAMES[2], 20)])
def test_an_example_learns(workers: WorkerPool, tmp_path: Path, name: str, num_iterations: int) -> None:
    usual = importlib.import_module(f"examples.{name}").SETTINGS
    settings = replace(usual, folder=tmp_path, num_iterations=num_iterations)
    ((before, after),) = workers.run(run, name, settings, world_size=1, init_process_group=False, deadline_s=300.0)
    assert after["val/reward"] > before["val/reward"] + 0.4
