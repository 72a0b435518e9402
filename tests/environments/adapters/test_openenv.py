"""Episodes on a server of OpenEnv observe and earn what its environment, played without a server, does."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.generation.loop.environment import EVENT_LOOP
from tests.chaos.agents import open_things
from tests.environments.adapters.scripted import play

pytest.importorskip("openenv", reason="needs the extra openenv")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from lightning_realloc.environments.adapters.openenv import OpenEnvEnvironment


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class Guessing(Environment):  # type: ignore[misc]
    """A number to guess, which the seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Hint:
        assert seed is not None
        self.secret, self.num_guesses = seed % 10, 0
        return Hint(hint=f"Guess, at level {columns.get('level', 0)}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self.num_guesses += 1
        if action.text == str(self.secret):
            return Hint(hint="right", reward=1.0, done=True)
        hint = "higher" if int(action.text) < self.secret else "lower"
        return Hint(hint=f"{self.num_guesses}: {hint}", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a server of the environment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server could not be started"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("seed", [3, 8])
@pytest.mark.parametrize("guesses", [["5", "4", "3"], ["7", "8", "2"]])
def test_an_episode_is_that_of_the_servers_environment(address: str, seed: int, guesses: list[str]) -> None:
    direct = Guessing()
    opening = direct.reset(seed=seed, level=2)
    steps = []
    for guess in guesses:
        steps.append(direct.step(Guess(text=guess)))
        if steps[-1].done:
            break
    environment = OpenEnvEnvironment(address, "text", reset_columns=["seed", "level"])
    row = {"prompt": [{"role": "user", "content": "Play."}], "seed": seed, "level": 2}
    game = play(environment, row, guesses)
    assert game.prompt == [{"role": "user", "content": f"Play.\n\n{opening.hint}"}]
    assert game.said == [[] if step.done else [step.hint] for step in steps]
    assert [result.reward for result in game.results] == [step.reward for step in steps]
    assert [result.done for result in game.results] == [step.done for step in steps]


def test_copies_play_in_sessions_of_their_own_that_close_gives_back(address: str) -> None:
    prototype = OpenEnvEnvironment(address, lambda message: {"text": message["content"][-1]}, observe=str)

    async def play_two() -> None:
        games = [copy.deepcopy(prototype) for _ in range(2)]
        begun = [await game.reset({"seed": seed}) for seed, game in enumerate(games)]
        assert [messages[-1]["role"] for messages in begun] == ["user", "user"] and "Guess" in begun[0][0]["content"]
        results = [await game.step({"role": "assistant", "content": "I say 1"}) for game in games]
        assert [result.done for result in results] == [False, True]
        for game in games:
            await game.close()
            await game.close()

    for _ in range(3):  # more sessions than the server has at a time
        asyncio.run(play_two())


def test_an_episode_that_is_given_up_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and answers nothing
        environment = OpenEnvEnvironment(f"http://127.0.0.1:{silent.getsockname()[1]}")

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await call(environment.reset, {"seed": 0})
            await call(environment.close)

        before = open_things()
        EVENT_LOOP.submit(give_up()).result()
        assert open_things() == before


def test_settings_and_rows_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a class derived from openenv"):
        OpenEnvEnvironment("http://localhost:1", client=dict)
    with pytest.raises(ConfigError, match=r"must be a list of columns; write \['seed'\]"):
        OpenEnvEnvironment("http://localhost:1", reset_columns="seed")
    with pytest.raises(ConfigError, match=r"the row has no \['seed'\]; add them"):
        asyncio.run(OpenEnvEnvironment("http://localhost:1").reset({"prompt": "Play."}))
