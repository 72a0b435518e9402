"""Games of TextArena say and reward what the library played directly does, whatever draws numbers next to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lightning_realloc.errors import ConfigError
from tests.environments.adapters.scripted import play

textarena = pytest.importorskip("textarena", reason="needs the extra textarena")

from lightning_realloc.environments.adapters.textarena import TextArenaEnvironment, textarena_rows  # noqa: E402

BISECTION = ["[10]", "[21]", "[5]", "I think [15].", "7", "[3]", "[12]", "[17]", "[8]", "[1]", "[2]", "[4]"]
BLACKJACK = ["[Hit]", "[Stand]"] * 30


def played_directly(name: str, seed: int, moves: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the texts that the library's player would see anew in each turn, and the reward."""
    random.seed(seed)
    np.random.seed(seed)
    game = textarena.make(f"{name}-raw")  # observations that do not repeat earlier ones
    game.reset(num_players=1, seed=seed)
    wrapped = textarena.wrappers.ActionFormattingWrapper(game)
    texts = []
    for move in moves:
        _, observations = wrapped.get_observation()
        shown = [text for _, text, kind in observations if kind != textarena.ObservationType.PLAYER_ACTION]
        texts.append("\n\n".join(shown).strip())
        is_done, _ = wrapped.step(move)
        if is_done:
            return texts, wrapped.close()[0][0]
    return texts, None


@pytest.mark.parametrize(("name", "moves"), [("GuessTheNumber-v0", BISECTION), ("Blackjack-v0", BLACKJACK)])
def test_a_game_is_that_of_the_library(name: str, moves: Sequence[str]) -> None:
    rewards = set()
    for row in textarena_rows(name, size=6, seed=3):
        expected, reward = played_directly(name, row["seed"], moves)
        random.seed("drawn from by the run")
        game = play(TextArenaEnvironment(name), row, moves)
        assert game.prompt == row["prompt"] == [{"role": "user", "content": expected[0]}]
        assert [texts for texts in game.said if texts] == [[text] for text in expected[1:]]
        assert game.results[-1].done and game.reward == reward is not None
        rewards.add(reward)
    assert len(rewards) > 1


def test_games_at_the_same_time_and_the_runs_generators_do_not_disturb_each_other() -> None:
    """Blackjack deals from the global generator in each turn."""
    alone = [play(TextArenaEnvironment("Blackjack-v0"), {"seed": seed}, BLACKJACK) for seed in (1, 2)]
    games = [TextArenaEnvironment("Blackjack-v0") for _ in alone]
    random.seed(0), np.random.seed(0)
    expected: list[Any] = [random.Random(0).random(), np.random.RandomState(0).random_sample()]
    shown = [[game.reset({"seed": seed})[-1]["content"]] for seed, game in zip((1, 2), games, strict=True)]
    for move in BLACKJACK:
        for said, game, reference in zip(shown, games, alone, strict=True):
            if len(said) < len(reference.results):
                said.append(game.step({"role": "assistant", "content": move}).messages[0]["content"])
    assert [random.random(), np.random.random_sample()] == expected
    assert shown == [[game.prompt[-1]["content"], *(texts[0] for texts in game.said if texts)] for game in alone]


def test_system_messages_come_first_and_unfinished_games_have_their_own_reward() -> None:
    (row,) = textarena_rows("GuessTheNumber-v0", size=1, system_prompt="Play well.")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    game = play(TextArenaEnvironment("GuessTheNumber-v0", unfinished_reward=-1.0, max_number=2000), row, ["[1999]"])
    assert game.prompt[0]["content"] == "Play well." and "between 1 and 2000" in game.prompt[1]["content"]
    assert not game.results[-1].done and game.reward == -1


def test_games_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no game 'Mastermnd-v0'; it has 'Mastermind-v0'"):
        TextArenaEnvironment("Mastermnd-v0")
    with pytest.raises(ConfigError, match=r"TicTacToe-v0 cannot be played by one player .*players"):
        textarena_rows("TicTacToe-v0", size=1)
    with pytest.raises(ConfigError, match="PublicGoodsGame-v0 is a game of several players"):
        textarena_rows("PublicGoodsGame-v0", size=1)
    for seed in (None, -1, 0.5):
        with pytest.raises(ConfigError, match=r"needs rows with a column 'seed'"):
            TextArenaEnvironment("GuessTheNumber-v0").reset({"seed": seed})
