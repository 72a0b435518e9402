"""The life of a process that judges: load a function, then answer one request after the other until nobody asks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import Outcome
from lightning_realloc.rewards.invoke import call_reward, call_reward_async
from lightning_realloc.rewards.sandbox.processes import adopt_orphans, die_with_parent
from lightning_realloc.rewards.signatures import RewardFunction, is_async


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""


@dataclass(frozen=True, slots=True)
class Broken:
    """There is nothing to call_reward this worker, or it cannot answer what it was asked."""

    reason: str


def prepare_function(function: RewardFunction) -> bytes:
    """Return what :func:`main` loads a function from, in another process.

    Raises:
        RewardError: for a function that only exists in this process.
    """
    try:
        pickled = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(
            f"a reward function for other processes must be found by its name there, at the top of a module; "
            f"{function!r} is not ({error})"
        ) from error
    # What multiprocessing tells the processes that it spawns: the paths, and the script where the function is its own.
    surroundings = spawn.get_preparation_data("rewards")
    for unwanted in ("authkey", "start_method", "name"):
        surroundings.pop(unwanted, None)
    if b"__main__" not in pickled:
        surroundings = {key: value for key, value in surroundings.items() if not key.startswith("init_main")}
    return pickle.dumps((surroundings, pickled))


def main(descriptor: int, parent: int) -> None:
    """Serve the other end of a connection until it is closed."""
    die_with_parent(parent)
    adopt_orphans()
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        surroundings, pickled = pickle.loads(connection.recv_bytes())
        spawn.prepare(surroundings)
        function = pickle.loads(pickled)
    except EOFError:
        return
    except BaseException as error:  # a script may also call sys.exit
        connection.send(Broken(f"{type(error).__name__}: {error}"))
        return
    connection.send(Ready())
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        connection.send(_answer(function, given))


def _answer(function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome] | Broken:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return (
            asyncio.run(call_reward_async(name, function, given))
            if is_async(function)
            else call_reward(name, function, given)
        )
    except RewardError as error:
        return Broken(str(error))
