"""Agree on the error that all ranks raise when one of them fails: that of the lowest rank with a failure of its own.

A failing rank writes its error to the store of the process group, and tells its neighbours in the tree of hosts, which
pass it on. Every rank that has heard of a failure counts itself in the store. Once all are counted, all read the same
errors there. A lost connection counts only if no other failure is known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from lightning_realloc.errors import RankLost, class_name
from lightning_realloc.runtime.messages.failure_store import (
    group_store,
    is_broken_connection,
    peer_error,
    peer_failures,
    publish_failure,
)
from lightning_realloc.runtime.messages.frame_port import FramePort, Header
from lightning_realloc.runtime.messages.host_tree import TreeNode
from lightning_realloc.runtime.messages.watchdog import Watchdog

FAILURE_DEADLINE_S = 10.0
"""Seconds that a failed rank waits until all others have heard of a failure. Ranks in a collective never do."""
MAX_ERRORS = 64
"""Errors that are written down: when a host is lost, all ranks lose a connection."""
MIN_QUESTION_S = 0.01
"""Seconds between two looks at the number of ranks that have heard of a failure; more with many ranks."""
QUESTIONS_PER_S = 10_000
"""Looks of all ranks together."""


class FailureAgreement:
    """What one rank knows of failures.

    Args:
        node: This rank's place in the tree of hosts.
        world_size: Number of ranks.
        port: Sends and receives frames.
        kind: Kind of frames about failures.
        group: Process group of the frames; None for a single process.
        watchdog: Names lost ranks; None: errors name no rank.
    """

    def __init__(
        self,
        node: TreeNode,
        world_size: int,
        port: FramePort,
        kind: int,
        group: dist.ProcessGroup | None,
        watchdog: Watchdog | None,
    ) -> None:
        self._node, self._world_size, self._port, self._kind, self._watchdog = node, world_size, port, kind, watchdog
        self._key = "" if group is None else f"failure_agreement/{group.group_name}"
        self._heard: int | None = None
        """The first failed rank that this one has heard of, or itself."""
        self._errors: dict[int, tuple[str, str]] = {}
        """Rank -> class name and message of its error, as far as they are known."""
        self.has_concluded = False
        """Whether this rank has raised, or is about to raise, the error of a failure."""

    @property
    def is_known(self) -> bool:
        """Whether a rank is known to have failed."""
        return self._heard is not None

    def learn(self, rank: int) -> None:
        """Take in that a rank has failed, and tell the neighbours of the first such rank.

        The frame is a header without content: a thread that waits for a content never ends once its sender has left.
        """
        if self._heard is not None:
            return
        self._heard = rank
        if self._key:
            for neighbour in self._neighbours():
                with suppress(RankLost):  # it has ended already
                    self._port.send(neighbour, Header(self._kind, 0, 0, rank, 0))

    def conclude(self, error: Exception | None, meanwhile: Callable[[], object]) -> NoReturn:
        """Wait until all ranks have heard of a failure, and raise the error of the lowest failed rank.

        Args:
            error: This rank's exception; None if only another rank failed.
            meanwhile: Takes in a frame that has arrived; raises nothing.

        Raises:
            ReallocError: that error; the rank on which it happened raises its original object.
        """
        self.has_concluded, rank = True, self._node.rank
        if error is not None:
            error = self.explained(error)
            self._errors[rank] = (class_name(error), str(error))
            self.learn(rank)
        if self._has_store:
            with suppress(RuntimeError):  # it was lost
                self._write_own()
                self._wait_for_all(meanwhile)
                self._errors |= self._written()
        if not self._errors:
            assert self._heard is not None, "a rank concludes after an error of its own or of another one"
            self._errors[self._heard] = RankLost.__name__, "its error could not be read; see its own log"
        failed = [one for one, (name, _) in sorted(self._errors.items()) if name != RankLost.__name__]
        failed = failed or sorted(self._errors)
        if error is not None and failed[0] == rank:
            raise error
        raise peer_error(failed[0], *self._errors[failed[0]]) from error

    def explained(self, error: Exception) -> Exception:
        """Publish an error of this rank and return it; for a broken connection, return a RankLost that names the rank.

        Errors that other ranks published are read then.
        """
        if not self._key:
            return error
        if not is_broken_connection(error):
            if self._has_store:
                publish_failure(self._node.rank, error)
            return error
        if self._has_store:
            self._errors |= peer_failures()
            self._probe_neighbours()
        known = ((rank, name, text) for rank, (name, text) in sorted(self._errors.items()))
        named = next((f"rank {rank} failed first, with {name}: {text}" for rank, name, text in known), "")
        if not named and self._watchdog is not None:
            named = self._watchdog.describe_lost(self._port.lost)
        if isinstance(error, RankLost) and not named:
            return error
        return rank_lost(error, named)

    def _neighbours(self) -> list[int]:
        return [*self._node.children, *([] if self._node.parent is None else [self._node.parent])]

    def _probe_neighbours(self) -> None:
        """Note neighbours whose process has ended."""
        for rank in self._neighbours():
            with suppress(RankLost):
                self._port.probe(rank)

    # ---- in the store
    @property
    def _has_store(self) -> bool:
        return bool(self._key) and (self._watchdog is None or not self._watchdog.store_is_lost)

    def _write_own(self) -> None:
        own = self._errors.get(self._node.rank)
        if own is not None and group_store().add(f"{self._key}/errors", 1) <= MAX_ERRORS:
            group_store().append(f"{self._key}/written", json.dumps([self._node.rank, *own]) + "\n")

    def _wait_for_all(self, meanwhile: Callable[[], object]) -> None:
        count_key, store = f"{self._key}/heard", group_store()
        count, deadline = store.add(count_key, 1), time.monotonic() + FAILURE_DEADLINE_S
        while count < self._world_size - len(self._port.lost) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(max(MIN_QUESTION_S, self._world_size / QUESTIONS_PER_S))
            count = store.add(count_key, 0)

    def _written(self) -> dict[int, tuple[str, str]]:
        if not group_store().add(f"{self._key}/errors", 0):
            return {}
        lines = group_store().get(f"{self._key}/written").decode().splitlines()
        return {rank: (name, message) for rank, name, message in map(json.loads, lines)}


def rank_lost(error: Exception, named: str) -> RankLost:
    """Return the error for a broken connection, with the lost ranks if they are known."""
    lost = RankLost(
        f"{named or 'a rank ended while this one waited for it in a collective'} ({error}); see its own log, and "
        f"the system's log for an out-of-memory kill"
    )
    lost.__cause__ = error
    return lost
