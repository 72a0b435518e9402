"""Rollouts of verifiers ask, answer and score as the library's own do with a client that says the same."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_realloc.environments import Message
from lightning_realloc.errors import ConfigError
from tests.environments.adapters.scripted import play

vf = pytest.importorskip("verifiers", reason="needs the extra verifiers")
datasets = pytest.importorskip("datasets")

from lightning_realloc.environments.adapters.verifiers_library import (  # noqa: E402
    VerifiersEnvironment,
    _response,
    _TrainedModel,
    verifiers_rows,
)

DATA = [{"question": f"Find {secret}.", "answer": str(secret)} for secret in (3, 8)]
CALL = {"id": "call00000", "type": "function", "function": {"name": "double", "arguments": {"number": 4}}}
BROKEN = {"id": "call00001", "type": "function", "function": {"name": "double", "arguments": "{4"}}


def is_right(completion: Sequence[Any], answer: str) -> float:
    return float(completion[-1]["role"] == "assistant" and answer in completion[-1]["content"])


def num_messages(completion: Sequence[Any]) -> float:
    return float(len(completion))


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


class Guessing(vf.MultiTurnEnv):  # type: ignore[misc]
    """A game of the library, whose state is in the rollout's."""

    async def setup_state(self, state: Any) -> None:
        state["guesses"] = 0

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["guesses"] += 1
        right = int(state["answer"])
        hint = "higher" if int(messages[-1].content) < right else "lower"
        return [vf.UserMessage(content=f"{state['guesses']}: {hint}")]

    @vf.stop
    async def found(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]


def environment(kind: str = "guessing") -> Any:
    """Return an environment of the library."""
    rubric = vf.Rubric(funcs=[is_right, num_messages], weights=[1.0, -0.01])
    given = {"dataset": datasets.Dataset.from_list(DATA), "system_prompt": "Be brief.", "rubric": rubric}
    if kind == "tool":
        return vf.ToolEnv(tools=[double], max_turns=4, **given)
    return Guessing(max_turns=4, **given) if kind == "guessing" else vf.SingleTurnEnv(**given)


def turns_of(said: Sequence[str | Message]) -> list[Message]:
    return [{"role": "assistant", "content": turn} if isinstance(turn, str) else turn for turn in said]


def played_directly(kind: str, place: int, turns: Sequence[Message]) -> Any:
    """Return the state of the library's own scored rollout, whose client answers from a list."""

    async def rollout() -> Any:
        own, model = environment(kind), _TrainedModel()
        for turn in turns:
            model.answers.put_nowait(_response(turn))
        state = await own.rollout(own.get_dataset()[place], model, "policy", {})
        await own.rubric.score_rollout(state)
        return state

    return asyncio.run(rollout())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("single", ["It is 3."]),
        ("guessing", ["5", "4", "3"]),
        ("guessing", ["1", "2", "9", "8", "never said"]),
        ("tool", [{"role": "assistant", "content": "", "tool_calls": [CALL, BROKEN]}, "It is 8."]),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_rollout_is_that_of_the_library(kind: str, said: Sequence[str | Message], place: int) -> None:
    turns = turns_of(said)
    if (kind, place) == ("guessing", 1) and said[0] == "5":
        turns = turns_of(["5", "9", "8"])
    expected = played_directly(kind, place, turns)
    row = json.loads(json.dumps(verifiers_rows(environment(kind))[place]))
    game = play(VerifiersEnvironment(environment, kind=kind), row, turns)
    assert (
        game.prompt
        == row["prompt"]
        == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": DATA[place]["question"]},
        ]
    )
    direct = [message for message in expected["completion"] if message.role != "assistant"]
    assert [text for texts in game.said for text in texts] == [message.content for message in direct]
    assert game.results[-1].done and game.reward == expected["reward"]
    assert dict(game.results[-1].metrics) == expected["metrics"]


def test_tools_are_shown_and_their_answers_name_them() -> None:
    adapter = VerifiersEnvironment(environment, kind="tool")
    (tool,) = adapter.tools
    assert tool.schema["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    (row, _) = verifiers_rows(environment, kind="tool")
    game = play(adapter, row, [{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert [dict(message) for message in game.results[0].messages] == [
        {"role": "tool", "tool_call_id": "call00000", "name": "double", "content": "8"}
    ]
    assert [shown.schema for shown in adapter.tools] == [tool.schema]


def test_unfinished_rollouts_are_scored_and_copies_share_the_environment() -> None:
    adapter = pickle.loads(pickle.dumps(VerifiersEnvironment(environment)))
    (row, _) = verifiers_rows(environment)
    first, second = copy.deepcopy(adapter), copy.deepcopy(adapter)
    assert first._source.environment is second._source.environment
    game = play(first, row, ["1", "2"])
    assert game.said == [["1: higher"], ["2: higher"]]
    assert game.reward == pytest.approx(-0.01 * 3)  # two guesses and the first answer; nothing read the second one
    assert play(second, row, ["3"]).reward == 1 - 0.01


def test_other_environments_and_rewards_of_groups_are_refused() -> None:
    def ranks(states: list[Any]) -> list[float]:
        return [0.0 for _ in states]

    with pytest.raises(ConfigError, match=r"makes a dict; .* derived from verifiers\.MultiTurnEnv"):
        VerifiersEnvironment(dict)
    compared = environment()
    compared.add_rubric(vf.Rubric(funcs=[ranks]))
    with pytest.raises(ConfigError, match="compares the rollouts of a group"):
        VerifiersEnvironment(compared)
