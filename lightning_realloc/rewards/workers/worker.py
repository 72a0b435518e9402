"""Main loop of a worker process: load a reward function, then answer requests until the connection closes."""

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
class WorkerReady:
    """Message: the function is loaded."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """Message: the function could not be loaded, or could not answer a request."""

    reason: str
    """Cause, for error messages."""


def prepare_function(function: RewardFunction) -> bytes:
    """Serialize a function for :func:`serve` in another process.

    Raises:
        RewardError: for a function that exists in this process only.
    """
    try:
        pickled = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(
            f"a reward function for worker processes must be importable by its name, at the top of a module; "
            f"{function!r} is not ({error})"
        ) from error
    # As in multiprocessing's spawn: import paths, and the main script if the function is defined there.
    surroundings = spawn.get_preparation_data("rewards")
    for unwanted in ("authkey", "start_method", "name"):
        surroundings.pop(unwanted, None)
    if b"__main__" not in pickled:
        surroundings = {key: value for key, value in surroundings.items() if not key.startswith("init_main")}
    return pickle.dumps((surroundings, pickled))


def serve(descriptor: int, parent: int) -> None:
    """Serve a connection until its other end closes."""
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
        connection.send(WorkerError(f"{type(error).__name__}: {error}"))
        return
    connection.send(WorkerReady())
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        connection.send(_call_function(function, given))


def _call_function(function: RewardFunction, given: Mapping[str, Any]) -> list[Outcome] | WorkerError:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return (
            asyncio.run(call_reward_async(name, function, given))
            if is_async(function)
            else call_reward(name, function, given)
        )
    except RewardError as error:
        return WorkerError(str(error))
