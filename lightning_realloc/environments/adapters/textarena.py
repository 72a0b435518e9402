"""Games of TextArena for one player, as an environment of messages.

The library's games draw from Python's and numpy's global generators. Here each game has a state of these generators of
its own, so games that are played at the same time neither disturb each other nor the run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from lightning_realloc.environments.message_environment import Message, MessageEnvironment, StepResult
from lightning_realloc.errors import ConfigError, describe_error

COLUMN = "seed"
"""Column of the rows that selects the game."""
_lock = threading.Lock()
"""Held while a game has its state in the global generators."""


class TextArenaEnvironment(MessageEnvironment):
    """Environment that plays a game of TextArena for one player with the model.

    The conversation begins with the row's system messages, if any, and the game's opening as a message of the user. The
    model's whole turn is its move. The reward is the game's; of a game that has not ended it is ``unfinished_reward``.

    Args:
        name: Name of the game in TextArena, such as ``"Mastermind-v0"``.
        unfinished_reward: Reward of a game that the limits of turns or tokens end.
        settings: Arguments of the game, such as ``max_turns``.

    Raises:
        ConfigError: for games that TextArena does not have.
    """

    def __init__(self, name: str, *, unfinished_reward: float = 0.0, **settings: Any) -> None:
        if name not in ENV_REGISTRY:
            near = get_close_matches(str(name), ENV_REGISTRY, n=3) or sorted(ENV_REGISTRY)[:3]
            raise ConfigError(f"TextArena has no game {name!r}; it has {', '.join(map(repr, near))} and others")
        self._name = name
        self._settings = settings
        self._reward = unfinished_reward
        self._game: Any = None
        self._state: _GeneratorState | None = None

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Begin the game that the row's column ``seed`` selects.

        Raises:
            ConfigError: for rows without a seed, games that cannot be made, and games of several players.
        """
        seed = row.get(COLUMN)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ConfigError(
                f"TextArenaEnvironment needs rows with a column {COLUMN!r} of whole numbers from 0 to 2**32 - 1, so "
                f"that all responses to a row play the same game; it is {seed!r}; textarena_rows(...) makes such rows"
            )
        self._state = _GeneratorState(seed)
        try:
            with self._state.installed():
                self._game = textarena.make(self._name, **self._settings)
                self._game.reset(num_players=1, seed=seed)
        except Exception as error:
            raise ConfigError(
                f"{self._name} cannot be played by one player ({describe_error(error)}); give it what it asks for, or "
                f"choose a game for one player"
            ) from error
        if not isinstance(self._game.state, textarena.SinglePlayerState):
            raise ConfigError(f"{self._name} is a game of several players; choose a game for one player")
        system = [message for message in row.get("prompt") or () if _role(message) == "system"]
        return [*system, {"role": "user", "content": self._said()}]

    def step(self, message: Message) -> StepResult:
        """Make the model's move."""
        assert self._state is not None, "an episode begins with reset"
        with self._state.installed():
            is_done, _ = self._game.step(action=message["content"])
        if not is_done:
            return StepResult([{"role": "user", "content": self._said()}])
        rewards, info = self._game.close()
        self._reward = float(rewards[0])
        return StepResult(done=True, metrics={"invalid_moves": float(info[0]["invalid_move"])})

    def get_reward(self) -> float:
        """Return the game's reward."""
        return self._reward

    def _said(self) -> str:
        """Return the texts of the game since the last time, without the model's own moves.

        The library's observation wrappers would repeat the whole game in each turn, which the conversation holds.
        """
        game = self._game
        while isinstance(game, textarena.Wrapper):
            game = game.env
        _, observations = game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n\n".join(text for _, text, kind in observations if kind is not own).strip()


def textarena_rows(name: str, size: int, seed: int = 0, *, system_prompt: str = "") -> list[dict[str, Any]]:
    """Return rows for `PromptDataModule`, one for each game.

    Args:
        name: Name of the game.
        size: Number of rows.
        seed: Seed of the first game; the others have the numbers that follow.
        system_prompt: First message; if empty, there is none.

    Raises:
        ConfigError: for games that TextArena does not have, or that are for several players.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    rows = []
    for each in range(seed, seed + size):
        prompt = TextArenaEnvironment(name).reset({"prompt": system, COLUMN: each})
        rows.append({"prompt": prompt, COLUMN: each})
    return rows


class _GeneratorState:
    """State of Python's and numpy's global generators, as one game left it."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Draw from this state; afterwards the global generators are as they were."""
        with _lock:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None
