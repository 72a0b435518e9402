"""Frames over gloo: a header of five numbers, and the content in a second message. Any thread may send."""

from __future__ import annotations

from datetime import timedelta
from threading import Lock
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost
from lightning_realloc.runtime.messages.bulk_messages import wait_for

WAITING = "this one waited for its data"
_HEADER_TAG, _CONTENT_TAG = 1, 2


class Header(NamedTuple):
    """First message of a frame."""

    kind: int
    run: int
    call: int
    part: int
    size: int
    """Bytes of the content; 0 if none follows."""


class FrameSend(NamedTuple):
    """A message that was sent and may not have been received; its memory is kept until then."""

    run: int
    work: dist.Work
    memory: Tensor

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once it was received."""
        wait_for(self.work, timeout, meanwhile=WAITING)


class FramePort:
    """Sends frames to any rank, and receives them from any rank.

    Args:
        group: All processes, over gloo. None for a single process, which never sends.
        probe: Kind of a frame without content that tests a connection: sending to a process that has ended fails.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, probe: int) -> None:
        self._group = group
        self._probe = Header(probe, 0, 0, 0, 0)
        self._in_order = Lock()
        """Held while a header and its content are sent: contents arrive in the order of headers."""
        self._sent: list[FrameSend] = []
        """Messages that were sent and not yet waited for."""
        self._probes: dict[int, list[FrameSend]] = {}
        """Rank -> probes since the last frame to it. A rank that is stopped leaves them unread."""
        self._incoming: tuple[dist.Work, Tensor] | None = None
        """The header that is received next, from any rank."""
        self.lost: set[int] = set()
        """Ranks whose process is known to have ended."""

    def send(self, to: int, header: Header, content: Tensor | None = None) -> list[FrameSend]:
        """Send a frame without waiting, and return its messages, which are also kept until `release`.

        Raises:
            RankLost: if the other process has ended.
        """
        with self._in_order:
            sent = [self._start_send(torch.tensor(header), to, _HEADER_TAG, header.run)]
            if content is not None and header.size:
                sent.append(self._start_send(content, to, _CONTENT_TAG, header.run))
            self._sent += sent + self._probes.pop(to, [])  # the probes were received before
        return sent

    def probe(self, rank: int) -> None:
        """Send a probe. Raises RankLost if the other process has ended."""
        with self._in_order:
            sent = self._start_send(torch.tensor(self._probe), rank, _HEADER_TAG, self._probe.run)
            self._probes.setdefault(rank, []).append(sent)

    def release(self, run: int) -> None:
        """Wait until all frames of ``run`` and earlier runs were received, and free their memory."""
        with self._in_order:
            due = [sent for sent in self._sent if sent.run <= run]
            self._sent = [sent for sent in self._sent if sent.run > run]
        for sent in due:
            sent.wait()

    def next_header(self) -> tuple[int, Header] | None:
        """Return the source and the header of the next frame, whose content follows; None if none has arrived.

        A wait of gloo's for any rank never ends when one is lost, and a time-out of gloo's breaks the connections of
        all, so this looks at the memory.
        """
        if self._incoming is None:
            empty = torch.full((len(Header._fields),), -1, dtype=torch.int64)
            self._incoming = self._start_receive(empty, None, _HEADER_TAG), empty
        work, memory = self._incoming
        if memory.numpy()[-1] < 0:
            return None
        wait_for(work, meanwhile=WAITING)
        self._incoming = None
        return int(work._source_rank()), Header(*memory.tolist())

    def content(self, source: int, size: int, timeout: timedelta | None = None) -> Tensor:
        """Return the content of the frame whose header came last from ``source``; waits for it."""
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            wait_for(self._start_receive(content, source, _CONTENT_TAG), timeout, meanwhile=WAITING)
        return content

    def _start_send(self, tensor: Tensor, to: int, tag: int, run: int) -> FrameSend:
        try:
            work = dist.isend(tensor, to, group=self._group, tag=tag)
        except RuntimeError as error:
            self.lost.add(to)
            raise RankLost(f"rank {to} ended before this one could send to it ({error}); see its own log") from error
        assert work is not None, "this rank is part of the group"
        return FrameSend(run, work, tensor)

    def _start_receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        """Start to receive a tensor of one rank, or of any for None."""
        try:
            return cast(dist.Work, dist.irecv(tensor, source, group=self._group, tag=tag))
        except RuntimeError as error:
            raise RankLost(f"a rank ended before this one could receive from it ({error}); see its own log") from error
