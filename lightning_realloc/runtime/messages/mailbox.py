"""Asynchronous point-to-point messages between ranks, and agreement on the error to raise when a rank fails.

A frame's header names its kind, run, call and source; its content follows in a second message. A thread stores frames
as they arrive, also while this rank computes. So frames may arrive in any order, and two ranks may be an iteration
apart. Frames are sent over gloo between host memories, because they hold samples and no weights.

What every rank needs of every other goes through a tree of hosts: each rank gives its part to the first rank of its
host, whose thread merges and passes on the parts of its host, and brings the merged whole to all ranks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cached_property
from threading import Lock, Thread
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_realloc.errors import RankLost
from lightning_realloc.runtime.messages.bulk_messages import BulkChannel
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.failure_agreement import FailureAgreement
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.frame_port import FramePort, Header
from lightning_realloc.runtime.messages.host_tree import Mergeable, PartCollector, TreeNode
from lightning_realloc.runtime.messages.watchdog import Watchdog

PROBE_INTERVAL_S = 1.0
"""Seconds between two probes of the awaited rank during a wait. The interval grows up to `MAX_PROBE_INTERVAL_S`."""
MAX_PROBE_INTERVAL_S = 5.0
MAX_PAUSE_S = 0.001
"""Longest pause between two checks for a frame. Pauses are 1/64 of the wait so far, so short waits stay short."""
MAX_IDLE_PAUSE_S = 0.02
"""The same of the thread that stores frames while this rank computes; its pauses double while nothing arrives."""
WHOLE = -1
"""Source of frames with parts of several ranks."""


class FrameKind(IntEnum):
    """Content of a frame."""

    DIRECTORY = 0
    """Ids, lengths and values per sample that a generating call made: a whole."""
    ROWS = 1
    """A call's results for some samples, to a rank that uses them next."""
    CALL_METRICS = 2
    """Values per sample and times of all calls before training: a whole."""
    METRICS = 3
    """Metrics of a training call, to the ranks outside it."""
    FAILURE = 4
    """Number of a rank that failed, to every rank; its error is in the store."""
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
    CHUNK = 10
    """Responses that came before all were generated, to a rank that works on them meanwhile."""
    PART = 11
    """Part of a whole, to the rank that merges it with others."""


_WHOLES = (FrameKind.DIRECTORY, FrameKind.CALL_METRICS)


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


class Mailbox:
    """Sends frames to other ranks and receives theirs.

    Args:
        rank: Rank of this process.
        world_size: Number of processes; a single process never sends.
        group: All processes, over gloo, used by mailboxes only. None for a single process.
        watchdog: Watchdog whose record gets the waits, and which names lost ranks; None: errors name no rank.
        hosts: Ranks of each host; (): all are on one.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        watchdog: Watchdog | None = None,
        *,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.group = group
        """Process group that sends the frames; None for a single process."""
        self._port = FramePort(group, probe=FrameKind.PROBE)
        self._node = TreeNode.find(rank, hosts or [range(world_size)])
        self._collector = PartCollector(self._node)
        self._watchdog = watchdog
        self.record = FlightRecord() if watchdog is None else watchdog.record
        """This rank's activities."""
        self._taking_in = Lock()
        """Held by the thread that stores frames: this rank's, or the one in the background."""
        self._arrived: dict[Frame, Tensor] = {}
        self._broken: Exception | None = None
        """Error of the thread in the background."""
        self._failure = FailureAgreement(self._node, world_size, self._port, FrameKind.FAILURE, group, watchdog)
        self._wait_began, self._probe_at = 0.0, 0.0
        """Moments of `time.monotonic`: the beginning of the current wait, and its next probe."""
        self._num_probes = 0
        self.seconds_waited = 0.0
        """Seconds spent in `receive` and `receive_whole` since this mailbox was made."""
        if group is not None:
            Thread(target=_take_in, args=[weakref.ref(self)], name="mailbox", daemon=True).start()

    @cached_property
    def bulk_channel(self) -> BulkChannel:
        """Channel for messages that are too large to wait for; only with several processes."""
        assert self.group is not None, "a single process has no peers to send to"
        return BulkChannel(self.group)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self._world_size) if rank != self._rank)

    def send(self, to: Iterable[int], kind: FrameKind, run: int, call: int, content: Tensor, *, part: int = 0) -> None:
        """Send a (bytes,) uint8 tensor on the host to some ranks without waiting. It must not change afterwards."""
        for rank in to:
            self._port.send(rank, Header(kind, run, call, part, content.numel()), content)

    def receive(self, kind: FrameKind, run: int, call: int, source: int, *, part: int = 0) -> Tensor:
        """Wait for a frame, and return and remove its content.

        Raises:
            ReallocError: if a rank failed, the same on every rank; in the error's class if this package defines it.
        """
        return self._receive(Frame(kind, run, call, source, part), f"waiting for data of rank {source}", (source,))

    def share(self, kind: FrameKind, run: int, call: int, part: Mergeable, contributors: Collection[int]) -> None:
        """Give this rank's part of a whole, without waiting.

        Args:
            kind: Kind of the whole.
            run: Number of the iteration.
            call: Index of the call.
            part: This rank's part: plain data, all of one class.
            contributors: The ranks that give a part, the same on all of them; this one is among them.
        """
        gives = np.zeros(self._world_size, dtype=bool)
        gives[list(contributors)] = True
        with self._taking_in:
            self._add_part(Frame(kind, run, call, WHOLE), self._rank, gives, part)

    def receive_whole(self, kind: FrameKind, run: int, call: int) -> Any:
        """Wait for the merged parts of all contributors, and return them. Every rank must do so.

        Raises:
            ReallocError: as `receive` does.
        """
        return decode_message(self._receive(Frame(kind, run, call, WHOLE), "waiting for data of all ranks", ()))

    def poll(self, awaited: int | None = None) -> None:
        """Store the frames that have arrived, without waiting for others; see `take`.

        Args:
            awaited: Rank that this one waits for, whose connection is tested every few seconds; None: none.

        Raises:
            ReallocError: if a rank failed, as `receive` does.
            RankLost: if the awaited rank has ended.
        """
        while self._take_in_next():
            pass
        if self._failure.is_known:
            self.fail(None)
        if awaited is not None:
            self._probe_if_due([awaited])

    def take(self, kind: FrameKind, run: int, call: int) -> list[tuple[int, Tensor]]:
        """Remove the stored frames of one kind and call; return source and content of each, as they arrived."""
        with self._taking_in:
            frames = [frame for frame in self._arrived if frame[:3] == (kind, run, call)]
            return [(frame.source, self._arrived.pop(frame)) for frame in frames]

    def wait_until(self, is_done: Callable[[], bool], source: int, meanwhile: Callable[[], None]) -> None:
        """Call ``meanwhile`` again and again until a message of ``source`` makes ``is_done`` true.

        Raises:
            RankLost: if that rank has ended.
        """
        self._begin_wait()
        while not is_done():
            meanwhile()
            self._pause([source])

    def release(self, run: int) -> None:
        """Wait until all frames of ``run`` and earlier runs were received, and free their memory."""
        with self.record.during("waiting until data was received", waits_for=()):
            self._port.release(run)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            with self.record.during("waiting for all ranks", waits_for=self.others):
                dist.barrier(group=self.group)

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called on this rank. No other frames can be sent then."""
        return self._failure.has_concluded

    def fail(self, error: Exception | None) -> NoReturn:
        """Raise the error of the lowest failed rank, once all ranks have heard of a failure.

        Args:
            error: This rank's exception; None if only another rank failed.

        Raises:
            ReallocError: that error; the rank on which it happened raises its original object.
        """
        self._failure.conclude(error, self.take_in_quietly)

    def explained(self, error: Exception) -> Exception:
        """See `FailureAgreement.explained`."""
        return self._failure.explained(error)

    # ---- frames
    def _receive(self, frame: Frame, what: str, sources: tuple[int, ...]) -> Tensor:
        """Wait for a frame, and return and remove its content."""
        if frame not in self._arrived:
            begin = time.perf_counter()
            self._begin_wait()
            with self.record.during(what, waits_for=sources):
                while frame not in self._arrived:
                    has_received = self._take_in_next()
                    if self._failure.is_known:
                        self.fail(None)
                    if not has_received:
                        self._pause(sources or self.others)
            self.seconds_waited += time.perf_counter() - begin
        return self._arrived.pop(frame)

    def _take_in_next(self) -> bool:
        """Store or pass on a frame that has arrived; return whether there was one."""
        with self._taking_in:
            if self._broken is not None:
                raise self._broken
            arrived = self._port.next_header()
            if arrived is not None:
                source, header = arrived
                self._store(source, header, self._port.content(source, header.size))
        return arrived is not None

    def take_in_quietly(self) -> bool | None:
        """Store or pass on a frame that has arrived; return whether there was one, None after an error.

        The next wait raises the error.
        """
        try:
            return self._take_in_next()
        except Exception as error:
            self._broken = error
            return None

    def _store(self, source: int, header: Header, content: Tensor) -> None:
        kind, run, call, part, _ = header
        if kind == FrameKind.FAILURE:
            self._failure.learn(part)
        elif kind == FrameKind.PART:
            gives, value = decode_message(content)
            self._add_part(Frame(FrameKind(part), run, call, WHOLE), source, gives, value)
        elif kind in _WHOLES:
            self._pass_down(Frame(FrameKind(kind), run, call, WHOLE), content)
        elif kind != FrameKind.PROBE:
            self._arrived[Frame(FrameKind(kind), run, call, source, part)] = content

    def _add_part(self, whole: Frame, source: int, gives: NDArray[np.bool_], part: Any) -> None:
        """Add a part of a whole, and pass the merged parts on once all parts at and below this rank are here."""
        merged = self._collector.add(whole, source, gives, part)
        if merged is None:
            return
        if self._node.parent is None:
            self._pass_down(whole, encode_message(merged))
        else:
            content = encode_message((gives, merged))
            self.send([self._node.parent], FrameKind.PART, whole.run, whole.call, content, part=whole.kind)

    def _pass_down(self, whole: Frame, content: Tensor) -> None:
        for child in self._node.children:
            with suppress(RankLost):  # the others get it, and the next wait names the lost one
                self.send([child], whole.kind, whole.run, whole.call, content)
        self._arrived[whole] = content

    # ---- waits for ranks that may be lost
    def _pause(self, awaited: Sequence[int]) -> None:
        """Pause between two checks of a wait, and probe one of the awaited ranks if that is due."""
        self._probe_if_due(awaited)
        time.sleep(min(MAX_PAUSE_S, (time.monotonic() - self._wait_began) / 64))

    def _probe_if_due(self, awaited: Sequence[int]) -> None:
        """Probe one of the awaited ranks, by turns: with many ranks that wait, each is probed often."""
        now = time.monotonic()
        if now > self._probe_at:
            awaited = sorted(self._port.lost) or awaited
            self._probe_rank(awaited[(self._rank + self._num_probes) % len(awaited)])
            self._num_probes += 1
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
        self._port.probe(rank)


def _take_in(mailbox: weakref.ref[Mailbox]) -> None:
    """Store and pass on frames until the mailbox is gone, or a connection is broken."""
    pause_s = MAX_PAUSE_S
    while (mine := mailbox()) is not None:
        has_received = mine.take_in_quietly()
        del mine
        if has_received is None:
            return
        pause_s = MAX_PAUSE_S if has_received else min(MAX_IDLE_PAUSE_S, 2 * pause_s)
        time.sleep(pause_s)
