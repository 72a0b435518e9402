"""How do ranks hand each other data without meeting? Every rank has a mailbox, and nobody waits to send.

A frame says what it is (kind, run, call) and who sent it; its content follows in a second message. A rank that waits
for one frame takes in whatever else arrives meanwhile, so frames may come in any order and any two ranks may be an
iteration apart. Frames travel over gloo, between hosts' memories: what ranks hand each other are samples, not weights.

A rank that fails says so to all others instead. Every rank that hears of it says so too, and waits for the rest: so all
of them raise the same error, that of the lowest rank that failed by itself. To have lost another rank, in whatever
collective, is no failure by itself as long as any other is known of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc import errors
from lightning_realloc.errors import RankLost, ReallocError
from lightning_realloc.runtime.messages.bulk_messages import BulkChannel
from lightning_realloc.runtime.messages.failure_store import is_broken_connection, peer_failures, publish_failure

FAILURE_DEADLINE_S = 10.0
"""How long a rank that failed waits for the others to hear of it; one that is stuck in a collective never does."""

_HEADER_TAG, _CONTENT_TAG = 1, 2


class FrameKind(IntEnum):
    """What a frame holds."""

    DIRECTORY = 0
    """What a generating call made: ids, lengths and values per sample; to every rank."""
    ROWS = 1
    """What a call made of some samples, to a rank that works on them next."""
    NOTES = 2
    """Values per sample and times of all calls before training, to every rank."""
    METRICS = 3
    """What a training call measured, to the ranks outside it."""
    FAILURE = 4
    """Why a rank cannot go on."""
    HISTORY = 5
    """What a rank generated in a call, to the drafters of ranks that generate other samples."""
    RETURNED = 6
    """Responses that a rank finished for another one."""


class Frame(NamedTuple):
    """The name of one piece of data on its way."""

    kind: FrameKind
    run: int
    """Number of the walk through the calls, the same on all ranks."""
    call: int
    """Which call it belongs to: its place in the dataflow."""
    source: int
    """Rank that sent it."""
    part: int = 0
    """Which of several of its kind, in one call and from one rank."""


class Mailbox:
    """One rank's letters to the others, and theirs to it.

    Args:
        rank: This process.
        world_size: All processes; a single one never sends.
        group: All of them, over gloo, for nothing else but this; None for a single process.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._world_size, self._group = rank, world_size, group
        self._arrived: dict[Frame, Tensor] = {}
        self._failures: dict[int, tuple[bool, str, str]] = {}
        self._on_the_way: list[tuple[int, dist.Work, Tensor]] = []
        self._freight: BulkChannel | None = None
        self.seconds_waited = 0.0

    @property
    def bulk_channel(self) -> BulkChannel:
        """For what is too large to hold anybody up; between several processes only."""
        if self._freight is None:
            assert self._group is not None, "a single process has nobody to send to"
            self._freight = BulkChannel(self._group)
        return self._freight

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self._world_size) if rank != self._rank)

    def send(self, to: Iterable[int], kind: FrameKind, run: int, call: int, content: Tensor, *, part: int = 0) -> None:
        """Send a (bytes,) uint8 tensor on the host to some ranks, without waiting; it must not change any more."""
        header = torch.tensor([kind, run, call, part, content.numel()], dtype=torch.int64)
        for rank in to:
            self._start(header, rank, _HEADER_TAG, run)
            if content.numel():
                self._start(content, rank, _CONTENT_TAG, run)

    def receive(self, kind: FrameKind, run: int, call: int, source: int, *, part: int = 0) -> Tensor:
        """Return the content of a frame, and forget it; waits until it has come.

        Raises:
            ReallocError: on every rank the same, when a rank failed; of that error's class if it is this package's.
        """
        frame = Frame(kind, run, call, source, part)
        begin = time.perf_counter()
        while frame not in self._arrived:
            self._drain(None)
            if self._failures:
                self.fail(None)
        self.seconds_waited += time.perf_counter() - begin
        return self._arrived.pop(frame)

    def release(self, run: int) -> None:
        """Wait until what was sent in ``run`` and before has been received, and free it."""
        for sent_in, work, _ in self._on_the_way:
            if sent_in <= run:
                self._wait(work, None)
        self._on_the_way = [sent for sent in self._on_the_way if sent[0] > run]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """What carries the frames; None for a single process."""
        return self._group

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._group is not None:
            dist.barrier(group=self._group)

    @property
    def has_failed(self) -> bool:
        """Whether a failure was told or heard of: nothing can be sent any more."""
        return bool(self._failures)

    def fail(self, error: Exception | None) -> NoReturn:
        """Tell all ranks of an error, hear from all of them, and raise the lowest failed rank's. None: of another's.

        Raises:
            ReallocError: that error, or, on the rank it happened on, the error itself.
        """
        if error is not None:
            error = self._own(error)
        self._failures[self._rank] = (error is not None, type(error).__name__, str(error))
        text = json.dumps(self._failures[self._rank]).encode()
        deadline = time.monotonic() + FAILURE_DEADLINE_S
        for rank in self.others:
            with suppress(RankLost):  # it has ended already, which is no reason not to tell the others
                self.send([rank], FrameKind.FAILURE, 0, 0, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        # Without success somebody has ended already, or is stuck where it cannot hear: then raise what is known.
        with suppress(ReallocError):
            while len(self._failures) < self._world_size:
                self._drain(_time_until(deadline))
            for _, work, _ in self._on_the_way[-len(self.others) * 2 :]:
                self._wait(work, _time_until(deadline))
        self._raise_lowest(error)

    def _own(self, error: Exception) -> Exception:
        """Return the error as this rank's, and leave it for who cannot hear; look behind a broken collective."""
        if self._group is None:
            return error
        if not is_broken_connection(error):
            publish_failure(self._rank, error)
            return error
        self._failures |= {rank: (True, *told) for rank, told in peer_failures(self._world_size).items()}
        if isinstance(error, RankLost):
            return error
        lost = RankLost(f"a rank ended while this one waited for it in a collective ({error}); see its own log")
        lost.__cause__ = error
        return lost

    def _raise_lowest(self, own: Exception | None) -> NoReturn:
        told = {rank: name for rank, (is_own, name, _) in sorted(self._failures.items()) if is_own}
        failed = [rank for rank, name in told.items() if name != RankLost.__name__] or list(told)
        if not failed:
            raise ReallocError("another rank ended without saying why; see its own log") from own
        if own is not None and failed[0] == self._rank:
            raise own
        _, name, message = self._failures[failed[0]]
        known = getattr(errors, name, None)
        if isinstance(known, type) and issubclass(known, ReallocError):
            raise known(message) from own
        raise ReallocError(f"rank {failed[0]} failed with {name}: {message}") from own

    def _start(self, tensor: Tensor, to: int, tag: int, run: int) -> None:
        try:
            work = dist.isend(tensor, to, group=self._group, tag=tag)
        except RuntimeError as error:
            raise RankLost(f"rank {to} ended before this one could send to it ({error}); see its own log") from error
        assert work is not None, "this rank is part of the group"
        self._on_the_way.append((run, work, tensor))

    def _drain(self, timeout: timedelta | None) -> None:
        """Receive the next frame, whoever sent it."""
        header = torch.empty(5, dtype=torch.int64)
        work = dist.irecv(header, group=self._group, tag=_HEADER_TAG)
        self._wait(work, timeout)
        source = int(work._source_rank())  # type: ignore[union-attr]
        kind, run, call, part, size = header.tolist()
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            self._wait(dist.irecv(content, source, group=self._group, tag=_CONTENT_TAG), timeout)
        if kind == FrameKind.FAILURE:
            is_own, name, message = json.loads(bytes(content.tolist()))
            self._failures[source] = (is_own, name, message)
        else:
            self._arrived[Frame(FrameKind(kind), run, call, source, part)] = content

    def _wait(self, work: dist.Work | None, timeout: timedelta | None) -> None:
        assert work is not None, "this rank is part of the group"
        try:
            work.wait(timeout) if timeout is not None else work.wait()
        except RuntimeError as error:
            raise RankLost(f"a rank ended while this one waited for its data ({error}); see its own log") from error


def _time_until(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))
