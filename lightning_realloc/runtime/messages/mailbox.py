"""Asynchronous point-to-point messages between ranks, and agreement on the error to raise when a rank fails.

A frame's header names its kind, run, call and source; its content follows in a second message. A rank that waits for
one frame stores all others that arrive meanwhile. So frames may arrive in any order, and two ranks may be an iteration
apart. Frames are sent over gloo between host memories, because they hold samples and no weights.

A failing rank sends a failure frame to all ranks. Every rank that receives one sends its own and waits for the rest.
So all ranks raise the same error: that of the lowest rank with a failure of its own. A lost connection counts only if
no other failure is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost, ReallocError
from lightning_realloc.runtime.messages.bulk_messages import BulkChannel, wait_for
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.failure_store import (
    is_broken_connection,
    peer_error,
    peer_failures,
    publish_failure,
)
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.watchdog import Watchdog

FAILURE_DEADLINE_S = 10.0
"""Seconds that a failed rank waits for the failure frames of the others. Ranks in a collective never send one."""

PROBE_INTERVAL_S = 1.0
"""Seconds between two probes of the awaited rank during a wait. The interval grows up to `MAX_PROBE_INTERVAL_S`."""
MAX_PROBE_INTERVAL_S = 5.0
MAX_PAUSE_S = 0.001
"""Longest pause between two checks for a frame. Pauses are 1/64 of the wait so far, so short waits stay short."""

_HEADER_TAG, _CONTENT_TAG = 1, 2
_WAITING = "this one waited for its data"


class FrameKind(IntEnum):
    """Content of a frame."""

    DIRECTORY = 0
    """Ids, lengths and values per sample that a generating call made, to every rank."""
    ROWS = 1
    """A call's results for some samples, to a rank that uses them next."""
    CALL_METRICS = 2
    """Values per sample and times of all calls before training, to every rank."""
    METRICS = 3
    """Metrics of a training call, to the ranks outside it."""
    FAILURE = 4
    """Error of a rank, to every rank."""
    HISTORY = 5
    """Tokens that a rank generated in a call, to the drafters of ranks that generate other samples."""
    RETURNED = 6
    """Responses that a rank finished for another rank."""
    PROBE = 7
    """Empty frame that tests the connection to an awaited rank: sending to a process that has ended fails."""
    QUESTION = 8
    """Turn of a sample, to the rank where it began, which asks its environment."""
    ANSWER = 9
    """Answer of an environment, to the rank that sent the question."""


class Frame(NamedTuple):
    """Identity of a frame."""

    kind: FrameKind
    run: int
    """Number of the iteration through the calls, the same on all ranks."""
    call: int
    """Index of the call in the dataflow."""
    source: int
    """Rank that sent the frame."""
    part: int = 0
    """Number of the frame among those of the same kind, call and source."""


def rank_lost(error: Exception, named: str) -> RankLost:
    """Return the error for a broken connection, with the lost ranks if they are known."""
    lost = RankLost(
        f"{named or 'a rank ended while this one waited for it in a collective'} ({error}); see its own log, and "
        f"the system's log for an out-of-memory kill"
    )
    lost.__cause__ = error
    return lost


class Mailbox:
    """Sends frames to other ranks and receives theirs.

    Args:
        rank: Rank of this process.
        world_size: Number of processes; a single process never sends.
        group: All processes, over gloo, used by mailboxes only. None for a single process.
        watchdog: Watchdog whose record gets the waits, and which names lost ranks; None: errors name no rank.
    """

    def __init__(
        self, rank: int, world_size: int, group: dist.ProcessGroup | None, watchdog: Watchdog | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.group = group
        """Process group that sends the frames; None for a single process."""
        self._watchdog = watchdog
        self.record = FlightRecord() if watchdog is None else watchdog.record
        """This rank's activities."""
        self._arrived: dict[Frame, Tensor] = {}
        self._failures: dict[int, tuple[bool, str, str]] = {}
        """Rank -> (whether the failure is its own, class name, message)."""
        self._informed: set[int] = set()
        """Ranks that knew of this rank's failure before its frame, and may leave the frame unread."""
        self._pending: list[tuple[int, dist.Work, Tensor]] = []
        """(run, work, memory) of messages that were sent and not yet waited for."""
        self._incoming: tuple[dist.Work, Tensor] | None = None
        """The header that is received next, from any rank."""
        self._probe = torch.tensor([FrameKind.PROBE, 0, 0, 0, 0], dtype=torch.int64)
        self._probes: dict[int, list[dist.Work]] = {}
        """Rank -> probes since the last frame to it. A rank that receives nothing more leaves them unread."""
        self._wait_began, self._probe_at = 0.0, 0.0
        """Moments of `time.monotonic`: the beginning of the current wait, and its next probe."""
        self._lost: set[int] = set()
        """Ranks whose process is known to have ended."""
        self.seconds_waited = 0.0
        """Seconds spent in `receive` since this mailbox was made."""

    @cached_property
    def bulk_channel(self) -> BulkChannel:
        """Channel for messages that are too large to wait for; only with several processes."""
        assert self.group is not None, "a single process has no peers to send to"
        return BulkChannel(self.group)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self._world_size) if rank != self._rank)

    def send(self, to: Iterable[int], kind: FrameKind, run: int, call: int, content: Tensor, *, part: int = 0) -> None:
        """Send a (bytes,) uint8 tensor on the host to some ranks without waiting. It must not change afterwards."""
        header = torch.tensor([kind, run, call, part, content.numel()], dtype=torch.int64)
        for rank in to:
            self._start(header, rank, _HEADER_TAG, run)
            self._pending += [(run, probe, self._probe) for probe in self._probes.pop(rank, ())]  # received before it
            if content.numel():
                self._start(content, rank, _CONTENT_TAG, run)

    def receive(self, kind: FrameKind, run: int, call: int, source: int, *, part: int = 0) -> Tensor:
        """Wait for a frame, and return and remove its content.

        Raises:
            ReallocError: if a rank failed, the same on every rank; in the error's class if this package defines it.
        """
        frame = Frame(kind, run, call, source, part)
        if frame not in self._arrived:
            begin = time.perf_counter()
            self._begin_wait()
            with self.record.during(f"waiting for data of rank {source}", waits_for=(source,)):
                while frame not in self._arrived:
                    self._receive_next(source)
                    if self._failures:
                        self.fail(None)
            self.seconds_waited += time.perf_counter() - begin
        return self._arrived.pop(frame)

    def poll(self, awaited: int | None = None) -> None:
        """Store the frames that have arrived, without waiting for others; see `take`.

        Args:
            awaited: Rank that this one waits for, whose connection is tested every few seconds; None: none.

        Raises:
            ReallocError: if a rank failed, as `receive` does.
            RankLost: if the awaited rank has ended.
        """
        while self._next_incoming()[1][-1] >= 0:
            self._receive_next(self._rank)  # of which nothing is awaited: the header is here
        if self._failures:
            self.fail(None)
        if awaited is not None:
            self._probe_if_due(awaited)

    def take(self, kind: FrameKind, run: int, call: int) -> list[tuple[int, Tensor]]:
        """Remove the stored frames of one kind and call; return source and content of each, as they arrived."""
        frames = [frame for frame in self._arrived if frame[:3] == (kind, run, call)]
        return [(frame.source, self._arrived.pop(frame)) for frame in frames]

    def wait_until(self, is_done: Callable[[], bool], source: int, meanwhile: Callable[[], None]) -> None:
        """Call ``meanwhile`` again and again until a message of ``source`` makes ``is_done`` true.

        Raises:
            RankLost: if that rank has ended.
        """
        self._begin_wait()
        began = time.monotonic()
        while not is_done():
            meanwhile()
            self._pause(source, began)

    def release(self, run: int) -> None:
        """Wait until all frames of ``run`` and earlier runs were received, and free their memory."""
        due = [work for sent_in, work, _ in self._pending if sent_in <= run]
        with self.record.during("waiting until data was received", waits_for=()):
            for work in due:
                wait_for(work, meanwhile=_WAITING)
        self._pending = [sent for sent in self._pending if sent[0] > run]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            with self.record.during("waiting for all ranks", waits_for=self.others):
                dist.barrier(group=self.group)

    @property
    def has_failed(self) -> bool:
        """Whether a failure frame was sent or received. No other frames can be sent then."""
        return bool(self._failures)

    def fail(self, error: Exception | None) -> NoReturn:
        """Exchange failure frames with all ranks and raise the error of the lowest failed rank.

        Args:
            error: This rank's exception; None if only another rank failed.

        Raises:
            ReallocError: that error; the rank on which it happened raises its original object.
        """
        if error is not None:
            error = self.explained(error)
        self._failures[self._rank] = (error is not None, type(error).__name__, str(error))
        content = encode_message((*self._failures[self._rank], list(self._failures)))
        deadline = time.monotonic() + FAILURE_DEADLINE_S
        self._begin_wait()
        sent: dict[int, list[dist.Work]] = {}
        for rank in self.others:
            num_sent_before = len(self._pending)
            with suppress(RankLost):  # this rank has ended already: still send to the others
                self.send([rank], FrameKind.FAILURE, 0, 0, content)
            sent[rank] = [work for _, work, _ in self._pending[num_sent_before:]]
        # This fails if a rank has ended or is in a collective: then raise the failures known so far.
        with suppress(ReallocError):
            while missing := set(self.others) - self._failures.keys() - self._lost:
                try:
                    self._receive_next(min(missing), deadline)
                except RankLost:
                    if min(missing) not in self._lost:
                        raise
            for work in (work for rank in sent.keys() - self._informed for work in sent[rank]):
                wait_for(work, _time_until(deadline), meanwhile=_WAITING)
        self._raise_lowest(error)

    def explained(self, error: Exception) -> Exception:
        """Publish an error of this rank and return it; for a broken connection, return a RankLost that names the rank.

        Errors that other ranks published are read then.
        """
        if self.group is None:
            return error
        has_store = self._watchdog is None or not self._watchdog.store_is_lost
        if not is_broken_connection(error):
            if has_store:
                publish_failure(self._rank, error)
            return error
        if has_store:
            self._failures |= {rank: (True, *failure) for rank, failure in peer_failures(self._world_size).items()}
            self._probe_all()
        named = self._first_failure() or ("" if self._watchdog is None else self._watchdog.describe_lost(self._lost))
        if isinstance(error, RankLost) and not named:
            return error
        return rank_lost(error, named)

    def _first_failure(self) -> str:
        """Return the lowest failed rank with its error; empty if no failure is known."""
        known = ((rank, name, text) for rank, (is_own, name, text) in sorted(self._failures.items()) if is_own)
        return next((f"rank {rank} failed first, with {name}: {text}" for rank, name, text in known), "")

    def _raise_lowest(self, own: Exception | None) -> NoReturn:
        names = {rank: name for rank, (is_own, name, _) in sorted(self._failures.items()) if is_own}
        failed = [rank for rank, name in names.items() if name != RankLost.__name__] or list(names)
        if not failed:
            raise ReallocError("another rank ended without reporting an error; see its own log") from own
        if own is not None and failed[0] == self._rank:
            raise own
        _, name, message = self._failures[failed[0]]
        raise peer_error(failed[0], name, message) from own

    def _start(self, tensor: Tensor, to: int, tag: int, run: int) -> None:
        self._pending.append((run, self._start_send(tensor, to, tag), tensor))

    def _start_send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        try:
            work = dist.isend(tensor, to, group=self.group, tag=tag)
        except RuntimeError as error:
            self._lost.add(to)
            raise RankLost(f"rank {to} ended before this one could send to it ({error}); see its own log") from error
        assert work is not None, "this rank is part of the group"
        return work

    def _receive_next(self, awaited: int, deadline: float = math.inf) -> None:
        """Receive and store the next frame of any rank.

        Args:
            awaited: Rank that this one waits for.
            deadline: Moment of `time.monotonic` until which to wait.

        Raises:
            RankLost: if the rank has ended, or at the deadline.
        """
        source, header = self._next_header(awaited, deadline)
        kind, run, call, part, size = header
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            timeout = None if deadline == math.inf else _time_until(deadline)
            wait_for(self._start_receive(content, source, _CONTENT_TAG), timeout, meanwhile=_WAITING)
        if kind == FrameKind.FAILURE:
            is_own, name, message, known = decode_message(content)
            self._failures[source] = (is_own, name, message)
            if self._rank in known:
                self._informed.add(source)
        elif kind != FrameKind.PROBE:
            self._arrived[Frame(FrameKind(kind), run, call, source, part)] = content

    def _next_header(self, awaited: int, deadline: float) -> tuple[int, list[int]]:
        """Return the source and the fields of the next header.

        Checks for it repeatedly. A wait of gloo's for any rank never ends when one is lost, and a time-out of gloo's
        breaks the connections of all.
        """
        work, fields = self._next_incoming()
        began = time.monotonic()
        while fields[-1] < 0:
            if time.monotonic() > deadline:
                raise RankLost("other ranks did not answer in time; see their own logs")
            self._pause(awaited, began)
        wait_for(work, meanwhile=_WAITING)
        self._incoming = None
        return int(work._source_rank()), fields.tolist()

    def _next_incoming(self) -> tuple[dist.Work, npt.NDArray[np.int64]]:
        """Return the receive of the next header, and its fields; the last one, a size, is negative until it arrives."""
        if self._incoming is None:
            empty = torch.full((5,), -1, dtype=torch.int64)
            self._incoming = self._start_receive(empty, None, _HEADER_TAG), empty
        work, header = self._incoming
        return work, header.numpy()

    def _pause(self, awaited: int, began: float) -> None:
        """Pause between two checks of a wait that began at this moment of `time.monotonic`."""
        self._probe_if_due(awaited)
        time.sleep(min(MAX_PAUSE_S, (time.monotonic() - began) / 64))

    def _probe_if_due(self, rank: int) -> None:
        now = time.monotonic()
        if now > self._probe_at:
            self._probe_rank(rank)
            interval = max(PROBE_INTERVAL_S, (now - self._wait_began) / 10)
            self._probe_at = now + min(MAX_PROBE_INTERVAL_S, interval)

    def _begin_wait(self) -> None:
        """Begin to count the seconds to the next probe, which frames of other ranks do not delay."""
        self._wait_began = time.monotonic()
        self._probe_at = self._wait_began + PROBE_INTERVAL_S

    def _probe_rank(self, rank: int) -> None:
        """Raise RankLost if a rank has ended, or the process that hosts the store."""
        if self._watchdog is not None and self._watchdog.store_is_lost:
            raise RankLost("the process group's store has ended")
        self._probes.setdefault(rank, []).append(self._start_send(self._probe, rank, _HEADER_TAG))

    def _probe_all(self) -> None:
        """Note every rank whose process has ended."""
        for rank in self.others:
            with suppress(RankLost):
                self._probe_rank(rank)

    def _start_receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        """Start to receive a tensor of one rank, or of any for None."""
        try:
            return cast(dist.Work, dist.irecv(tensor, source, group=self.group, tag=tag))
        except RuntimeError as error:
            raise RankLost(f"a rank ended before this one could receive from it ({error}); see its own log") from error


def _time_until(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))
