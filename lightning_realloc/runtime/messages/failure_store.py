"""Publish a failing rank's exception through the store, so that peers report the cause instead of a closed socket.

A rank in a collective gets no message, only a broken connection when the failed rank ends. So a failing rank writes
its error to the process group's store, and a rank that loses a connection reads it there. All errors and losses are
lines under one key, so a rank reads what there is, however many ranks there are. If the rank that hosts the store has
ended, nothing can be read; its own log shows the error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_realloc import errors
from lightning_realloc.errors import RankLost, ReallocError, class_name, shared
from lightning_realloc.runtime.messages.stalls import RankState

PEER_FAILURE_S = 15.0
"""Seconds that a rank waits in one place after another one failed, before it reports that error. It is longer than
ranks take to exchange their errors."""
CHECK_S = 1.0
"""Seconds between two questions to the store while a rank waits."""
STORE_LOST = "the process that hosts the process group's store, mostly rank 0, was lost"
"""Text of errors of ranks that cannot reach the store any more."""
COUNT_KEY = "num_failures_and_losses"
"""Key for the number of failures and losses published since the store exists, also of earlier runs."""
_LIST_KEY = "failures_and_losses"
_FAILED, _LOST, _STARTED = "failed", "lost", "started"
Value = TypeVar("Value")
_BROKEN = re.compile(r"gloo/transport.*(by peer|broken pipe|time(d )?out|connect)", re.IGNORECASE | re.DOTALL)
"""Messages of the RuntimeErrors that gloo raises when another process has ended."""
_FIRST_LOST = re.compile("rank 0,? was lost")


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error only says that another rank has ended."""
    if isinstance(error, RankLost | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def is_loss_of_first_rank(error: BaseException) -> bool:
    """Return whether an error or its notes name rank 0 as lost, or the process that hosts the store."""
    return _FIRST_LOST.search("\n".join((str(error), *getattr(error, "__notes__", ())))) is not None


class Published(NamedTuple):
    """Failures and losses that ranks have published in this run."""

    failures: dict[int, tuple[str, str]]
    """Failed rank -> class name and message of its error."""
    lost: set[int]
    """Ranks whose process has ended, as others have found."""


def read_published(store: Any) -> Published:
    """Return all failures and losses, from a connection to the store. Raises RuntimeError if it cannot be reached."""
    found = Published({}, set())
    if store.add(COUNT_KEY, 0):  # a question for a key that does not exist yet would wait for it
        for rank, kind, error in map(json.loads, store.get(_LIST_KEY).decode().splitlines()):
            if kind == _STARTED:
                found.failures.pop(rank, None)
                found.lost.discard(rank)
            elif kind == _FAILED:
                found.failures[rank] = (error[0], error[1])
            else:
                found.lost.add(rank)
    return found


def publish_failure(rank: int, error: BaseException) -> None:
    """Write this rank's error to the store, for the other ranks to read."""
    with suppress(RuntimeError):  # the rank that hosts the store has ended
        _publish(rank, _FAILED, [class_name(error), str(error)])


def publish_loss(rank: int) -> None:
    """Write to the store that another rank's process has ended. Raises RuntimeError if the store has ended, too."""
    if rank not in read_published(group_store()).lost:
        _publish(rank, _LOST, None)


def publish_start(rank: int) -> None:
    """Delete what is published about this rank, before a new run."""
    published = read_published(group_store())
    if rank in published.failures or rank in published.lost:
        _publish(rank, _STARTED, None)


def peer_failures() -> dict[int, tuple[str, str]]:
    """Return rank -> (class name, message) of the published errors; {} if the store cannot be reached."""
    with suppress(RuntimeError):
        return read_published(group_store()).failures
    return {}


def is_lost(rank: int) -> bool:
    """Return whether a rank has found that the process of ``rank`` has ended. Raises as `publish_loss`."""
    return rank in read_published(group_store()).lost


class PeerFailures:
    """Errors that other ranks published in this run, and how long this rank has waited since.

    A rank that failed and lives on, such as one whose script caught the error, breaks no connection.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_read = 0
        self._failures: dict[int, tuple[str, str]] = {}
        self._waits: tuple[str, int] | None = None
        self._since = 0.0

    @property
    def have_failed(self) -> bool:
        """Whether another rank has failed, and this one has not."""
        return bool(self._failures) and self._rank not in self._failures

    def read(self, store: Any, count: int) -> None:
        """Read the errors if the store's number of failures and losses, ``count``, has changed."""
        if count != self._num_read:
            self._num_read, self._failures = count, read_published(store).failures

    def describe_vain_wait(self, own: RankState, now: float) -> str | None:
        """Return a message, once, when this rank has waited in one place for `PEER_FAILURE_S` since a failure."""
        waits = None if own.waits_for is None else (own.activity, own.stack)
        if waits != self._waits:
            self._waits, self._since = waits, now
        if waits is None or now - self._since < PEER_FAILURE_S:
            return None
        self._since = math.inf
        rank, (name, message) = min(self._failures.items())
        return (
            f"rank {rank} failed with {name}: {message}; rank {self._rank} waits for it in vain in {own.activity} "
            f"({own.place})"
        )


def peer_error(rank: int, name: str, message: str) -> ReallocError:
    """Return the error to raise for another rank's: of the same class if this package defines it."""
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, ReallocError):
        return known(message) if known is RankLost else shared(known(message))
    return shared(ReallocError(f"rank {rank} failed with {name}: {message}"))


def await_watching(wait: Callable[[], Value], *, what: str) -> Value:
    """Return the result of ``wait``, which blocks until other ranks act, unless one of them fails or is lost.

    Raises:
        RankLost: naming the rank; ``what`` says what was waited for.
    """
    outcome: futures.Future[Value] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(wait())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()  # an executor's thread would keep the process from ending
    while not futures.wait((outcome,), CHECK_S).done:
        raise_failure_elsewhere(what)
    return outcome.result()


def raise_failure_elsewhere(what: str) -> None:
    """Raise RankLost, naming the rank, if one failed or was lost; ``what`` says what this rank waits for."""
    if (cause := _cause_to_end()) is not None:
        raise RankLost(f"{cause}; this rank waited for {what}")


def _cause_to_end() -> str | None:
    """Return the first rank that failed or was lost; None if no rank knows of one."""
    try:
        published = read_published(group_store())
    except dist.DistNetworkError:
        return STORE_LOST
    for rank, (name, message) in sorted(published.failures.items()):
        return f"rank {rank} failed with {name}: {message}"
    return f"rank {min(published.lost)} was lost" if published.lost else None


def explain_broken_connection(error: BaseException, rank: int) -> None:
    """Publish an error, or, if it only says that another rank has ended, add the peers' errors to it as notes."""
    if isinstance(error, RankLost):  # names the rank already, and the store may be lost with it
        return
    if is_broken_connection(error):
        try:
            for other, (name, message) in sorted(read_published(group_store()).failures.items()):
                error.add_note(f"rank {other} failed first, with {name}: {message}")
        except RuntimeError:
            error.add_note(STORE_LOST)
    elif isinstance(error, Exception | SystemExit):
        publish_failure(rank, error)


def _publish(rank: int, kind: str, error: object) -> None:
    store = group_store()
    store.append(_LIST_KEY, json.dumps([rank, kind, error]) + "\n")
    store.add(COUNT_KEY, 1)


def group_store() -> Any:
    """Return the store of the process group, without the prefix of its keys."""
    group = dist.group.WORLD
    assert group is not None, "there is a process group where ranks can fail"
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
