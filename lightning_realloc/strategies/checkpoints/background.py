"""Write a checkpoint in a thread while training goes on, one checkpoint at a time.

The threads of all ranks run no collective, which could meet those of training in another order. Each rank reports its
part through the process group's store, and the first rank completes the checkpoint once it has read all reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.messages.failure_store import group_store, is_lost
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Seconds between the first rank's looks for other ranks' reports."""
GRACE_S = 30.0
"""Seconds that the first rank of a failed run waits for other ranks' parts after its own is written."""


class Save(Protocol):
    """One rank's part of a checkpoint that is being written."""

    def write(self) -> Any:
        """Write this rank's part, and return its description as plain data. Raises CheckpointError."""

    def complete(self, parts: list[Any]) -> None:
        """Complete the checkpoint from the descriptions of all ranks. Raises CheckpointError."""

    def discard(self) -> None:
        """Remove what was written."""


class BackgroundSave:
    """The save under way, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: CheckpointError | None = None
        self._lock = threading.Lock()
        self._is_writing = False
        self._actions: list[Callable[[], None]] = []
        self._closed_at: float | None = None

    def __reduce__(self) -> tuple[type[BackgroundSave], tuple[()]]:
        """Pickle as a new object: a strategy is pickled to start its processes, before it saves anything."""
        return BackgroundSave, ()

    def start(self, save: Save, *, token: str, rank: int, world_size: int) -> None:
        """Begin to write. `finish` has to be called before.

        Args:
            token: Name of this save in the store, the same on all ranks and never used before.
        """
        assert self._thread is None, "only one checkpoint is written at a time"
        self._closed_at, self._is_writing = None, True
        keys = [f"checkpoint/{token}/{number}" for number in range(world_size)]
        self._thread = threading.Thread(target=self._run, args=(save, keys, rank), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether there is a save that `finish` has not waited for."""
        return self._thread is not None

    def finish(self) -> None:
        """Wait until the save under way is complete. Collective over all ranks.

        Raises:
            CheckpointError: on every rank, if a rank could not write its part.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        problem, self._problem = self._problem, None
        first = next((one for one in gather_objects(problem) if one is not None), None)
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait for the save under way at the end of a run that failed, and log its error. Not collective."""
        if self._thread is None:
            return
        self._closed_at = time.monotonic()
        self._thread.join()
        self._thread = None
        if self._problem is not None:
            log.error("%s", self._problem)
            self._problem = None

    def after_completion(self, action: Callable[[], None]) -> None:
        """Run an action once the save under way is complete, or now without one. It is dropped if the save fails.

        A CheckpointError of the action is raised by `finish`, if there was a save.
        """
        with self._lock:
            if self._is_writing:
                self._actions.append(action)
                return
        self._act([action])

    def _run(self, save: Save, keys: list[str], rank: int) -> None:
        part: Any
        try:
            part = save.write()
        except CheckpointError as error:
            part = error
        try:
            if rank == 0:
                self._complete(save, [part, *map(self._receive, keys[1:])])
            else:
                group_store().set(keys[rank], encode_value(part))
        except CheckpointError as error:
            self._problem = error
        except RuntimeError as error:  # the rank that hosts the store has ended
            self._problem = CheckpointError(f"no checkpoint was completed, since another rank has ended: {error}")
        except Exception as error:  # a report that no rank of this run wrote
            self._problem = CheckpointError(f"no checkpoint was completed: {type(error).__name__}: {error}")
        with self._lock:
            self._is_writing = False
            actions, self._actions = self._actions, []
        self._act(actions)

    def _act(self, actions: Sequence[Callable[[], None]]) -> None:
        for action in actions if self._problem is None else ():
            try:
                action()
            except CheckpointError as error:
                self._problem = error

    def _complete(self, save: Save, parts: list[Any]) -> None:
        try:
            failed = next((part for part in parts if isinstance(part, CheckpointError)), None)
            if failed is not None:
                raise failed
            save.complete(parts)
        except CheckpointError:
            save.discard()
            raise

    def _receive(self, key: str) -> Any:
        """Return another rank's part, or its error. Gives up on a rank that reports nothing after the run failed."""
        since, store = time.monotonic(), group_store()
        rank = key.rpartition("/")[2]
        while not store.check([key]):  # `get` would block this process's other uses of the store
            if is_lost(int(rank)):
                raise CheckpointError(
                    f"no checkpoint was completed, since rank {rank} was lost; resume from the one before"
                )
            if self._closed_at is not None and time.monotonic() > max(self._closed_at, since) + GRACE_S:
                raise CheckpointError(
                    f"no checkpoint was completed, since rank {rank} has not reported its part within {GRACE_S:g} s "
                    f"after the run failed; resume from the one before"
                )
            time.sleep(POLL_S)
        part = decode_value(store.get(key))
        store.delete_key(key)
        return part
