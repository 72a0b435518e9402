"""Send and receive large messages in the background.

Both ends identify a message by a number that they know, for example from a common plan. Gloo's threads transfer it. A
message has one or two frames. Gloo's work objects cannot tell whether they are done, so the last byte of each frame is
a mark: a frame has arrived once its buffer ends with the mark. If gloo filled the buffer in another order, the mark
would appear early, and `PendingReceive.wait` would take a little longer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost

_FIRST_TAG = 16
"""First tag of bulk messages. Lower tags belong to the mailbox, which uses the same group."""
_FIRST_FRAME_BYTES = 16_384
"""Size of a message's first frame: 8 bytes for the content's size, the start of the content, and the mark."""
_FIRST_CONTENT_BYTES = _FIRST_FRAME_BYTES - 9
MARK = 0xA5
"""Last byte of a frame that has arrived."""
_EXCHANGING = "this one exchanged a message with it"


class PendingReceive:
    """A message that this rank is receiving."""

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._first = torch.zeros(_FIRST_FRAME_BYTES, dtype=torch.uint8)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._first_work = self._receive(self._first)
        self._rest_work: dist.Work | None = None
        self._is_open = False
        """Whether the first frame has arrived and the receive of the second was started."""

    def has_arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        if not self._is_open:
            if self._first[-1] != MARK:
                return False
            self._open()
        return self._rest_work is None or bool(self._rest[-1] == MARK)

    def wait(self) -> Tensor:
        """Return the content, a (bytes,) uint8 tensor on the host, once it has arrived.

        Raises:
            RankLost: if the other end is gone.
        """
        if not self._is_open:
            self._open()
        if self._rest_work is not None:
            wait_for(self._rest_work, meanwhile=_EXCHANGING)
            self._rest_work = None  # waiting twice for gloo's work never returns
        size = self._size
        head = self._first[8 : 8 + min(size, _FIRST_CONTENT_BYTES)]
        return torch.cat([head, self._rest[:-1]]) if size > _FIRST_CONTENT_BYTES else head

    @property
    def _size(self) -> int:
        return int(self._first[:8].view(torch.int64))

    def _open(self) -> None:
        wait_for(self._first_work, meanwhile=_EXCHANGING)
        self._is_open = True
        if self._size > _FIRST_CONTENT_BYTES:
            self._rest = torch.zeros(self._size - _FIRST_CONTENT_BYTES + 1, dtype=torch.uint8)
            self._rest_work = self._receive(self._rest)

    def _receive(self, frame: Tensor) -> dist.Work:
        work = dist.irecv(frame, self._source, group=self._group, tag=self._tag)
        assert work is not None, "this rank is part of the group"
        return work


class PendingSend:
    """A message that this rank is sending; its memory is kept until `wait` returns."""

    def __init__(self, works: list[dist.Work], frames: list[Tensor], pending: set[PendingSend]) -> None:
        self._works = works
        self._frames = frames  # gloo's work does not keep the memory that it sends from alive
        self._pending = pending
        pending.add(self)

    def wait(self) -> None:
        """Return once the message was sent.

        Raises:
            RankLost: if the other end is gone.
        """
        while self._works:
            wait_for(self._works.pop(0), meanwhile=_EXCHANGING)
        self._pending.discard(self)


class BulkChannel:
    """Sends and receives one rank's large messages. A pair of ranks uses each message number once.

    Args:
        group: All ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: set[PendingSend] = set()

    def send(self, to: int, number: int, content: Tensor) -> PendingSend:
        """Start to send a (bytes,) uint8 tensor on the host, which must not change afterwards."""
        first = torch.zeros(_FIRST_FRAME_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([content.numel()]).view(torch.uint8)
        head, tail = content[:_FIRST_CONTENT_BYTES], content[_FIRST_CONTENT_BYTES:]
        first[8 : 8 + len(head)] = head
        first[-1] = MARK
        frames = [first]
        if len(tail):
            frames.append(torch.cat([tail, torch.tensor([MARK], dtype=torch.uint8)]))
        works = [dist.isend(frame, to, group=self._group, tag=_FIRST_TAG + number) for frame in frames]
        return PendingSend([work for work in works if work is not None], frames, self._pending)

    def receive(self, source: int, number: int) -> PendingReceive:
        """Start to receive the message that ``source`` sends under this number."""
        return PendingReceive(self._group, source, _FIRST_TAG + number)


def wait_for(work: dist.Work, *, meanwhile: str) -> None:
    """Wait for a message. Raises RankLost if the other end is gone; ``meanwhile`` says what was under way."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLost(f"a rank ended while {meanwhile} ({error}); see its own log") from error
