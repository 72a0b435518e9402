"""Name the rank that others wait for: each rank's thread compares its current call with the longest one so far.

A rank whose call takes much longer asks all ranks for their state; see `state_board`. It then logs one message: the
ranks that wait, the ranks that do not, since when, and in which line of code. A late rank writes its stacks to its
flight record.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lightning_realloc.errors import RankLost
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.failure_store import (
    STORE_LOST,
    PeerFailures,
    group_store,
    is_broken_connection,
    publish_loss,
    read_published,
)
from lightning_realloc.runtime.messages.flight_record import Activity, FlightRecord
from lightning_realloc.runtime.messages.kept_states import keep_state
from lightning_realloc.runtime.messages.stalls import (
    WAITING_PACKAGES,
    RankState,
    checksum_of,
    describe_stall,
    handles_error,
    in_activity,
    is_in_torch_distributed,
    module_of,
    place_of,
)
from lightning_realloc.runtime.messages.state_board import ANSWER_S, StateBoard

log = logging.getLogger(__name__)

T = TypeVar("T")
StallAction = Literal["warn", "end"]
"""Reaction to a call that takes far too long: a message only, or the end of the process after it."""
FIRST_CALL_S = 1800.0
"""Seconds after which a stall ends a process in its set-up or the first call of a name, with ``on_stall="end"``.

Models load, compile and start engines then, and nothing shows how long that takes. Until then a stall is only logged.
"""
STALL_EXIT_CODE = 124
"""Exit code of a process that ended because of a stall, as of the command ``timeout``."""
POLL_S = 1.0
"""Seconds between two checks of this rank's call and of questions of other ranks."""


class _StoreSilentError(Exception):
    """The store of the process group does not answer."""


class Watchdog:
    """Thread that watches the current call of this rank, and answers the questions of other ranks.

    Args:
        record: Activities of this rank.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Seconds beyond the longest call so far of the same name, after which a rank asks.
        action: Whether the process continues to wait after the message.
        folder: Folder for flight records.
        before_end: Called on one of the ranks that a stall ends, in a thread that may take `ANSWER_S`.
    """

    def __init__(
        self,
        record: FlightRecord,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        action: StallAction,
        folder: Path,
        before_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.record = record
        """Activities of this rank."""
        self._rank, self._world_size = rank, world_size
        self._timeout_s, self._action, self._folder, self._before_end = timeout_s, action, folder, before_end
        self._watched = threading.get_ident()
        self._board: StateBoard | None = None
        self._store_thread: threading.Thread | None = None
        """Thread of the latest operations on the store."""
        self._store_lock = threading.Lock()
        self._next_warning: tuple[Activity, float] | None = None
        """The call that was warned of, and its duration at which to warn again."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = 0
        """Number of the latest question that this rank answered."""
        self._published = ""
        """Activities that this rank published last."""
        self._peers = PeerFailures(rank)
        self._host_state: RankState | None = None
        """Latest known state of rank 0, which mostly hosts the store and takes it along when it is lost."""
        self.store_is_lost = False
        """Whether the process that hosts the store has ended. The store is not asked again then."""

    def start(self) -> None:
        """Start watching the thread that calls this. Needs the process group."""
        self.record.start_run()
        self._watched = threading.get_ident()
        self._board, self._host_state, self.store_is_lost = None, None, False  # of an earlier process group
        self._peers = PeerFailures(self._rank)
        self._stopped.clear()
        with suppress(_StoreSilentError):  # the thread tries again, and reports it when this rank is late
            self._reach_store(lambda board: None)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and say so to ranks that ask later."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join(2 * ANSWER_S)
        self._thread = None
        with suppress(_StoreSilentError):
            self._reach_store(
                lambda board: self._publish(board, self._state(self._answered, looks_at_code=False), has_ended=True)
            )

    def explain(self, error: BaseException) -> None:
        """Add a note with the lost ranks to an error that is a broken connection of unknown cause."""
        is_known = isinstance(error, RankLost) or bool(getattr(error, "__notes__", ()))
        if is_broken_connection(error) and not is_known and (lost := self.describe_lost()):
            error.add_note(lost)

    def describe_lost(self, known: Collection[int] = ()) -> str:
        """Return the lost ranks, with the last known activity of each; empty if all answer. Other ranks learn of them.

        For a rank that has lost a connection. Other ranks may have ended meanwhile; these said so.

        Args:
            known: Ranks whose process is known to have ended; () asks all ranks, which takes `ANSWER_S`.
        """
        try:
            return self._reach_store(lambda board: self._name_lost(board, known), patience_s=4 * ANSWER_S)
        except _StoreSilentError:
            host = "" if self._host_state is None else f"; rank 0 was last seen{in_activity(self._host_state)}"
            return f"{STORE_LOST}{host}"

    def _name_lost(self, board: StateBoard, known: Collection[int]) -> str:
        lost = sorted(known) or sorted(read_published(board.store).lost) or board.find_silent()
        for rank in lost:
            publish_loss(rank)
        return "; ".join(f"rank {rank} was lost{in_activity(board.last_state(rank))}" for rank in lost)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            late = self._late_activity()
            if late is not None:
                self._report(late)
            with suppress(_StoreSilentError):
                self._reach_store(self._answer)
            if self._peers.have_failed:
                self._report_failure()

    def _report_failure(self) -> None:
        """Log the error of a rank that has failed and lives on, for which this one waits, and end as after a stall."""
        own = self._state(0)
        if handles_error(sys._current_frames().get(self._watched)):  # hooks after an error may save together
            return
        if (message := self._peers.describe_vain_wait(own, time.monotonic())) is not None:
            log.error("%s", message)
            if self._action == "end":
                self._end(self._rank)

    def _late_activity(self) -> Activity | None:
        """Return the current call if it takes too long."""
        current = self.record.current()[0]
        limit = self._timeout_s + self.record.longest_s(current.name)
        if self._next_warning is not None and self._next_warning[0] is current:
            limit = self._next_warning[1]
        seconds = current.elapsed(time.monotonic())
        if seconds < limit:
            return None
        self._next_warning = current, 2 * seconds
        return current

    def _report(self, late: Activity) -> None:
        """Log for whom this rank waits, and end the process if that was asked for."""
        own = self._state(0)
        if own.waits_for is None or self.store_is_lost:  # then the wait itself ends
            return
        is_certain, first_waiting = bool(own.usual_s), self._rank
        try:
            stall = self._reach_store(StateBoard.find_stall, patience_s=6 * ANSWER_S)
            if stall is None:
                return
            is_certain, first_waiting = stall.is_certain, min((rank for rank, _ in stall.waiting), default=self._rank)
            message = describe_stall(self._rank, own, stall)
        except _StoreSilentError:
            message = (
                f"rank {self._rank} has waited {own.seconds:.0f} s in {own.activity} ({own.place}), and the store of "
                f"the process group does not answer: the process that hosts it, mostly rank 0, is stopped or lost"
            )
        if self.record.current()[0] is not late:  # it has moved on while others answered
            return
        log.warning("%s", message)
        if self._action == "end" and (is_certain or own.seconds > FIRST_CALL_S):
            self._end(first_waiting)

    def _end(self, first_waiting: int) -> None:
        """End the process; the first rank that waits says how to resume."""
        file = write_flight_record(self.record, self._folder, self._rank)
        log.error("rank %d ends because of on_stall='end'; its latest activities are in %s", self._rank, file)
        if self._rank == first_waiting:
            last_words = threading.Thread(target=self._before_end, daemon=True)  # may wait for an object store
            last_words.start()
            last_words.join(ANSWER_S)
        logging.shutdown()
        os._exit(STALL_EXIT_CODE)

    # ---- questions and answers through the store
    def _reach_store(self, action: Callable[[StateBoard], T], *, patience_s: float | None = None) -> T:
        """Run operations on the store in a thread of their own: the store of a stopped process never answers.

        The first ones also connect to it.

        Raises:
            _StoreSilentError: if they fail, or do not end in time.
        """
        results: list[T] = []

        def run() -> None:
            board = self._board
            try:
                results.append(action(board or self._introduce()))
            except dist.DistNetworkError:
                if board is not None and board is self._board:  # not one of an earlier process group
                    self.store_is_lost = True
            except RuntimeError:
                pass  # it did not answer in time

        if self.store_is_lost:
            raise _StoreSilentError
        with self._store_lock:
            if self._store_thread is None or not self._store_thread.is_alive():
                self._store_thread = threading.Thread(target=run, name="watchdog's store", daemon=True)
                self._store_thread.start()
                self._store_thread.join(patience_s or 2 * ANSWER_S)
        if not results:
            raise _StoreSilentError
        return results[0]

    def _introduce(self) -> StateBoard:
        """Connect to the store, and publish this rank's state for ranks that ask before it answers."""
        board = StateBoard(_connect(), self._rank, self._world_size, lambda: self._answer(board))
        self._answered = board.join()
        self._board = board
        self._publish(board, self._state(self._answered, looks_at_code=False))
        return board

    def _answer(self, board: StateBoard) -> None:
        """Publish this rank's state if a rank asked for it, or it has changed.

        A rank that works when it is asked also writes its flight record.
        """
        asked, self._host_state, failures = board.read_news()
        self._peers.read(board.store, failures)
        is_asked = asked > self._answered
        state = self._state(asked, looks_at_code=is_asked)
        if is_asked or state.activity != self._published:
            self._publish(board, state)
        if is_asked and state.waits_for is None:
            write_flight_record(self.record, self._folder, self._rank)
        self._answered, self._published = asked, state.activity

    def _publish(self, board: StateBoard, state: RankState, *, has_ended: bool = False) -> None:
        keep_state(self._rank, state)
        board.publish(replace(state, has_ended=has_ended))

    def _is_in_collective(self) -> bool:
        """Return whether the watched thread, or one of autograd's, waits in torch's collectives or our transfers."""
        frames = dict(sys._current_frames())
        watched = frames.pop(self._watched, None)
        if watched is not None and module_of(watched).startswith(WAITING_PACKAGES):
            return True
        return any(map(is_in_torch_distributed, filter(None, (watched, *frames.values()))))

    def _state(self, question: int, *, looks_at_code: bool = True) -> RankState:
        """Return this rank's state; without a look at the code, it has no place, and no wait in a collective.

        A frame that is looked at keeps the tensors of its variables alive meanwhile.
        """
        current = self.record.current()
        frame = sys._current_frames().get(self._watched) if looks_at_code else None
        waits_for = current[-1].waits_for
        if waits_for is None and looks_at_code and self._is_in_collective():
            waits_for = ()
        return RankState(
            activity=", ".join(activity.name for activity in current),
            seconds=current[0].elapsed(time.monotonic()),
            usual_s=self.record.longest_s(current[0].name),
            place=place_of(frame),
            stack=checksum_of(frame),
            waits_for=waits_for,
            answers=question,
        )


def write_flight_record(record: FlightRecord, folder: Path, rank: int) -> Path:
    """Write a rank's latest activities and the stacks of its threads, and return the file.

    A file that cannot be written gets a warning: the run goes on, or ends for its own reason.
    """
    file = folder / f"rank{rank}.txt"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("w") as stream:
            stream.write("\n".join(["Latest activities, seconds before now, and how long each took:", *record.lines()]))
            stream.write("\n\nStacks:\n")
            stream.flush()
            faulthandler.dump_traceback(stream)

    try:
        retried(write, file)
    except OSError as error:
        log.warning("%s cannot be written (%s); the rank's latest activities are lost", file, error.strerror)
    return file


def _connect() -> Any:
    """Return a connection of its own to the process group's store: calls of a shared one wait for each other."""
    store = group_store()
    if not isinstance(store, TCPStore):
        return store
    return TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S)
    )
