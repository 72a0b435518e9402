"""What did a rank fail with that another one only knows as a broken connection?

A rank that is stuck in a collective hears of nothing, and is torn out of it when the failed rank ends. So whoever fails
leaves its error in the store at which the ranks met, and who loses a connection looks there. Nothing is left where the
rank that holds the store is the one that ended: what it failed with is the last that it prints.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_realloc.errors import RankLost

_BROKEN = re.compile(r"gloo/transport.*(by peer|broken pipe|time(d )?out|connect)", re.IGNORECASE | re.DOTALL)
"""What gloo says, as a plain RuntimeError, when another process has ended."""


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank is gone."""
    if isinstance(error, RankLost | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def publish_failure(rank: int, error: Exception) -> None:
    """Let the other ranks find what this one failed with."""
    with suppress(RuntimeError):  # the store is gone
        _store().set(_key(rank), json.dumps([type(error).__name__, str(error)]))


def peer_failures(world_size: int) -> dict[int, tuple[str, str]]:
    """Return the name and the message of what ranks failed with, as far as they left it and can be asked."""
    found = {}
    with suppress(RuntimeError):
        store = _store()
        for rank in range(world_size):
            if store.check([_key(rank)]):
                name, message = json.loads(store.get(_key(rank)))
                found[rank] = (name, message)
    return found


def clear_failure(rank: int) -> None:
    """Take back what this rank left, before a run that has not failed."""
    _store().delete_key(_key(rank))


def explain_broken_connection(error: BaseException, rank: int, world_size: int) -> None:
    """Leave an error for the others; one that another rank's end has caused is told what that rank failed with."""
    if is_broken_connection(error):
        for other, (name, message) in peer_failures(world_size).items():
            error.add_note(f"rank {other} failed first, with {name}: {message}")
    elif isinstance(error, Exception):
        publish_failure(rank, error)


def _store() -> Any:
    group = dist.group.WORLD
    assert group is not None, "there is a process group where ranks can fail"
    return group.get_group_store()


def _key(rank: int) -> str:
    return f"peer_failures/{rank}"
